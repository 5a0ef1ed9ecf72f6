//! Watches over published revisions: compares what the log says of them with what nodes publish, and tells the log when one
//! degraded, recovered, or wants repair (RFC, State Model). What follows from a look is decided by
//! `ballast_workflows::verdict`.
//!
//! Driven by changes of inventories, of nodes and of the log. Published inventories only raise a suspicion: before anything
//! is told, every node of the placement is asked, and every other that published something of it. Any number may watch: what a second one tells is a repeat, or stale.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ballast_journal::Replica;
use ballast_journal::nodes::{Directory, NodeCallError, NodeClient};
use ballast_schemas::{
    Bitmap, Command, GroupInventory, InstanceId, LogPosition, NodeEvidence, NodeId, NodeReply, NodeRequest,
    OperationId, OperationStatus, Reply, WeightRevisionMetadata,
};
use ballast_workflows::verdict;
use tokio::time::Instant;

use crate::failpoint::{Failpoint, Side, command_name};

/// Changes that come this close together are looked at together.
const COALESCE: Duration = Duration::from_millis(250);
/// A node that was not heard of for this long beyond its silence holds nothing that can be read.
const AWAY_GRACE: Duration = Duration::from_secs(10);
/// While something is suspected or a node is away, it is looked at again after this long without a change.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// A repair of what looks as it did at the last attempt is tried again after this long.
const REPAIR_AGAIN: Duration = Duration::from_secs(600);

/// What a group looked like: the bitmaps of every node, and the run of its process.
type Look = Vec<(NodeId, String, Bitmap, Bitmap)>;

/// A repair that began here.
#[derive(Debug)]
struct Tried {
    operation_id: OperationId,
    look: Look,
    at: Instant,
}

/// The watch of one worker.
#[derive(Debug)]
pub(crate) struct LossWatch {
    replica: Replica,
    directory: Directory,
    nodes: NodeClient,
    failpoint: Failpoint,
    /// Since when a node of some placement has not been heard of.
    away: BTreeMap<NodeId, Instant>,
    /// The last repair of an instance.
    tried: BTreeMap<InstanceId, Tried>,
}

impl LossWatch {
    pub(crate) fn new(replica: Replica, directory: Directory, nodes: NodeClient, failpoint: Failpoint) -> Self {
        Self { replica, directory, nodes, failpoint, away: BTreeMap::new(), tried: BTreeMap::new() }
    }

    /// Watches for as long as it is polled.
    pub(crate) async fn run(mut self) {
        self.failpoint.pause_watch().await;
        let (mut nodes, mut log) = (self.directory.changes(), self.replica.changes());
        loop {
            self.directory.settled().await;
            nodes.borrow_and_update();
            log.borrow_and_update();
            let open = self.look_at_all().await;
            let again = async {
                match open {
                    true => tokio::time::sleep(LOOK_AGAIN).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = nodes.changed() => if changed.is_err() { return },
                changed = log.changed() => if changed.is_err() { return },
                () = again => {}
            }
            tokio::time::sleep(COALESCE).await;
        }
    }

    /// Tells whether something is still open: suspected, or waiting for a grace period.
    async fn look_at_all(&mut self) -> bool {
        let published: Vec<WeightRevisionMetadata> = self.replica.read(|state| state.published().cloned().collect());
        self.note_away(&published);
        self.tried.retain(|instance, _| published.iter().any(|metadata| metadata.instance == *instance));
        let mut open = !self.away.is_empty();
        for metadata in published {
            if self.is_suspect(&metadata) {
                open |= !self.look_at(&metadata).await;
            }
        }
        open
    }

    fn note_away(&mut self, published: &[WeightRevisionMetadata]) {
        let serves = |node: &NodeId| self.directory.node(node).is_some_and(|status| status.not_serving.is_none());
        let mut away = BTreeMap::new();
        for node in published.iter().flat_map(|metadata| &metadata.placement) {
            if !away.contains_key(node) && !serves(node) {
                let since = self.away.get(node).copied().unwrap_or_else(Instant::now);
                away.insert(node.clone(), since);
            }
        }
        self.away = away;
    }

    /// Whether the published inventories say otherwise than the log. A node that is away keeps its word for the grace period.
    fn is_suspect(&self, metadata: &WeightRevisionMetadata) -> bool {
        let waits = |node: &NodeId| self.away.get(node).is_some_and(|since| since.elapsed() < AWAY_GRACE);
        if metadata.placement.iter().any(waits) {
            return false;
        }
        let held = self.directory.group(&metadata.instance);
        let follows = self.replica.read(|state| verdict(state, metadata, &held, Vec::new(), None));
        follows.is_some_and(|command| !self.was_tried(metadata, &command, &held))
    }

    /// Whether a repair of what looks the same came to nothing a while ago. After one that succeeded it is another loss, however
    /// alike it looks.
    fn was_tried(&self, metadata: &WeightRevisionMetadata, command: &Command, held: &GroupInventory) -> bool {
        let succeeded = |id| {
            let status = self.replica.read(|state| state.operation(id).map(|operation| operation.status));
            status == Some(OperationStatus::Succeeded)
        };
        matches!(command, Command::StartRepair(_))
            && self.tried.get(&metadata.instance).is_some_and(|tried| {
                tried.look == look_of(held) && tried.at.elapsed() < REPAIR_AGAIN && !succeeded(&tried.operation_id)
            })
    }

    /// Asks every node that may hold some of it, and tells the log what follows. Tells whether that is settled.
    async fn look_at(&mut self, metadata: &WeightRevisionMetadata) -> bool {
        let fence = self.replica.read(|state| state.effect_fence(&metadata.identity));
        let mut held = GroupInventory::default();
        let mut evidence = Vec::new();
        // A replica in object storage may be with a node that it was not placed on.
        let mut nodes: BTreeSet<NodeId> = metadata.placement.iter().cloned().collect();
        nodes.extend(self.directory.group(&metadata.instance).nodes.into_keys());
        for node in &nodes {
            match self.ask(node, &metadata.instance, fence).await {
                Ok(NodeReply::Inventory(inventory)) => {
                    let (incarnation, fence) = (inventory.incarnation.clone(), inventory.fence);
                    evidence.push(NodeEvidence { node: node.clone(), incarnation, fence });
                    held.nodes.insert(node.clone(), *inventory);
                }
                // It holds nothing, or nothing that anybody could read.
                Ok(NodeReply::Absent) => evidence.push(nothing(node, fence)),
                Err(NodeCallError::NotListening { .. } | NodeCallError::Silent { .. })
                    if self.away.contains_key(node) =>
                {
                    evidence.push(nothing(node, fence));
                }
                Ok(_) | Err(_) => return false,
            }
        }
        let mut index = None;
        for node in held.nodes.keys() {
            index = self.nodes.affinity_index(node, &metadata.instance).await.ok();
            if index.is_some() {
                break;
            }
        }
        let follows = self.replica.read(|state| verdict(state, metadata, &held, evidence, index.as_ref()));
        let Some(command) = follows.filter(|command| !self.was_tried(metadata, command, &held)) else { return true };
        let repairs = matches!(command, Command::StartRepair(_));
        let (revision, name) = (&metadata.identity, command_name(&command));
        self.failpoint.strike("loss", name, Side::Before);
        let told = self.replica.submit(command).await;
        self.failpoint.strike("loss", name, Side::After);
        match told {
            Ok((_, Ok(reply))) => {
                tracing::info!(%revision, command = name, "told the log");
                // Only what began was tried: a refusal says that the record moved on.
                if let (true, Reply::Operation(begun)) = (repairs, reply) {
                    let tried =
                        Tried { operation_id: begun.operation_id.clone(), look: look_of(&held), at: Instant::now() };
                    self.tried.insert(metadata.instance.clone(), tried);
                }
            }
            // The record or the nodes moved on: the next look decides anew.
            Ok((_, Err(rejection))) => {
                tracing::debug!(%revision, command = name, reason = rejection.message, "not wanted");
                return false;
            }
            Err(error) => {
                tracing::warn!(%revision, command = name, %error, "the log gave no answer");
                return false;
            }
        }
        true
    }

    /// What a node holds, under the last effect that the log authorised: an older one that is still under way is refused from
    /// then on.
    async fn ask(&self, node: &NodeId, instance: &InstanceId, fence: LogPosition) -> Result<NodeReply, NodeCallError> {
        let asked = self.nodes.call(node, &NodeRequest::Inventory { instance: instance.clone() }, |_| {}).await?;
        match asked {
            NodeReply::Inventory(inventory) if inventory.fence < fence => {
                self.nodes.call(node, &NodeRequest::RaiseFence { instance: instance.clone(), fence }, |_| {}).await
            }
            other => Ok(other),
        }
    }
}

fn nothing(node: &NodeId, fence: LogPosition) -> NodeEvidence {
    NodeEvidence { node: node.clone(), incarnation: String::new(), fence }
}

fn look_of(held: &GroupInventory) -> Look {
    let look = |(node, held): (&NodeId, &ballast_schemas::NodeInventory)| {
        (node.clone(), held.incarnation.clone(), held.hot.clone(), held.cold.clone())
    };
    held.nodes.iter().map(look).collect()
}
