//! The directory: nodes that were heard of lately, and the last inventory of each (node, group).
//!
//! It is a view of what nodes say, never an authority: a node answers for itself when asked, and the log decides what an
//! instance is worth. See ARCHITECTURE.md, Three authorities.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_schemas::subject::{self, NODE_STATUS_SUBJECTS};
use ballast_schemas::{GroupInventory, InstanceId, NodeEndpoint, NodeId, NodeInventory, NodeStatus};
use futures::StreamExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::inventory::{InventoryUpdate, InventoryWatch};
use crate::streams::Streams;

/// A node that said nothing for this long is taken for dead.
pub const NODE_SILENCE: Duration = Duration::from_secs(5);
/// Nodes say how they are every second; who has listened for this long has heard every live one.
const SETTLE: Duration = Duration::from_millis(1_500);
/// How often the dead are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(500);
const RETRY_EVERY: Duration = Duration::from_millis(200);

/// The directory of one process. Cheap to clone; it stops listening when the last clone is gone.
#[derive(Debug, Clone)]
pub struct Directory {
    table: Arc<Table>,
    _listeners: Arc<Listeners>,
}

#[derive(Debug)]
struct Listeners(Vec<JoinHandle<()>>);

impl Drop for Listeners {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

#[derive(Debug)]
struct Table {
    contents: Mutex<Contents>,
    /// Counts what changed: nodes that came, went, restarted or freed memory, and inventories.
    changes: watch::Sender<u64>,
    /// Since when statuses are heard.
    listening_since: watch::Sender<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Contents {
    nodes: BTreeMap<NodeId, Heard>,
    /// By the group's hex digits, then by the node's subject token.
    inventories: BTreeMap<String, BTreeMap<String, NodeInventory>>,
}

#[derive(Debug)]
struct Heard {
    status: NodeStatus,
    at: Instant,
}

impl Heard {
    fn is_alive(&self) -> bool {
        self.at.elapsed() < NODE_SILENCE
    }
}

impl Directory {
    /// Begins to listen.
    pub fn start(streams: &Streams) -> Self {
        let table = Arc::new(Table {
            contents: Mutex::new(Contents::default()),
            changes: watch::Sender::new(0),
            listening_since: watch::Sender::new(None),
        });
        let listeners = vec![
            tokio::spawn(hear_statuses(Arc::clone(&table), streams.clone())),
            tokio::spawn(hear_inventories(Arc::clone(&table), InventoryWatch::new(streams))),
        ];
        Self { table, _listeners: Arc::new(Listeners(listeners)) }
    }

    /// Every live node, by name.
    pub fn nodes(&self) -> Vec<NodeStatus> {
        let contents = self.table.contents();
        contents.nodes.values().filter(|heard| heard.is_alive()).map(|heard| heard.status.clone()).collect()
    }

    /// The node's status, if it lives.
    pub fn node(&self, node: &NodeId) -> Option<NodeStatus> {
        let contents = self.table.contents();
        contents.nodes.get(node).filter(|heard| heard.is_alive()).map(|heard| heard.status.clone())
    }

    /// Where the live ones among `nodes` listen, in the order given.
    pub fn endpoints(&self, nodes: &[NodeId]) -> Vec<NodeEndpoint> {
        nodes.iter().filter_map(|node| self.node(node)).map(|status| status.endpoint).collect()
    }

    /// What live nodes hold of `instance`, as they last said.
    pub fn group(&self, instance: &InstanceId) -> GroupInventory {
        let contents = self.table.contents();
        let inventories = contents.inventories.get(instance.group_id.hex());
        let of_instance =
            inventories.into_iter().flat_map(BTreeMap::values).filter(|inventory| inventory.instance == *instance);
        let alive = of_instance.filter(|inventory| contents.nodes.get(&inventory.node).is_some_and(Heard::is_alive));
        GroupInventory { nodes: alive.map(|inventory| (inventory.node.clone(), inventory.clone())).collect() }
    }

    /// Changes whenever a node came, went, restarted or freed memory, or an inventory changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.table.changes.subscribe()
    }

    /// Waits until statuses were heard for long enough to know every live node. At once, except right after the start.
    pub async fn settled(&self) {
        let mut listening = self.table.listening_since.subscribe();
        loop {
            let since = *listening.borrow_and_update();
            match since.map(|since| SETTLE.saturating_sub(since.elapsed())) {
                Some(Duration::ZERO) => return,
                Some(rest) => tokio::time::sleep(rest).await,
                None => {
                    if listening.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Waits until `accept` finds what it looks for, for at most `patience`.
    pub async fn wait_for<T>(&self, patience: Duration, mut accept: impl FnMut(&Directory) -> Option<T>) -> Option<T> {
        let deadline = tokio::time::Instant::now() + patience;
        let mut changes = self.changes();
        loop {
            changes.borrow_and_update();
            if let Some(found) = accept(self) {
                return Some(found);
            }
            match tokio::time::timeout_at(deadline, changes.changed()).await {
                Ok(Ok(())) => {}
                _ => return accept(self),
            }
        }
    }
}

impl Table {
    fn contents(&self) -> MutexGuard<'_, Contents> {
        // No code panics between two consistent states of `Contents`.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn hear(&self, status: NodeStatus) {
        let node = status.endpoint.node.clone();
        let heard = Heard { status, at: Instant::now() };
        let mut contents = self.contents();
        let is_news = match contents.nodes.get(&node) {
            Some(before) => {
                !before.is_alive()
                    || before.status.incarnation != heard.status.incarnation
                    || before.status.not_serving != heard.status.not_serving
                    || before.status.endpoint != heard.status.endpoint
                    || before.status.memory_free_bytes() < heard.status.memory_free_bytes()
            }
            None => true,
        };
        contents.nodes.insert(node, heard);
        drop(contents);
        if is_news {
            self.changed();
        }
    }

    /// Forgets nodes that fell silent. Their inventories stay: they are true again once the node is back.
    fn bury(&self) {
        let mut contents = self.contents();
        let before = contents.nodes.len();
        contents.nodes.retain(|_, heard| heard.is_alive());
        let after = contents.nodes.len();
        drop(contents);
        if after < before {
            self.changed();
        }
    }

    fn take(&self, update: InventoryUpdate) {
        let mut contents = self.contents();
        match update {
            InventoryUpdate::Present(inventory) => {
                let group = inventory.instance.group_id.hex().to_owned();
                contents
                    .inventories
                    .entry(group)
                    .or_default()
                    .insert(subject::token(inventory.node.as_str()), *inventory);
            }
            InventoryUpdate::Withdrawn { node, group_hex } => {
                if let Some(nodes) = contents.inventories.get_mut(&group_hex) {
                    nodes.remove(&node);
                    if nodes.is_empty() {
                        contents.inventories.remove(&group_hex);
                    }
                }
            }
            InventoryUpdate::StartedOver => contents.inventories.clear(),
        }
        drop(contents);
        self.changed();
    }
}

async fn hear_statuses(table: Arc<Table>, streams: Streams) {
    loop {
        let mut statuses = match streams.client().subscribe(NODE_STATUS_SUBJECTS).await {
            Ok(statuses) => statuses,
            Err(error) => {
                tracing::warn!(%error, "node statuses can not be heard yet");
                tokio::time::sleep(RETRY_EVERY).await;
                continue;
            }
        };
        table.listening_since.send_replace(Some(Instant::now()));
        let mut look = tokio::time::interval(LOOK_EVERY);
        loop {
            tokio::select! {
                message = statuses.next() => match message {
                    Some(message) => match serde_json::from_slice::<NodeStatus>(&message.payload) {
                        Ok(status) => table.hear(status),
                        Err(error) => tracing::warn!(subject = %message.subject, %error, "unreadable node status ignored"),
                    },
                    None => break,
                },
                _ = look.tick() => table.bury(),
            }
        }
        table.listening_since.send_replace(None);
        tokio::time::sleep(RETRY_EVERY).await;
    }
}

async fn hear_inventories(table: Arc<Table>, mut watch: InventoryWatch) {
    loop {
        let update = watch.next().await;
        table.take(update);
    }
}
