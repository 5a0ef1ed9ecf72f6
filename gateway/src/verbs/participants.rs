//! Imports with several writers: a participant joins an open session, keeps itself alive, finishes its part; whoever
//! commits looks who is missing. The fold decides, and nodes hold what was written.

use std::collections::BTreeMap;

use ballast_schemas::{
    BallastError, Command, ErrorCode, ImportReply, ImportSession, JoinImport, JoinImportReply, JoinImportRequest,
    PartReply, PartRequest, PartWriter, Reply, RequestOptions, RevisionIdentity, SessionRequest, TokenPart, lost_parts,
};
use ballast_workflows::State;
use serde_json::json;

use super::{checks, imports, unexpected};
use crate::context::Context;
use crate::request::{Answer, Call};

pub(super) async fn join(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<JoinImportRequest>()?;
    let JoinImportRequest { identity, session_id, participant, writer_id, placement_digest } = request.body;
    call.check_tenant(&identity)?;
    let command = JoinImport {
        identity: identity.clone(),
        session_id: session_id.clone(),
        participant,
        writer_id,
        placement_digest,
    };
    // Under the caller's id: a repeat that is read late must not take the place of a later run.
    let joined = context.submit(call, &request.options, Command::JoinImport(command)).await;
    let (position, reply) = joined.map_err(|error| published_by(context, &identity, error))?;
    let Reply::Part(part) = reply else { return Err(unexpected(&reply)) };
    // What a repeat hears is as old as its first answer: meanwhile another run may have joined, or another import begun.
    let own = PartWriter {
        identity,
        session_id,
        participant: part.participant.clone(),
        instance: part.instance.clone(),
        epoch: part.epoch,
        incarnations: BTreeMap::new(),
    };
    let (session, token) = token_of(context, &own)?;
    let endpoints = imports::endpoints_of(context, &session).await?;
    Answer::new(position.seq, &JoinImportReply { session, part: *part, endpoints, token })
}

/// The session of a participant's run that may still speak, and a token for it.
fn token_of(context: &Context, own: &PartWriter) -> Result<(ImportSession, String), BallastError> {
    let session = context.replica.read(|state| {
        state.expect_part(own)?;
        state.open_import(&own.identity, &own.session_id).cloned()
    })?;
    let token_part = TokenPart { participant: own.participant.clone(), epoch: own.epoch };
    let token = context.tokens.issue_part(&session, token_part);
    Ok((session, token))
}

/// A refusal to import says which session of several writers has published the revision: whoever repeats that one's job goes on
/// by comparing. Not the fold's to say, whose outcomes stay as they are.
pub(super) fn published_by(context: &Context, identity: &RevisionIdentity, mut error: BallastError) -> BallastError {
    let published = || context.replica.read(|state| state.published_by(identity).cloned());
    if error.code == ErrorCode::Conflict
        && let Some(session_id) = published()
    {
        if !error.details.is_object() {
            error.details = json!({});
        }
        error.details["published_by"] = session_id.as_str().into();
    }
    error
}

pub(super) async fn renew(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let (request, writer) = part_of(call)?;
    // Not under the caller's id: every renewal counts from its own entry.
    let (position, reply) = context.submit_afresh(&request, Command::RenewPart(writer.clone())).await?;
    let Reply::Part(part) = reply else { return Err(unexpected(&reply)) };
    // Whoever was just heard of writes on, however long it takes: the fold has refused all others.
    let (_, token) = token_of(context, &writer)?;
    Answer::new(position.seq, &PartReply { part: *part, token: Some(token) })
}

pub(super) async fn finish(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let (request, writer) = part_of(call)?;
    let (position, reply) = context.submit(call, &request, Command::FinishPart(writer)).await?;
    let Reply::Part(part) = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &PartReply { part: *part, token: None })
}

fn part_of(call: &Call) -> Result<(RequestOptions, PartWriter), BallastError> {
    let request = call.read::<PartRequest>()?;
    checks::part(&request.body)?;
    let PartRequest { identity, session_id, participant, instance, epoch, incarnations } = request.body;
    call.check_tenant(&identity)?;
    Ok((request.options, PartWriter { identity, session_id, participant, instance, epoch, incarnations }))
}

/// No participant's bytes have gone with a node that was restarted since it finished, as far as this gateway knows.
pub(super) fn expect_kept(context: &Context, identity: &RevisionIdentity) -> Result<(), BallastError> {
    let parts = context.replica.read(|state| state.import_parts(identity));
    if parts.is_empty() {
        return Ok(());
    }
    let nodes = context.directory.nodes().into_iter();
    let runs = nodes.map(|status| (status.endpoint.node, status.incarnation)).collect();
    lost_parts(&parts, &runs).map_or(Ok(()), |lost| Err(lost.into()))
}

pub(super) async fn get(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<SessionRequest>()?;
    let SessionRequest { identity, session_id, coordinator } = request.body;
    call.check_tenant(&identity)?;
    let look = |state: &State| -> Result<ImportReply, BallastError> {
        // Anybody may look; a coordinator hears when it is the session's no more.
        let session = match &coordinator {
            None => state.open_import(&identity, &session_id)?,
            own => state.coordinated_import(&identity, &session_id, own.as_ref())?,
        };
        let participants = state.import_parts(&identity);
        Ok(ImportReply { session: session.clone(), participants, log_clock: state.log_clock() })
    };
    let (seq, found) = context.read(&request.options, look).await?;
    Answer::new(seq, &found?)
}
