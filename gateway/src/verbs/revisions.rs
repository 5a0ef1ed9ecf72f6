//! Discovery and the mutations of a published revision: policy, migration, removal, purging a tombstone.

use ballast_schemas::{
    Availability, BallastError, Command, ErrorCode, GetSizeReply, IdentityRequest, IsExistReply, ListRequest,
    MigrateRequest, MigrationTrigger, PurgeTombstone, Remove, RemoveRequest, RevisionIdentity, StartMigration,
    UpdatePolicy, UpdatePolicyRequest,
};

use super::{answer_with, checks};
use crate::context::Context;
use crate::request::{Answer, Call};

pub(super) async fn is_exist(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<IdentityRequest>()?;
    let identity = request.body.identity;
    call.check_tenant(&identity)?;
    let (log_seq, view) = context.read(&request.options, |state| state.view(&identity)).await?;
    let exists = view.is_some_and(|view| view.metadata.availability == Availability::Ready);
    Answer::new(log_seq, &IsExistReply { exists })
}

pub(super) async fn get_metadata(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<IdentityRequest>()?;
    let identity = request.body.identity;
    call.check_tenant(&identity)?;
    let (log_seq, view) = context.read(&request.options, |state| state.view(&identity)).await?;
    Answer::new(log_seq, &view.ok_or_else(|| not_found(&identity))?)
}

pub(super) async fn get_size(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<IdentityRequest>()?;
    let identity = request.body.identity;
    call.check_tenant(&identity)?;
    let (log_seq, view) = context.read(&request.options, |state| state.view(&identity)).await?;
    let metadata = view.ok_or_else(|| not_found(&identity))?.metadata;
    let manifest = metadata.manifest.filter(|_| metadata.availability == Availability::Ready).ok_or_else(|| {
        let message = format!("{identity} is {}: a size is told of a READY revision only", metadata.availability);
        BallastError::new(ErrorCode::NotReady, message)
    })?;
    Answer::new(log_seq, &GetSizeReply { logical_bytes: manifest.logical_bytes })
}

pub(super) fn not_found(identity: &RevisionIdentity) -> BallastError {
    BallastError::new(
        ErrorCode::NotFound,
        format!("there is no revision {identity}; `list` (`ballast ls --all`) shows those there are"),
    )
}

pub(super) async fn list(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<ListRequest>()?;
    let mut body = request.body;
    checks::list(&body)?;
    let tenant = call.named_tenant()?;
    context.freshen(&request.options).await?;
    // Identities may be long: a page that does not fit into one answer is made shorter, and the next one begins there.
    loop {
        let (log_seq, page) = context.replica.read(|state| (state.log_seq(), state.list(tenant, &body)));
        let answer = Answer::new(log_seq, &page?)?;
        if answer.body.len() <= context.answer_bytes_max || body.limit == 1 {
            return Ok(answer);
        }
        body.limit = body.limit.div_ceil(2);
    }
}

pub(super) async fn update_policy(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<UpdatePolicyRequest>()?;
    let UpdatePolicyRequest { identity, policy, expected_metadata_generation } = request.body;
    call.check_tenant(&identity)?;
    let command = Command::UpdatePolicy(UpdatePolicy { identity, policy, expected_metadata_generation });
    let (position, reply) = context.submit(call, &request.options, command).await?;
    answer_with(position, reply)
}

pub(super) async fn migrate(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<MigrateRequest>()?;
    call.check_tenant(&request.body.identity)?;
    checks::migrate(&request.body)?;
    let MigrateRequest { identity, target, mixed_hot_ratio, expected_metadata_generation } = request.body;
    let trigger = MigrationTrigger::Explicit;
    let command =
        StartMigration { identity, target, target_hot_ratio: mixed_hot_ratio, expected_metadata_generation, trigger };
    let (position, reply) = context.submit(call, &request.options, Command::StartMigration(command)).await?;
    answer_with(position, reply)
}

pub(super) async fn remove(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<RemoveRequest>()?;
    let RemoveRequest { identity, expected_metadata_generation } = request.body;
    call.check_tenant(&identity)?;
    let command = Command::Remove(Remove { identity, expected_metadata_generation });
    let (position, reply) = context.submit(call, &request.options, command).await?;
    answer_with(position, reply)
}

pub(super) async fn purge(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<IdentityRequest>()?;
    let identity = request.body.identity;
    call.check_tenant(&identity)?;
    let (position, reply) =
        context.submit(call, &request.options, Command::PurgeTombstone(PurgeTombstone { identity })).await?;
    answer_with(position, reply)
}
