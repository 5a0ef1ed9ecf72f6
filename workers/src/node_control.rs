//! The node's answers to control requests: each in a task of its own, its blocking work on a blocking thread, with a sign of life
//! twice a second until the end (see ARCHITECTURE.md, Nodes). What an effect does and in which order the effects on one
//! instance are carried out is the store's matter.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ballast_journal::nodes::{NodeCall, NodeListener, NodeProgress};
use ballast_schemas::{BallastError, ErrorCode, InstanceId, NodeReply, NodeRequest};
use ballast_transfer::{NodeStore, Progress, StoreError};
use tokio::task::JoinSet;

use crate::failpoint::{Failpoint, Side, request_name};
use crate::inventory_mirror::Touched;

/// Half of what the asking side is promised.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);
/// How long a release waits for readers before it says BUSY and the operation parks.
const READERS_WAIT: Duration = Duration::from_secs(2);
/// The machine's name in failpoints.
const MACHINE: &str = "node";

/// Carries requests out on a store.
#[derive(Clone, Debug)]
pub(crate) struct NodeControl {
    pub store: Arc<NodeStore>,
    /// Told which instance may look different now.
    pub touched: Touched,
    pub failpoint: Failpoint,
}

impl NodeControl {
    /// Answers requests until `stop` resolves; then lets those under way end for at most `grace`.
    pub(crate) async fn serve(self, mut listener: NodeListener, stop: impl Future<Output = ()>, grace: Duration) {
        let mut tasks = JoinSet::new();
        tokio::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                call = listener.next() => match call {
                    Some(call) => {
                        let control = self.clone();
                        tasks.spawn(async move { control.answer(call).await });
                    }
                    None => break,
                },
                Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
            }
        }
        if tokio::time::timeout(grace, async { while tasks.join_next().await.is_some() {} }).await.is_err() {
            tracing::warn!(requests = tasks.len(), "stopping in the middle of control requests; they are asked again");
        }
    }

    async fn answer(&self, call: NodeCall) {
        let request = call.request.clone();
        let name = request_name(&request);
        let failpoint = self.failpoint.clone();
        let progress = Arc::new(Progress::watched(move || failpoint.strike(MACHINE, name, Side::Middle)));
        let (control, watched) = (self.clone(), Arc::clone(&progress));
        let mut work = tokio::task::spawn_blocking(move || control.carry_out(&request, &watched));
        let mut tick = tokio::time::interval(PROGRESS_EVERY);
        // The first tick is immediate, and most requests are done before a sign of life means anything.
        tick.tick().await;
        let reply = loop {
            tokio::select! {
                done = &mut work => break done.unwrap_or_else(|error| {
                    tracing::error!(request = name, %error, "a control request ended badly");
                    NodeReply::Failed(BallastError::new(ErrorCode::Unavailable, format!("{name} ended badly on the node: {error}")))
                }),
                _ = tick.tick() => {
                    let so_far = NodeProgress { units: progress.units(), bytes: progress.bytes() };
                    if let Err(error) = call.progress(so_far).await {
                        tracing::debug!(request = name, %error, "progress not sent");
                    }
                }
            }
        };
        if let NodeReply::Failed(error) = &reply {
            tracing::info!(request = name, %error, "control request failed");
        }
        if let Err(error) = call.finish(reply).await {
            // The asker hears nothing, takes the node for dead and asks again: every effect skips what is done.
            tracing::warn!(request = name, %error, "the end of a control request was not sent");
        }
    }

    /// Blocks for as long as bytes move.
    fn carry_out(&self, request: &NodeRequest, progress: &Progress) -> NodeReply {
        let name = request_name(request);
        self.failpoint.strike(MACHINE, name, Side::Before);
        let reply =
            carry_out(&self.store, request, progress).unwrap_or_else(|error| NodeReply::Failed(error.to_error()));
        self.failpoint.strike(MACHINE, name, Side::After);
        self.touched.touch(instance_of(request));
        reply
    }
}

fn carry_out(store: &NodeStore, request: &NodeRequest, progress: &Progress) -> Result<NodeReply, StoreError> {
    let held = |inventory| NodeReply::Inventory(Box::new(inventory));
    Ok(match request {
        NodeRequest::Inventory { instance } => store.inventory(instance)?.map_or(NodeReply::Absent, held),
        NodeRequest::Receipt { instance, session_id } => {
            NodeReply::Receipt(Box::new(store.receipt(instance, session_id)?))
        }
        NodeRequest::AffinityIndex { instance } => NodeReply::AffinityIndex(Box::new(store.affinity_index(instance)?)),
        NodeRequest::RaiseFence { instance, fence } => match store.raise_fence(instance, *fence) {
            // There is nothing here that an older effect could hurt.
            Err(StoreError::Unknown { .. } | StoreError::Deleted { .. }) => NodeReply::Absent,
            raised => held(raised?),
        },
        NodeRequest::CopyToCold(effect) => held(store.copy_to_cold(effect, progress)?),
        NodeRequest::CopyToMemory(effect) => held(store.copy_to_memory(effect, progress)?),
        NodeRequest::ReleaseMemory(effect) => held(store.release_memory(effect, READERS_WAIT, progress)?),
        NodeRequest::DeleteUnits(effect) => store.delete_units(effect, progress)?.map_or(NodeReply::Absent, held),
        NodeRequest::DeleteInstance { instance, fence } => {
            store.delete_instance(instance, *fence, progress)?;
            NodeReply::Absent
        }
        NodeRequest::Verify { instance, from } => {
            NodeReply::Verified(Box::new(store.verify(instance, *from, progress)?))
        }
    })
}

fn instance_of(request: &NodeRequest) -> &InstanceId {
    match request {
        NodeRequest::Inventory { instance }
        | NodeRequest::Receipt { instance, .. }
        | NodeRequest::AffinityIndex { instance }
        | NodeRequest::RaiseFence { instance, .. }
        | NodeRequest::Verify { instance, .. }
        | NodeRequest::DeleteInstance { instance, .. } => instance,
        NodeRequest::CopyToCold(effect)
        | NodeRequest::CopyToMemory(effect)
        | NodeRequest::ReleaseMemory(effect)
        | NodeRequest::DeleteUnits(effect) => &effect.instance,
    }
}
