//! The verbs, one file per family. Each reads its request strictly, refuses what no state could accept, and then either asks the
//! log (mutations) or the folded state (queries). What a state does not accept is decided by the fold alone.
//!
//! Not here: subjects, concurrency and deadlines (`service.rs`, `inbox.rs`).

pub(crate) mod checks;
mod imports;
mod leases;
mod lineage;
mod operations;
mod participants;
mod repair;
mod revisions;
mod status;

use ballast_schemas::{BallastError, ErrorCode, LogPosition, OperationReply, Reply, RevisionReply};
use serde::Serialize;

use crate::context::Context;
use crate::request::{Answer, Call, unknown_verb};

/// Verbs that may be left in the inbox: mutations whose answer is worth having later.
pub(crate) const INBOX_VERBS: &[&str] = &[
    "abort_import",
    "release_lease",
    "update_policy",
    "upsert",
    "abort_upsert",
    "migrate",
    "cancel_operation",
    "pause_operation",
    "resume_operation",
    "retry_operation",
    "remove",
    "purge",
];

/// Carries a call out.
pub(crate) async fn perform(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    match call.verb {
        "begin_import" => imports::begin(context, call).await,
        "join_import" => participants::join(context, call).await,
        "renew_part" => participants::renew(context, call).await,
        "finish_part" => participants::finish(context, call).await,
        "get_import" => participants::get(context, call).await,
        "renew_import" => imports::renew(context, call).await,
        "commit_import" => imports::commit(context, call).await,
        "abort_import" => imports::abort(context, call).await,
        "acquire_lease" => leases::acquire(context, call).await,
        "renew_lease" => leases::renew(context, call).await,
        "release_lease" => leases::release(context, call).await,
        "is_exist" => revisions::is_exist(context, call).await,
        "get_metadata" => revisions::get_metadata(context, call).await,
        "get_size" => revisions::get_size(context, call).await,
        "list" => revisions::list(context, call).await,
        "update_policy" => revisions::update_policy(context, call).await,
        "migrate" => revisions::migrate(context, call).await,
        "repair" => repair::repair(context, call).await,
        "verify" => repair::verify(context, call).await,
        "remove" => revisions::remove(context, call).await,
        "purge" => revisions::purge(context, call).await,
        "upsert" => lineage::upsert(context, call).await,
        "abort_upsert" => lineage::abort(context, call).await,
        "get_upsert" => lineage::get(context, call).await,
        "get_operation" => operations::get(context, call).await,
        "list_operations" => operations::list(context, call).await,
        "cancel_operation" | "pause_operation" | "resume_operation" | "retry_operation" => {
            operations::steer(context, call).await
        }
        "clock" => status::clock(context, call).await,
        "status" => status::status(context, call).await,
        other => Err(unknown_verb(other)),
    }
}

/// The record or operation that the fold answered with.
fn answer_with(position: LogPosition, reply: Reply) -> Result<Answer, BallastError> {
    #[derive(Serialize)]
    struct Nothing {}
    match reply {
        Reply::Revision(revision) => Answer::new(position.seq, &RevisionReply { revision: *revision }),
        Reply::Operation(operation) => Answer::new(position.seq, &OperationReply { operation: operation.into_inner() }),
        Reply::Done => Answer::new(position.seq, &Nothing {}),
        other => Err(unexpected(&other)),
    }
}

/// The fold accepted the command but answered with something that the verb does not know: a newer build wrote this part of the fold.
fn unexpected(reply: &Reply) -> BallastError {
    let message =
        format!("the command is in the log, but this gateway does not understand its outcome ({reply:?}): upgrade it");
    BallastError::new(ErrorCode::Unavailable, message)
}

#[cfg(test)]
mod tests {
    use ballast_schemas::VERBS;

    use super::*;

    #[test]
    fn what_may_be_left_in_the_inbox_are_verbs() {
        assert!(INBOX_VERBS.iter().all(|verb| VERBS.contains(verb)));
    }
}
