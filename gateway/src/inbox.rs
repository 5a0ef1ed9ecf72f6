//! The inbox: commands left in `BALLAST_INBOX` by orchestrators that do not wait for a gateway. They are carried out in the order
//! in which they were left, through the same code as requests; each outcome is stored as an event, and only then is the
//! command taken out of the inbox.
//!
//! A gateway that dies in between leaves the command to another, which carries it out under the same command id: the fold
//! answers with the first outcome.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{AckPolicy, Consumer, pull};
use async_nats::jetstream::{self, AckKind, Context as JetStream, Message};
use ballast_schemas::subject::{self, INBOX_STREAM, token};
use ballast_schemas::{BallastError, ErrorCode};
use bytes::Bytes;
use futures::StreamExt;
use serde_json::Value;

use crate::context::Context;
use crate::request::{Answer, Call, CallTenant};
use crate::service::perform_in_time;
use crate::verbs::INBOX_VERBS;

const CONSUMER: &str = "gateways";
/// Longer than a request's deadline and the storing of its outcome.
const ACK_WAIT: Duration = Duration::from_secs(45);
const PULL_EXPIRES: Duration = Duration::from_secs(5);
const HEARTBEAT: Duration = Duration::from_secs(1);
const RETRY_EVERY: Duration = Duration::from_millis(500);
/// How long a command is tried again while nothing can be reached, from when it was left.
const PATIENCE: Duration = Duration::from_secs(600);

/// Works on the inbox for as long as it is polled.
pub(crate) async fn run(jetstream: JetStream, context: Arc<Context>, deadline: Duration) {
    loop {
        match open(&jetstream).await {
            Ok(mut messages) => {
                while let Some(Ok(message)) = messages.next().await {
                    handle(&jetstream, &context, message, deadline).await;
                }
            }
            Err(reason) => tracing::debug!(reason, "the inbox can not be read yet"),
        }
        tokio::time::sleep(RETRY_EVERY).await;
    }
}

async fn open(jetstream: &JetStream) -> Result<pull::Stream, String> {
    let config = pull::Config {
        durable_name: Some(CONSUMER.to_owned()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: ACK_WAIT,
        // One at a time, whoever takes it: that keeps the order.
        max_ack_pending: 1,
        ..pull::Config::default()
    };
    let consumer: Consumer<pull::Config> =
        jetstream.create_consumer_on_stream(config, INBOX_STREAM).await.map_err(|error| error.to_string())?;
    let opened =
        consumer.stream().max_messages_per_batch(1).expires(PULL_EXPIRES).heartbeat(HEARTBEAT).messages().await;
    opened.map_err(|error| error.to_string())
}

async fn handle(jetstream: &JetStream, context: &Context, message: Message, deadline: Duration) {
    let (seq, age, is_first) = match message.info() {
        Ok(info) => {
            let age = SystemTime::now().duration_since(info.published.into()).unwrap_or_default();
            (info.stream_sequence, age, info.delivered <= 1)
        }
        Err(error) => {
            tracing::error!(%error, "a message of the inbox without a position");
            return;
        }
    };
    let own_request_id = format!("{INBOX_STREAM}-{seq}");
    let outcome = perform(context, &message, own_request_id, deadline).await;
    if let Err(error) = &outcome.answered
        && may_pass(error)
        && age < PATIENCE
    {
        if is_first {
            tracing::warn!(seq, %error, "a submitted command has to wait, and those behind it");
        }
        settle(&message, AckKind::Nak(Some(RETRY_EVERY))).await;
        return;
    }
    match outcome.store(jetstream, context, seq).await {
        Ok(()) => settle(&message, AckKind::Ack).await,
        // Not stored: the command comes again, hears the same outcome, and it is stored then.
        Err(reason) => {
            tracing::warn!(reason, "the outcome of a submitted command is not stored yet");
            settle(&message, AckKind::Nak(Some(RETRY_EVERY))).await;
        }
    }
}

/// Whether the same command may be carried out later: something can not be reached, and it is not what the command itself asks
/// for (a time that is over, a sequence that never came) that can not be had.
fn may_pass(error: &BallastError) -> bool {
    error.code == ErrorCode::Unavailable && !error.details["field"].is_string()
}

async fn settle(message: &Message, kind: AckKind) {
    // A lost acknowledgement means that the command comes again, which its id makes harmless.
    if let Err(error) = message.ack_with(kind).await {
        tracing::debug!(%error, "a submitted command is not settled");
    }
}

/// What became of a submitted command.
struct Submitted {
    tenant_token: String,
    verb: String,
    request_id: String,
    answered: Result<Answer, BallastError>,
}

async fn perform(context: &Context, message: &Message, own_request_id: String, deadline: Duration) -> Submitted {
    let mut tokens = message.subject.split('.').skip(2);
    let tenant_token = tokens.next().unwrap_or_default().to_owned();
    let verb = tokens.next().unwrap_or_default().to_owned();
    let request_id = named_request_id(&message.payload).unwrap_or_else(|| own_request_id.clone());
    let call = Call::new(&message.subject, message.payload.clone());
    let answered = match call {
        Ok(_) if !INBOX_VERBS.contains(&verb.as_str()) => Err(not_for_the_inbox(&tenant_token, &verb)),
        Ok(call) => perform_in_time(context, &Call { own_request_id: Some(own_request_id), ..call }, deadline).await,
        Err(error) => Err(error),
    };
    Submitted { tenant_token, verb, request_id, answered }
}

/// The request id of the body, if it can be read at all: the outcome is stored under it.
fn named_request_id(payload: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(payload).ok()?;
    let id = body.get("options")?.get("request_id")?.as_str()?;
    (!id.is_empty()).then(|| id.to_owned())
}

fn not_for_the_inbox(tenant_token: &str, verb: &str) -> BallastError {
    let message = format!(
        "{verb} needs its answer at once and can not be left in the inbox: call ballast.v1.{tenant_token}.{verb}; the inbox takes {}",
        INBOX_VERBS.join(", ")
    );
    BallastError::invalid(message)
}

impl Submitted {
    /// `{"verb","request_id", …}` with the answer's fields, or `error`, and `log_seq`.
    fn body(&self, log_seq: u64) -> Value {
        let mut body = match &self.answered {
            Ok(answer) => serde_json::from_slice(&answer.body).unwrap_or(Value::Null),
            Err(error) => {
                let mut body = error.to_body();
                body["log_seq"] = log_seq.into();
                body
            }
        };
        body["verb"] = self.verb.as_str().into();
        body["request_id"] = self.request_id.as_str().into();
        body
    }

    async fn store(&self, jetstream: &JetStream, context: &Context, seq: u64) -> Result<(), String> {
        let subject = match CallTenant::from_token(&self.tenant_token) {
            Ok(CallTenant::Named(tenant)) => subject::outcome_of(&tenant, &self.request_id),
            Ok(CallTenant::Hashed(hashed)) => format!("ballast.events.{hashed}.outcome.{}", token(&self.request_id)),
            // A tenant that is none has no events; it may not keep the inbox from the others either.
            Err(error) => {
                tracing::warn!(tenant = self.tenant_token, %error, "a command submitted for a tenant that is none is dropped");
                return Ok(());
            }
        };
        let mut headers = HeaderMap::new();
        headers.insert(async_nats::header::NATS_MESSAGE_ID, format!("{INBOX_STREAM}-{seq}").as_str());
        let body = Bytes::from(self.body(context.replica.log_seq()).to_string());
        let sent = jetstream.publish_with_headers(subject, headers, body).await.map_err(|error| error.to_string())?;
        sent.await.map(drop).map_err(|error| error.to_string())
    }
}

/// A JetStream context whose calls end in time.
pub(crate) fn jetstream(client: &async_nats::Client) -> JetStream {
    let mut context = jetstream::new(client.clone());
    context.set_timeout(Duration::from_secs(5));
    context
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_goes_by_the_bodys_request_id_if_it_has_one() {
        assert_eq!(named_request_id(br#"{"options":{"request_id":"r 1"}}"#).as_deref(), Some("r 1"));
        for without in ["", "{}", "[]", r#"{"options":{"request_id":""}}"#, r#"{"options":{"request_id":7}}"#] {
            assert_eq!(named_request_id(without.as_bytes()), None, "{without}");
        }
    }

    #[test]
    fn an_outcome_names_its_request() {
        let submitted =
            |answered| Submitted { tenant_token: "t".into(), verb: "remove".into(), request_id: "r".into(), answered };
        let good = Answer::new(7, &serde_json::json!({"revision": {}})).unwrap();
        let body = submitted(Ok(good)).body(9);
        assert_eq!(
            (body["verb"].as_str(), body["request_id"].as_str(), body["log_seq"].as_u64()),
            (Some("remove"), Some("r"), Some(7))
        );
        let body = submitted(Err(not_for_the_inbox("t", "list"))).body(9);
        assert_eq!((body["error"]["number"].as_u64(), body["log_seq"].as_u64()), (Some(1), Some(9)));
    }
}
