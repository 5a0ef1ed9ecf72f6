//! Operations: look at one, list a tenant's, and cancel, pause, resume or retry one. Another tenant's operation is not found.

use ballast_schemas::{
    BallastError, Command, ErrorCode, ListOperationsRequest, OperationId, OperationReply, OperationRequest,
    OperationsReply, WeightOperation,
};

use super::{answer_with, checks};
use crate::context::Context;
use crate::request::{Answer, Call};

pub(super) async fn get(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<OperationRequest>()?;
    let id = request.body.operation_id;
    let (log_seq, found) = context.read(&request.options, |state| state.operation(&id).cloned()).await?;
    let operation = own(call, &id, found)?;
    Answer::new(log_seq, &OperationReply { operation })
}

pub(super) async fn list(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<ListOperationsRequest>()?;
    let ListOperationsRequest { all, limit } = request.body;
    checks::list_limit(limit)?;
    let tenant = call.named_tenant()?;
    context.freshen(&request.options).await?;
    // As many of the newest as fit into one answer.
    let mut limit = limit;
    loop {
        let (log_seq, operations) =
            context.replica.read(|state| (state.log_seq(), state.operations(tenant, all, limit)));
        let answer = Answer::new(log_seq, &OperationsReply { operations })?;
        if answer.body.len() <= context.answer_bytes_max || limit == 1 {
            return Ok(answer);
        }
        limit = limit.div_ceil(2);
    }
}

pub(super) async fn steer(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<OperationRequest>()?;
    let id = request.body.operation_id;
    context.decide(&request.options, |state| own(call, &id, state.operation(&id).cloned())).await?;
    let command = match call.verb {
        "cancel_operation" => Command::CancelOperation(id),
        "pause_operation" => Command::PauseOperation(id),
        "resume_operation" => Command::ResumeOperation(id),
        _ => Command::RetryOperation(id),
    };
    let (position, reply) = context.submit(call, &request.options, command).await?;
    answer_with(position, reply)
}

fn own(call: &Call, id: &OperationId, found: Option<WeightOperation>) -> Result<WeightOperation, BallastError> {
    found.filter(|operation| call.tenant.is(&operation.identity.tenant_id)).ok_or_else(|| {
        let message = format!(
            "tenant {} has no operation {id}; `list_operations` (`ballast op --all`) shows those there are",
            call.tenant.name()
        );
        BallastError::new(ErrorCode::NotFound, message)
    })
}
