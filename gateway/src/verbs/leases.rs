//! Leases: acquire, renew, release. A lease protects the readable replicas of a revision while it is read; the reply to
//! `acquire_lease` says where they are and opens those nodes' doors.

use std::time::Duration;

use ballast_schemas::{
    AcquireLease, AcquireLeaseReply, AcquireLeaseRequest, Availability, BallastError, Command, ErrorCode, InstanceId,
    LeaseReply, NodeEndpoint, NodeId, ReleaseLease, ReleaseLeaseReply, ReleaseLeaseRequest, RenewLease,
    RenewLeaseRequest, Reply,
};

use super::{checks, unexpected};
use crate::context::Context;
use crate::request::{Answer, Call};

/// How long a revision's nodes are waited for before a lease on it is refused.
const HOLDERS_PATIENCE: Duration = Duration::from_secs(3);

pub(super) async fn acquire(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<AcquireLeaseRequest>()?;
    let AcquireLeaseRequest { identity, lease_id, holder, ttl_ms } = request.body;
    call.check_tenant(&identity)?;
    checks::lease_ttl(ttl_ms)?;
    checks::holder(&holder)?;
    context.freshen(&request.options).await?;
    let record = context.replica.read(|state| state.revision(&identity).cloned());
    // A lease on bytes that nobody can reach would only hold up their migration. Anything else about it is the fold's to say.
    if let Some(record) = record.filter(|record| record.availability == Availability::Ready) {
        reach(context, &record.instance, &record.placement).await?;
    }
    let command = AcquireLease { identity: identity.clone(), lease_id, holder, ttl_ms };
    let (position, reply) = context.submit(call, &request.options, Command::AcquireLease(command)).await?;
    let Reply::Lease(lease) = reply else { return Err(unexpected(&reply)) };
    let gone = || {
        BallastError::new(
            ErrorCode::NotReady,
            format!("{identity} was replaced or deleted while the lease was granted; look again"),
        )
    };
    let revision = context.replica.read(|state| state.revision(&identity).cloned());
    let revision = revision.filter(|revision| revision.instance == lease.instance).ok_or_else(gone)?;
    let endpoints = holders(context, &lease.instance, &revision.placement);
    let token = context.tokens.issue_read(&lease, &endpoints);
    Answer::new(position.seq, &AcquireLeaseReply { lease: lease.into_inner(), revision, endpoints, token })
}

/// Waits a little for a live node that holds some of the instance.
async fn reach(context: &Context, instance: &InstanceId, placement: &[NodeId]) -> Result<(), BallastError> {
    let found = context
        .directory
        .wait_for(HOLDERS_PATIENCE, |_| (!holders(context, instance, placement).is_empty()).then_some(()))
        .await;
    found.ok_or_else(|| {
        let names: Vec<&str> = placement.iter().map(NodeId::as_str).collect();
        let message = format!(
            "no node that holds {instance} answers (it was placed on {}): start its transfer worker",
            names.join(", ")
        );
        BallastError::new(ErrorCode::Unavailable, message)
    })
}

/// Live nodes that hold some of the instance, those with most in memory first; before any inventory came, its placement.
fn holders(context: &Context, instance: &InstanceId, placement: &[NodeId]) -> Vec<NodeEndpoint> {
    let group = context.directory.group(instance);
    let mut ranked: Vec<(u32, u32, NodeId)> = group
        .nodes
        .into_values()
        .map(|inventory| (inventory.hot.count(), inventory.cold.count(), inventory.node))
        .filter(|(hot, cold, _)| hot + cold > 0)
        .collect();
    ranked.sort_by(|a, b| b.cmp(a));
    let nodes: Vec<NodeId> = match ranked.is_empty() {
        true => placement.to_vec(),
        false => ranked.into_iter().map(|(_, _, node)| node).collect(),
    };
    context.directory.endpoints(&nodes)
}

pub(super) async fn renew(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<RenewLeaseRequest>()?;
    let RenewLeaseRequest { identity, lease_id, ttl_ms } = request.body;
    call.check_tenant(&identity)?;
    checks::lease_ttl(ttl_ms)?;
    let command = RenewLease { identity, lease_id, ttl_ms };
    // Not under the caller's id: every renewal counts from its own entry.
    let (position, reply) = context.submit_afresh(&request.options, Command::RenewLease(command)).await?;
    let Reply::Lease(lease) = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &LeaseReply { lease: lease.into_inner() })
}

pub(super) async fn release(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<ReleaseLeaseRequest>()?;
    let ReleaseLeaseRequest { identity, lease_id } = request.body;
    call.check_tenant(&identity)?;
    let command = ReleaseLease { identity, lease_id };
    let (position, reply) = context.submit(call, &request.options, Command::ReleaseLease(command)).await?;
    let Reply::LeaseEnded { lapsed } = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &ReleaseLeaseReply { lapsed })
}
