//! Loss, as people ask about it: have a revision repaired, and have its bytes read back and compared. Losses are noticed and
//! repaired without anybody's asking too (workers).

use std::collections::BTreeSet;

use ballast_journal::nodes::NodeCallError;
use ballast_schemas::{
    Availability, BallastError, Command, ErrorCode, GroupInventory, InstanceId, NodeId, NodeReply, NodeRequest,
    RepairReply, RepairRequest, Reply, StartRepair, VerifyReply, VerifyRequest, WeightRevisionMetadata,
};
use ballast_workflows::verdict;

use super::revisions::not_found;
use super::unexpected;
use crate::context::Context;
use crate::request::{Answer, Call};

/// How often a round of a verification is begun that gave way to an effect.
const VERIFY_TRIES: u32 = 5;

pub(super) async fn repair(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<RepairRequest>()?;
    let RepairRequest { identity, expected_metadata_generation } = request.body;
    call.check_tenant(&identity)?;
    let (log_seq, found) = context.read(&request.options, |state| state.revision(&identity).cloned()).await?;
    let metadata = found.ok_or_else(|| not_found(&identity))?;
    let held = held(context, &metadata).await;
    let wanted = context.replica.read(|state| verdict(state, &metadata, &held, Vec::new(), None)).is_some();
    if !wanted && metadata.operation_id.is_none() && metadata.availability == Availability::Ready {
        if let Some(expected) = expected_metadata_generation {
            context.replica.read(|state| state.expect_recent(&identity, expected))?;
        }
        return Answer::new(log_seq, &RepairReply { operation: None });
    }
    let expected_metadata_generation = expected_metadata_generation.unwrap_or(metadata.metadata_generation);
    let command = Command::StartRepair(StartRepair { identity, expected_metadata_generation });
    let (position, reply) = context.submit(call, &request.options, command).await?;
    let Reply::Operation(operation) = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &RepairReply { operation: Some(operation.into_inner()) })
}

/// What the nodes hold, from themselves: what they publish may be a moment old. One that does not answer holds nothing.
async fn held(context: &Context, metadata: &WeightRevisionMetadata) -> GroupInventory {
    let mut held = GroupInventory::default();
    for node in &holders(context, metadata) {
        let request = NodeRequest::Inventory { instance: metadata.instance.clone() };
        if let Ok(NodeReply::Inventory(found)) = context.nodes.call(node, &request, |_| {}).await {
            held.nodes.insert(node.clone(), *found);
        }
    }
    held
}

pub(super) async fn verify(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<VerifyRequest>()?;
    let VerifyRequest { identity, from } = request.body;
    call.check_tenant(&identity)?;
    let (log_seq, found) = context.read(&request.options, |state| state.revision(&identity).cloned()).await?;
    let metadata = found.ok_or_else(|| not_found(&identity))?;
    let units = units_of(&metadata)?;
    let (mut nodes, mut next) = (Vec::new(), None);
    for node in &holders(context, &metadata) {
        match verify_round(context, node, &metadata.instance, from).await {
            Ok(NodeReply::Verified(found)) => {
                // Rounds follow from the layout, so that all nodes go on at the same unit.
                next = found.next;
                nodes.push(*found);
            }
            Err(NodeCallError::Failed { error, .. }) if error.code == ErrorCode::NotFound => {}
            Ok(other) => {
                let message = format!("node {node} answered verify with {other:?}; it must be of the same version");
                return Err(BallastError::new(ErrorCode::Unavailable, message));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Answer::new(log_seq, &VerifyReply { nodes, units, next })
}

/// Nodes that may hold some of it: those it was placed on, and those that took over what these kept in object storage.
fn holders(context: &Context, metadata: &WeightRevisionMetadata) -> BTreeSet<NodeId> {
    let published = context.directory.group(&metadata.instance).nodes.into_keys();
    metadata.placement.iter().cloned().chain(published).collect()
}

/// A round on a node. One that gave way to an effect that the log authorised meanwhile has found nothing, and is asked for
/// again.
async fn verify_round(
    context: &Context,
    node: &NodeId,
    instance: &InstanceId,
    from: u32,
) -> Result<NodeReply, NodeCallError> {
    let round = NodeRequest::Verify { instance: instance.clone(), from };
    let mut tries = 1;
    loop {
        match context.nodes.call(node, &round, |_| {}).await {
            Err(NodeCallError::Failed { error, .. }) if tries < VERIFY_TRIES && error.details["reason"] == "FENCED" => {
                tries += 1;
            }
            answer => return answer,
        }
    }
}

fn units_of(metadata: &WeightRevisionMetadata) -> Result<u32, BallastError> {
    let manifest = metadata
        .manifest
        .as_ref()
        .filter(|_| matches!(metadata.availability, Availability::Ready | Availability::Degraded));
    manifest.map(|manifest| manifest.affinity_count).ok_or_else(|| {
        let message = format!(
            "{} is {}, expected READY or DEGRADED: there is nothing to read back",
            metadata.identity, metadata.availability
        );
        BallastError::new(ErrorCode::NotReady, message)
    })
}
