//! Generation replacement: claim a lineage for a successor, give the claim up, look at it. The target itself is imported like
//! any revision, while the claim is open.

use ballast_schemas::{
    AbortReplacement, BallastError, BeginReplacement, ClaimReply, Command, ErrorCode, Reply, UpsertIdRequest,
    UpsertRequest, default_upsert_request_id,
};

use super::{checks, unexpected};
use crate::context::Context;
use crate::request::{Answer, Call};

pub(super) async fn upsert(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<UpsertRequest>()?;
    call.check_tenant(&request.body.base)?;
    call.check_tenant(&request.body.target)?;
    checks::upsert(&request.body)?;
    let UpsertRequest { base, target, mode, expected_metadata_generation, replacement_request_id, policy } =
        request.body;
    // Without an id of its own the same call derives the same one, so that a retry after a lost reply finds its claim.
    let derived = || default_upsert_request_id(&base, &target, mode, expected_metadata_generation);
    let request_id = replacement_request_id.unwrap_or_else(derived);
    let command = BeginReplacement { base, target, mode, expected_metadata_generation, request_id, policy };
    context.freshen(&request.options).await?;
    let (position, reply) = context.submit(call, &request.options, Command::BeginReplacement(command)).await?;
    let Reply::Claim(claim) = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &ClaimReply { claim: *claim })
}

pub(super) async fn abort(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<UpsertIdRequest>()?;
    let UpsertIdRequest { identity, replacement_request_id } = request.body;
    call.check_tenant(&identity)?;
    let missing =
        || BallastError::invalid("replacement_request_id is missing; name the claim to give up (get_upsert shows it)");
    let request_id = replacement_request_id.ok_or_else(missing)?;
    checks::replacement_request_id(&request_id)?;
    let command = AbortReplacement { lineage: identity.lineage(), request_id };
    let (position, reply) = context.submit(call, &request.options, Command::AbortReplacement(command)).await?;
    let Reply::Claim(claim) = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &ClaimReply { claim: *claim })
}

pub(super) async fn get(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<UpsertIdRequest>()?;
    let UpsertIdRequest { identity, replacement_request_id } = request.body;
    call.check_tenant(&identity)?;
    replacement_request_id.as_deref().map_or(Ok(()), checks::replacement_request_id)?;
    let lineage = identity.lineage();
    let (log_seq, latest) = context.read(&request.options, |state| state.claim(&lineage).cloned()).await?;
    let found = latest.filter(|claim| replacement_request_id.as_ref().is_none_or(|id| *id == claim.request_id));
    let claim = found.ok_or_else(|| {
        let which = replacement_request_id.map(|id| format!(" with request id {id:?}")).unwrap_or_default();
        BallastError::new(ErrorCode::NotFound, format!("lineage {lineage} has no replacement claim{which}"))
    })?;
    Answer::new(log_seq, &ClaimReply { claim })
}
