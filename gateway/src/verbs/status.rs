//! `status`: the cluster, this replica, and how many of everything there are. `clock`: where the log clock stands.

use ballast_schemas::{BallastError, ClockReply, StatusReply, StatusRequest};

use ballast_workflows::State;

use crate::context::Context;
use crate::request::{Answer, Call};

pub(super) async fn clock(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<StatusRequest>()?;
    let (log_seq, log_clock) = context.read(&request.options, State::log_clock).await?;
    Answer::new(log_seq, &ClockReply { log_clock })
}

pub(super) async fn status(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<StatusRequest>()?;
    context.freshen(&request.options).await?;
    context.directory.settled().await;
    let nodes = context.directory.nodes();
    let reply = context.replica.read(|state| {
        let counts = state.counts();
        StatusReply {
            cluster_id: context.cluster_id.to_string(),
            incarnation: state.cluster().map_or(0, |cluster| cluster.incarnation),
            replica_id: context.replica_id.to_string(),
            folded_seq: state.log_seq(),
            revisions: counts
                .revisions
                .iter()
                .map(|(availability, count)| (availability.name().to_owned(), *count))
                .collect(),
            active_operations: counts.active_operations,
            active_leases: counts.active_leases,
            default_policy: state.config().default_policy,
            nodes,
        }
    });
    Answer::new(reply.folded_seq, &reply)
}
