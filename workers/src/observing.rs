//! What a worker looks at before it decides: what every holder of an instance says it holds, and the instance's units (RFC,
//! safety invariant 10: the next action follows from persisted state and actual replicas).
//!
//! A holder that does not answer is a failure, never an absence.

use std::collections::BTreeSet;
use std::time::Duration;

use ballast_journal::Replica;
use ballast_journal::nodes::{Directory, NodeClient};
use ballast_schemas::{
    AffinityIndex, BallastError, ErrorCode, GroupInventory, InstanceId, NodeId, NodeStatus, WeightOperation,
};
use ballast_workflows::{Observation, State};
use futures::future::join_all;

/// Holders asked at once.
const ASKED_AT_ONCE: usize = 16;
/// How long the status of a holder that has just come is waited for.
const STATUS_PATIENCE: Duration = Duration::from_millis(2_500);

/// Looks at instances on the nodes that hold them.
#[derive(Clone, Debug)]
pub(crate) struct Observer {
    pub replica: Replica,
    pub directory: Directory,
    pub nodes: NodeClient,
}

impl Observer {
    /// What the holders of `instance` say. `index` is what was learned of its units before: those never change.
    ///
    /// # Errors
    /// `UNAVAILABLE` when a holder does not say what it holds.
    pub(crate) async fn observe(
        &self,
        operation: &WeightOperation,
        instance: &InstanceId,
        index: Option<AffinityIndex>,
    ) -> Result<Observation, BallastError> {
        self.directory.settled().await;
        let holders = self.holders(operation, instance);
        let mut inventory = GroupInventory::default();
        for some in holders.chunks(ASKED_AT_ONCE) {
            let asked = some.iter().map(|node| self.nodes.inventory(node, instance));
            for answer in join_all(asked).await {
                if let Some(held) = answer.map_err(|error| does_not_say(&error))? {
                    inventory.nodes.insert(held.node.clone(), held);
                }
            }
        }
        let cold_nodes = self.cold_nodes(inventory.nodes.keys()).await?;
        let index = match index {
            Some(index) => Some(index),
            None => self.index(instance, &inventory).await?,
        };
        Ok(Observation::new(instance.clone(), inventory, index, cold_nodes))
    }

    /// Nodes that may hold some of `instance`: those it was placed on, and those that said so.
    fn holders(&self, operation: &WeightOperation, instance: &InstanceId) -> Vec<NodeId> {
        let mut holders = self.replica.read(|state| placement(state, operation, instance));
        holders.extend(self.directory.group(instance).nodes.into_keys());
        holders.into_iter().collect()
    }

    /// Which of `nodes` have a cold tier.
    async fn cold_nodes(&self, nodes: impl Iterator<Item = &NodeId>) -> Result<BTreeSet<NodeId>, BallastError> {
        let mut cold = BTreeSet::new();
        for node in nodes {
            // Not knowing whether there is a cold tier must not look like there being none: that would end the operation.
            let status: Option<NodeStatus> =
                self.directory.wait_for(STATUS_PATIENCE, |directory| directory.node(node)).await;
            let status = status.ok_or_else(|| {
                BallastError::new(
                    ErrorCode::Unavailable,
                    format!("node {node} answers but has not told its status yet"),
                )
            })?;
            if status.cold_capacity_bytes > 0 {
                cold.insert(node.clone());
            }
        }
        Ok(cold)
    }

    /// The units of `instance`, from the first holder of its manifest that says. `None` when nobody holds the manifest.
    async fn index(
        &self,
        instance: &InstanceId,
        inventory: &GroupInventory,
    ) -> Result<Option<AffinityIndex>, BallastError> {
        let mut failure = None;
        for (node, _) in inventory.nodes.iter().filter(|(_, held)| held.manifest) {
            match self.nodes.affinity_index(node, instance).await {
                Ok(index) => return Ok(Some(index)),
                Err(error) => failure = Some(does_not_say(&error)),
            }
        }
        failure.map_or(Ok(None), Err)
    }
}

fn does_not_say(error: &impl std::fmt::Display) -> BallastError {
    BallastError::new(ErrorCode::Unavailable, error.to_string())
}

/// Where `instance` was placed: it is the operation's own, or the target of the replacement that the operation drives.
fn placement(state: &State, operation: &WeightOperation, instance: &InstanceId) -> BTreeSet<NodeId> {
    let target = state.claim(&operation.identity.lineage()).map(|claim| &claim.target);
    let base = state.claim(&operation.identity.lineage()).map(|claim| &claim.base);
    let candidates = [Some(&operation.identity), target, base].into_iter().flatten();
    let found =
        candidates.filter_map(|identity| state.revision(identity)).find(|metadata| metadata.instance == *instance);
    found.map(|metadata| metadata.placement.iter().cloned().collect()).unwrap_or_default()
}
