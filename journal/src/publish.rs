//! One JetStream publish with its acknowledgement, and what each failure says about whether the message was stored.
//!
//! This is a plain request on the subject: it keeps the server's error code, which the client library's publish error
//! folds into kinds that differ between replicated and single servers. Not here: retries (`jetstream_log.rs`, callers).

use std::time::Duration;

use async_nats::{Client, HeaderMap, RequestErrorKind};
use bytes::Bytes;
use serde::Deserialize;

/// The stream has reached `max_bytes`, `max_msgs` or its per-subject limit (all with `discard: new`).
const CODE_STREAM_STORE_FAILED: u64 = 10077;
const CODE_INSUFFICIENT_RESOURCES: u64 = 10023;
const CODE_STORAGE_RESOURCES_EXCEEDED: u64 = 10047;
const CODE_WRONG_LAST_SEQUENCE: u64 = 10071;
/// The same conflict on a replicated stream while the winner is still in flight.
const CODE_WRONG_LAST_SEQUENCE_CONSTANT: u64 = 10164;
/// An earlier copy, under the same id, has not reached a majority of a replicated stream's servers.
const CODE_DUPLICATE_IN_PROCESS: u64 = 10158;

/// Why there is no acknowledgement.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishFailure {
    /// Nothing answered in time: it may be stored or not.
    #[error("no answer: {reason}")]
    Unknown { reason: String },
    /// Not stored: a limit of the stream is reached.
    #[error("{description}")]
    Full { description: String },
    /// Not stored: the expected last sequence is another one.
    #[error("{description}")]
    WrongLastSequence { description: String },
    /// Not stored, for another reason.
    #[error("{description} (JetStream error {code})")]
    Rejected { code: u64, description: String },
    /// Never sent.
    #[error("{reason}")]
    Unsendable { reason: String },
}

#[derive(Deserialize)]
struct AckBody {
    #[serde(default)]
    seq: u64,
    error: Option<AckError>,
}

#[derive(Deserialize)]
struct AckError {
    code: u64,
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

/// Publishes once, waits up to `timeout` for the acknowledgement and returns the stream sequence (of the first message with
/// the same id, if there was one).
pub(crate) async fn publish_once(
    client: &Client,
    subject: String,
    headers: HeaderMap,
    payload: Bytes,
    timeout: Duration,
) -> Result<u64, PublishFailure> {
    let request = async_nats::Request::new().headers(headers).payload(payload).timeout(Some(timeout));
    let reply = client.send_request(subject, request).await.map_err(|error| match error.kind() {
        RequestErrorKind::InvalidSubject | RequestErrorKind::MaxPayloadExceeded => {
            PublishFailure::Unsendable { reason: error.to_string() }
        }
        // No responders: an election is going on, or the server restarts. Both end.
        _ => PublishFailure::Unknown { reason: error.to_string() },
    })?;
    let body: AckBody = serde_json::from_slice(&reply.payload)
        .map_err(|error| PublishFailure::Unknown { reason: format!("unreadable acknowledgement: {error}") })?;
    match body.error {
        None if body.seq > 0 => Ok(body.seq),
        None => Err(PublishFailure::Unknown { reason: "acknowledgement without a sequence".to_owned() }),
        Some(error) => Err(failure_of(error)),
    }
}

fn failure_of(error: AckError) -> PublishFailure {
    let AckError { code, err_code, description } = error;
    match err_code {
        CODE_STREAM_STORE_FAILED | CODE_INSUFFICIENT_RESOURCES | CODE_STORAGE_RESOURCES_EXCEEDED => {
            PublishFailure::Full { description }
        }
        CODE_WRONG_LAST_SEQUENCE | CODE_WRONG_LAST_SEQUENCE_CONSTANT => {
            PublishFailure::WrongLastSequence { description }
        }
        // "Temporarily unavailable" and its kin: the server can not say what became of it. Nor can a leader that still holds the
        // first copy of this very message and waits for the others to store it.
        _ if code == 503 || code == 500 || err_code == CODE_DUPLICATE_IN_PROCESS => {
            PublishFailure::Unknown { reason: format!("{description} (JetStream error {err_code})") }
        }
        _ => PublishFailure::Rejected { code: err_code, description },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(code: u64, err_code: u64) -> PublishFailure {
        failure_of(AckError { code, err_code, description: "why".to_owned() })
    }

    #[test]
    fn a_copy_that_is_still_in_process_may_be_stored() {
        assert!(matches!(failure(400, CODE_DUPLICATE_IN_PROCESS), PublishFailure::Unknown { .. }));
        assert!(matches!(failure(503, 10008), PublishFailure::Unknown { .. }));
        assert!(matches!(failure(503, CODE_STREAM_STORE_FAILED), PublishFailure::Full { .. }));
        assert!(matches!(failure(400, 10054), PublishFailure::Rejected { .. }));
    }
}
