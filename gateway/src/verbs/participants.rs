//! Imports with several writers: a participant joins an open session, keeps itself alive, finishes its part; whoever
//! commits looks who is missing. The fold decides, and nodes hold what was written.

use ballast_schemas::{
    BallastError, Command, ImportReply, JoinImport, JoinImportReply, JoinImportRequest, PartReply, PartRequest,
    PartWriter, Reply, SessionRequest, TokenPart,
};
use ballast_workflows::State;

use super::{imports, unexpected};
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
    let (position, reply) = context.submit(call, &request.options, Command::JoinImport(command)).await?;
    let Reply::Part(part) = reply else { return Err(unexpected(&reply)) };
    // What a repeat hears is as old as its first answer: meanwhile another run may have joined, or another import begun.
    let own = PartWriter {
        identity,
        session_id,
        participant: part.participant.clone(),
        instance: part.instance.clone(),
        epoch: part.epoch,
    };
    let session = context.replica.read(|state| {
        state.expect_part(&own)?;
        state.open_import(&own.identity, &own.session_id).cloned()
    })?;
    let endpoints = imports::endpoints_of(context, &session).await?;
    let token_part = TokenPart { participant: part.participant.clone(), epoch: part.epoch };
    let token = context.tokens.issue_part(&session, token_part);
    Answer::new(position.seq, &JoinImportReply { session, part: *part, endpoints, token })
}

pub(super) async fn renew(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let (request, writer) = part_of(call)?;
    // Not under the caller's id: every renewal counts from its own entry.
    let (position, reply) = context.submit_afresh(&request, Command::RenewPart(writer)).await?;
    let Reply::Part(part) = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &PartReply { part: *part })
}

pub(super) async fn finish(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let (request, writer) = part_of(call)?;
    let (position, reply) = context.submit(call, &request, Command::FinishPart(writer)).await?;
    let Reply::Part(part) = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &PartReply { part: *part })
}

fn part_of(call: &Call) -> Result<(ballast_schemas::RequestOptions, PartWriter), BallastError> {
    let request = call.read::<PartRequest>()?;
    let PartRequest { identity, session_id, participant, instance, epoch } = request.body;
    call.check_tenant(&identity)?;
    Ok((request.options, PartWriter { identity, session_id, participant, instance, epoch }))
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
