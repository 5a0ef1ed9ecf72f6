//! What every verb works with: the replica, the directory of nodes, token issue, metrics; and the two ways to act on the
//! log: submit a command, or read a state that is fresh enough.

use std::time::{Duration, Instant};

use ballast_journal::nodes::{Directory, NodeClient};
use ballast_journal::{Replica, SubmitError, WaitError, fresh_command_id};
use ballast_schemas::{
    BallastError, COMMAND_WINDOW_MS, ClusterId, Command, CommandId, Consistency, ErrorCode, LogPosition, ReplicaId,
    Reply, RequestOptions, hash_prefixed,
};
use ballast_workflows::State;

use crate::metrics::Metrics;
use crate::placement::Promises;
use crate::request::{Call, CallTenant};
use crate::tokens::TokenIssuer;

/// How long a request waits for the entry that its `min_log_seq` names.
const MIN_LOG_SEQ_PATIENCE: Duration = Duration::from_secs(5);

/// Milliseconds after the log clock up to which a mutation may stay good, as its sender reads the clock.
const NOT_AFTER_MS_MAX: u64 = 90_000;
/// Milliseconds for which the log remembers an outcome. The difference is for senders whose clock is ahead of this replica's.
const REMEMBERED_MS: u64 = 2 * COMMAND_WINDOW_MS;

/// What verbs work with.
#[derive(Debug)]
pub(crate) struct Context {
    pub replica: Replica,
    pub directory: Directory,
    pub nodes: NodeClient,
    pub tokens: TokenIssuer,
    pub metrics: Metrics,
    pub promises: Promises,
    pub cluster_id: ClusterId,
    pub replica_id: ReplicaId,
    /// Bytes of one answer.
    pub answer_bytes_max: usize,
}

impl Context {
    /// Waits until the state is as fresh as the request wants it, if it is still wanted. For a query, a barrier when it is to be
    /// linearizable.
    pub(crate) async fn freshen(&self, options: &RequestOptions) -> Result<(), BallastError> {
        self.expect_in_time(options)?;
        if let Some(seq) = options.min_log_seq {
            self.replica.wait_for(seq, MIN_LOG_SEQ_PATIENCE).await.map_err(wait_error)?;
        }
        match options.consistency {
            Consistency::Local => Ok(()),
            Consistency::Linearizable => self.barrier().await,
        }
    }

    /// Looks at a state that is as fresh as the request wants it; also the sequence it reflects.
    pub(crate) async fn read<R>(
        &self,
        options: &RequestOptions,
        look: impl FnOnce(&State) -> R,
    ) -> Result<(u64, R), BallastError> {
        self.freshen(options).await?;
        Ok(self.replica.read(|state| (state.log_seq(), look(state))))
    }

    /// Looks at the state before a mutation. What it refuses is looked at again behind a barrier: no mutation is refused only
    /// because this gateway has not folded yet what another one answered.
    pub(crate) async fn decide<T>(
        &self,
        options: &RequestOptions,
        look: impl Fn(&State) -> Result<T, BallastError>,
    ) -> Result<T, BallastError> {
        self.freshen(options).await?;
        if let Ok(found) = self.replica.read(&look) {
            return Ok(found);
        }
        self.barrier().await?;
        self.replica.read(&look)
    }

    /// Waits until everything that was durable by now is folded here.
    pub(crate) async fn barrier(&self) -> Result<(), BallastError> {
        self.replica.barrier().await.map(drop).map_err(submit_error)
    }

    /// Appends a command for a call and returns its position and what the fold answered.
    pub(crate) async fn submit(
        &self,
        call: &Call,
        options: &RequestOptions,
        command: Command,
    ) -> Result<(LogPosition, Reply), BallastError> {
        let id = options.request_id.as_deref().map_or_else(fresh_command_id, |id| command_id(&call.tenant, id));
        self.submit_as(id, options, command).await
    }

    /// As [`Context::submit`], for a command that the caller's own id (session, lease) makes safe to repeat and whose content
    /// may differ between repeats.
    pub(crate) async fn submit_afresh(
        &self,
        options: &RequestOptions,
        command: Command,
    ) -> Result<(LogPosition, Reply), BallastError> {
        self.submit_as(fresh_command_id(), options, command).await
    }

    async fn submit_as(
        &self,
        id: CommandId,
        options: &RequestOptions,
        command: Command,
    ) -> Result<(LogPosition, Reply), BallastError> {
        self.expect_in_time(options)?;
        let started = Instant::now();
        let submitted = self.replica.submit_as(id, options.not_after, command).await;
        self.metrics.command_took(started.elapsed());
        let (position, outcome) = submitted.map_err(submit_error)?;
        let outcome = outcome.map_err(|rejection| match (BallastError::from(rejection), options.not_after) {
            // The fold refuses so what comes too late, by the command's own word.
            (error, Some(_)) if error.code == ErrorCode::Unavailable => for_field(error, "options.not_after"),
            (error, _) => error,
        });
        Ok((position, outcome?))
    }
}

impl Context {
    /// What is too late by this replica's clock is not begun; the fold has the last word on what is sent. And a repeat must not
    /// outlive the memory of the first outcome, or it would be decided a second time.
    fn expect_in_time(&self, options: &RequestOptions) -> Result<(), BallastError> {
        let Some(not_after) = options.not_after else { return Ok(()) };
        let clock = self.replica.read(State::log_clock);
        if clock > not_after {
            return Err(for_field(State::too_late(clock, not_after).into(), "options.not_after"));
        }
        if not_after <= clock.plus_ms(REMEMBERED_MS) {
            return Ok(());
        }
        let message = format!(
            "options.not_after is {}, which is more than {NOT_AFTER_MS_MAX} ms after the log clock, {}; read it with verb clock and add at most as much",
            not_after.0, clock.0
        );
        Err(BallastError::invalid(message)
            .with_details(serde_json::json!({ "field": "options.not_after", "log_clock": clock })))
    }
}

/// The command id of a caller's request id: the same for the same tenant and id, through any gateway.
fn command_id(tenant: &CallTenant, request_id: &str) -> CommandId {
    let digest = hash_prefixed([tenant.name().as_bytes(), request_id.as_bytes()]);
    // 8 + 64 visible ASCII characters are a command id; a fresh one would only lose the idempotency.
    CommandId::new(format!("request-{digest}")).unwrap_or_else(|_| fresh_command_id())
}

/// What a caller hears of a command without an outcome.
fn submit_error(error: SubmitError) -> BallastError {
    let outcome_unknown = error.outcome_unknown();
    let mut error = BallastError::from(error);
    error.details["outcome_unknown"] = outcome_unknown.into();
    error
}

/// An error that lies in what the caller gave, and not in what can be reached: the same request hears it again.
fn for_field(mut error: BallastError, field: &str) -> BallastError {
    error.message = format!("{field}: {}", error.message);
    if !error.details.is_object() {
        error.details = serde_json::json!({});
    }
    error.details["field"] = field.into();
    error
}

fn wait_error(error: WaitError) -> BallastError {
    let is_callers = matches!(error, WaitError::TimedOut { .. });
    let message = match error {
        WaitError::TimedOut { wanted, at, waited_ms } => {
            format!(
                "min_log_seq is {wanted}, but this gateway has folded {at} and nothing more came for {waited_ms} ms; give a sequence that a reply carried"
            )
        }
        WaitError::Stopped(_) => error.to_string(),
    };
    let error = BallastError::new(ErrorCode::Unavailable, message);
    if is_callers { for_field(error, "options.min_log_seq") } else { error }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::TenantId;

    use super::*;

    #[test]
    fn a_command_id_follows_from_tenant_and_request_id() {
        let tenant = |name: &str| CallTenant::Named(TenantId::new(name).unwrap());
        let id = command_id(&tenant("a"), "r");
        assert_eq!(id, command_id(&tenant("a"), "r"));
        assert_ne!(id, command_id(&tenant("b"), "r"));
        assert_ne!(id, command_id(&tenant("a"), "s"));
        assert!(id.as_str().starts_with("request-"));
    }
}
