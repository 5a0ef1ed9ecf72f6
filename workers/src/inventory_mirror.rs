//! Keeps the published inventories of a node equal to what its store holds (see ARCHITECTURE.md, The three authorities).
//!
//! What a control request touched is looked at within a tenth of a second, everything every second (uploads and reads change
//! holdings too). One inventory stands for a (node, group); of several instances of a group the newest is shown.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream;
use ballast_journal::{Streams, publish_inventory, withdraw_inventory};
use ballast_schemas::{GroupId, InstanceId, NodeInventory, subject};
use ballast_transfer::NodeStore;
use futures::TryStreamExt;
use tokio::sync::Notify;
use tokio::time::Instant;

/// At most ten inventories a second of one group.
const COALESCE: Duration = Duration::from_millis(100);
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Instances that may look different since they were last looked at. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Touched(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    instances: Mutex<BTreeSet<InstanceId>>,
    wake: Notify,
    start_over: AtomicBool,
}

impl Touched {
    /// Notes that an instance may look different.
    pub(crate) fn touch(&self, instance: &InstanceId) {
        self.lock().insert(instance.clone());
        self.0.wake.notify_one();
    }

    /// Notes that what was published may be lost: everything is published once more.
    pub(crate) fn start_over(&self) {
        self.0.start_over.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> BTreeSet<InstanceId> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<InstanceId>> {
        // A set changed in single statements can not be torn by a panic elsewhere.
        self.0.instances.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The published inventories of one node.
#[derive(Debug)]
pub(crate) struct InventoryMirror {
    store: Arc<NodeStore>,
    streams: Streams,
    touched: Touched,
    published: BTreeMap<GroupId, NodeInventory>,
}

impl InventoryMirror {
    /// A mirror that has published nothing yet.
    pub(crate) fn new(store: Arc<NodeStore>, streams: Streams, touched: Touched) -> Self {
        Self { store, streams, touched, published: BTreeMap::new() }
    }

    /// Publishes for as long as it is polled.
    pub(crate) async fn run(mut self) {
        while let Err(reason) = self.withdraw_stale().await {
            tracing::debug!(reason, "the inventories of an earlier run can not be looked at yet");
            tokio::time::sleep(SWEEP_EVERY).await;
        }
        let mut next_sweep = Instant::now();
        loop {
            if Instant::now() >= next_sweep {
                self.touched.take();
                if self.touched.0.start_over.swap(false, Ordering::Relaxed) {
                    self.published.clear();
                }
                self.sweep().await;
                next_sweep = Instant::now() + SWEEP_EVERY;
            } else {
                let touched = self.touched.take();
                self.look_at(touched).await;
            }
            tokio::time::sleep(COALESCE).await;
            // A touch that came meanwhile has left its permit.
            let _ = tokio::time::timeout_at(next_sweep, self.touched.0.wake.notified()).await;
        }
    }

    /// Withdraws what an earlier run of the node published and this one does not hold. A withdrawal that is itself from an
    /// earlier run has been heard by everybody: its record goes.
    async fn withdraw_stale(&self) -> Result<(), String> {
        let context = jetstream::new(self.streams.client().clone());
        let stream = context.get_stream(subject::INVENTORY_STREAM).await.map_err(|error| error.to_string())?;
        let node = self.store.node();
        let held: BTreeSet<String> =
            self.held().await?.keys().map(|group| subject::inventory(node, group.hex())).collect();
        let all = subject::inventory(node, ">");
        let mut subjects = stream.info_with_subjects(all).await.map_err(|error| error.to_string())?;
        while let Some((subject, _)) = subjects.try_next().await.map_err(|error| error.to_string())? {
            if held.contains(&subject) {
                continue;
            }
            let last = stream.direct_get_last_for_subject(subject.clone()).await.map_err(|error| error.to_string())?;
            match ballast_schemas::from_messagepack::<NodeInventory>(&last.payload) {
                Ok(inventory) => withdraw_inventory(&self.streams, node, &inventory.instance.group_id)
                    .await
                    .map_err(|error| error.to_string())?,
                Err(_) => {
                    stream.purge().filter(subject).await.map_err(|error| error.to_string())?;
                }
            }
        }
        Ok(())
    }

    /// Compares everything.
    async fn sweep(&mut self) {
        let held = match self.held().await {
            Ok(held) => held,
            Err(reason) => return tracing::warn!(reason, "what the node holds can not be listed"),
        };
        let gone: Vec<GroupId> = self.published.keys().filter(|group| !held.contains_key(*group)).cloned().collect();
        // When one can not be published the others can not either; each try would wait for its time-out.
        for group in gone {
            if !self.withdraw(&group).await {
                return;
            }
        }
        for inventory in held.into_values() {
            if !self.show(inventory).await {
                return;
            }
        }
    }

    /// Compares what was touched.
    async fn look_at(&mut self, touched: BTreeSet<InstanceId>) {
        for instance in touched {
            let newer_shown =
                self.published.get(&instance.group_id).is_some_and(|shown| shown.instance.position > instance.position);
            if newer_shown {
                continue;
            }
            let (store, asked) = (Arc::clone(&self.store), instance.clone());
            // An instance that is kept but not served is as good as not here.
            let published = match tokio::task::spawn_blocking(move || store.inventory(&asked).ok().flatten()).await {
                Ok(Some(inventory)) => self.show(inventory).await,
                Ok(None) if self.published.get(&instance.group_id).is_some_and(|shown| shown.instance == instance) => {
                    self.withdraw(&instance.group_id).await
                }
                Ok(None) => true,
                Err(error) => {
                    tracing::warn!(%instance, %error, "what the node holds can not be looked at");
                    true
                }
            };
            if !published {
                return;
            }
        }
    }

    /// The newest instance of each group that is served.
    async fn held(&self) -> Result<BTreeMap<GroupId, NodeInventory>, String> {
        let store = Arc::clone(&self.store);
        let inventories =
            tokio::task::spawn_blocking(move || store.inventories()).await.map_err(|error| error.to_string())?;
        let mut held: BTreeMap<GroupId, NodeInventory> = BTreeMap::new();
        for inventory in inventories {
            let group = inventory.instance.group_id.clone();
            if held.get(&group).is_none_or(|shown| shown.instance.position < inventory.instance.position) {
                held.insert(group, inventory);
            }
        }
        Ok(held)
    }

    /// Tells whether it is published now. What is not differs at the next sweep as well, and is tried again then.
    async fn show(&mut self, inventory: NodeInventory) -> bool {
        let group = &inventory.instance.group_id;
        if self.published.get(group) == Some(&inventory) {
            return true;
        }
        let published = publish_inventory(&self.streams, &inventory).await;
        match published {
            Ok(()) => drop(self.published.insert(group.clone(), inventory)),
            Err(error) => {
                tracing::debug!(%error, "inventory not published");
                return false;
            }
        }
        true
    }

    /// Tells whether it is withdrawn now.
    async fn withdraw(&mut self, group: &GroupId) -> bool {
        let withdrawn = withdraw_inventory(&self.streams, self.store.node(), group).await;
        match withdrawn {
            Ok(()) => drop(self.published.remove(group)),
            Err(error) => {
                tracing::debug!(%error, "inventory not withdrawn");
                return false;
            }
        }
        true
    }
}
