//! The NATS service: every verb an endpoint of `ballast-gateway`, found by `nats micro ls` and `$SRV.INFO`, shared by all
//! gateways through one queue group. A request gets a task of its own, a deadline, and an answer in any case.
//!
//! Not here: what verbs do (`verbs/`). See ARCHITECTURE.md, The rooms.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::connection::State as ConnectionState;
use async_nats::service::endpoint::Endpoint;
use async_nats::service::{
    NATS_SERVICE_ERROR, NATS_SERVICE_ERROR_CODE, Request as ServiceRequest, Service, ServiceExt,
};
use async_nats::{Client, HeaderMap, Message, RequestErrorKind, Subscriber};
use ballast_schemas::{BallastError, ErrorCode, VERBS};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{SelectAll, select_all};
use tokio::sync::{OwnedSemaphorePermit, RwLock, Semaphore};

use crate::context::Context;
use crate::request::{Answer, Call, error_body, known_verb, unknown_verb};
use crate::verbs;

/// The service's name.
pub(crate) const SERVICE_NAME: &str = "ballast-gateway";
/// Gateways share requests through it.
pub(crate) const QUEUE_GROUP: &str = "ballast-gateway";
const VERB_SUBJECTS: &str = "ballast.v1.>";
/// What is wrong, in a header: one line, not too long for it.
const HEADER_TEXT_CHARS_MAX: usize = 512;

/// How long the servers of a cluster may take to tell each other of a subscription.
const INTEREST_PATIENCE: Duration = Duration::from_secs(5);
const INTEREST_RETRY_EVERY: Duration = Duration::from_millis(20);

/// How requests are taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Beyond so many at once, a request is refused as UNAVAILABLE.
    pub in_flight_max: u32,
    /// A request is answered after this long in any case.
    pub deadline: Duration,
}

/// The service, listening on a connection of its own: requests do not hold up the log, and the connection can be drained.
pub(crate) struct Listening {
    front: Client,
    service: Service,
    requests: SelectAll<Endpoint>,
    /// Everything under `ballast.v1`, for the sake of verbs that there are not.
    others: Subscriber,
}

impl std::fmt::Debug for Listening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listening")
    }
}

/// Registers the service and its endpoints on `front`. Once it returns, the server knows them.
pub(crate) async fn listen(front: Client, context: &Context) -> Result<Listening, async_nats::Error> {
    let metadata = HashMap::from([
        ("cluster_id".to_owned(), context.cluster_id.to_string()),
        ("replica_id".to_owned(), context.replica_id.to_string()),
    ]);
    let builder = front
        .service_builder()
        .description("Ballast: publish, find, read, move, replace and delete model weight revisions (JSON)");
    let service =
        builder.queue_group(QUEUE_GROUP).metadata(metadata).start(SERVICE_NAME, env!("CARGO_PKG_VERSION")).await?;
    let mut endpoints = Vec::with_capacity(VERBS.len());
    for verb in VERBS {
        endpoints.push(service.endpoint_builder().name(*verb).add(format!("ballast.v1.*.{verb}")).await?);
    }
    let others = front.queue_subscribe(VERB_SUBJECTS, format!("{QUEUE_GROUP}-unknown")).await?;
    let listening = Listening { front: front.clone(), service, requests: select_all(endpoints), others };
    listening.pass_through(&front).await?;
    Ok(listening)
}

impl Listening {
    /// Waits for an answer of this service over `client`. The server reads a connection in order: then it has every
    /// subscription that was made on it before.
    pub(crate) async fn pass_through(&self, client: &Client) -> Result<(), async_nats::RequestError> {
        let subject = format!("$SRV.PING.{SERVICE_NAME}.{}", self.service.info().await.id);
        let deadline = Instant::now() + INTEREST_PATIENCE;
        loop {
            match client.request(subject.clone(), Bytes::new()).await {
                // The two connections are to different servers, and one has not told the other yet.
                Err(error) if error.kind() == RequestErrorKind::NoResponders && Instant::now() < deadline => {
                    tokio::time::sleep(INTEREST_RETRY_EVERY).await;
                }
                answered => return answered.map(drop),
            }
        }
    }
}

/// What the tasks of requests share.
#[derive(Debug)]
struct Desk {
    context: Arc<Context>,
    /// Answers go through it once the connection of the requests is being drained.
    main: Client,
    is_draining: RwLock<bool>,
    permits: Arc<Semaphore>,
    limits: Limits,
}

/// Takes requests until `stopped` resolves, then lets those under way finish for at most `patience`.
pub(crate) async fn run(
    listening: Listening,
    main: Client,
    context: Arc<Context>,
    limits: Limits,
    stopped: impl Future<Output = ()>,
    patience: Duration,
) {
    let Listening { front, service, mut requests, mut others } = listening;
    let permits = Arc::new(Semaphore::new(limits.in_flight_max as usize));
    let desk = Arc::new(Desk { context, main, is_draining: RwLock::new(false), permits, limits });
    tokio::pin!(stopped);
    loop {
        tokio::select! {
            () = &mut stopped => break,
            request = requests.next() => match request {
                Some(request) => desk.take(request).await,
                None => break,
            },
            message = others.next() => match message {
                Some(message) => desk.refuse_unknown(message).await,
                None => break,
            },
        }
    }
    let drained = tokio::time::timeout(patience, desk.drain(&front, requests)).await;
    if drained.is_err() {
        tracing::warn!("some requests were not answered before the gateway stopped");
    }
    if let Err(error) = service.stop().await {
        tracing::debug!(%error, "the service was gone already");
    }
}

impl Desk {
    /// Asks for no more requests, and answers those that the server had passed on before it heard of it.
    async fn drain(self: &Arc<Self>, front: &Client, mut requests: SelectAll<Endpoint>) {
        // Nobody is amid an answer on the connection that goes away now.
        *self.is_draining.write().await = true;
        if front.connection_state() == ConnectionState::Connected
            && let Err(error) = front.drain().await
        {
            tracing::debug!(%error, "the connection was gone already");
            return;
        }
        while let Some(request) = requests.next().await {
            self.take(request).await;
        }
        // All permits are back when every request is answered.
        let _ = self.permits.acquire_many(self.limits.in_flight_max).await;
    }

    /// Gives the request a task of its own, or refuses it when too many are under way.
    async fn take(self: &Arc<Self>, request: ServiceRequest) {
        match Arc::clone(&self.permits).try_acquire_owned() {
            Ok(permit) => {
                tokio::spawn(serve(Arc::clone(self), request, permit));
            }
            Err(_) => {
                let message = format!(
                    "this gateway is at work on {} requests: try again in a moment, or start another gateway",
                    self.limits.in_flight_max
                );
                self.respond(&request, Err(BallastError::new(ErrorCode::Unavailable, message))).await;
            }
        }
    }

    async fn respond(&self, request: &ServiceRequest, answered: Result<Answer, BallastError>) {
        let Some(to) = request.message.reply.clone() else { return };
        let (headers, body) = self.face(answered);
        let is_draining = self.is_draining.read().await;
        let sent = match *is_draining {
            false => request.respond_with_headers(Ok(body), headers).await,
            true => self.main.publish_with_headers(to, headers, body).await,
        };
        if let Err(error) = sent {
            tracing::warn!(subject = %request.message.subject, %error, "an answer was not sent");
        }
    }

    /// Headers and body of an answer, whichever it is.
    fn face(&self, answered: Result<Answer, BallastError>) -> (HeaderMap, Bytes) {
        match answered {
            Ok(answer) => (HeaderMap::new(), answer.body),
            Err(error) => (error_headers(&error), error_body(&error, self.context.replica.log_seq())),
        }
    }

    /// Answers what is no verb's subject; the endpoints answer the rest.
    async fn refuse_unknown(&self, message: Message) {
        let tokens: Vec<&str> = message.subject.split('.').collect();
        if let [_, _, _, verb] = tokens.as_slice()
            && known_verb(verb).is_some()
        {
            return;
        }
        let Some(to) = message.reply else { return };
        let error = unknown_verb(tokens.get(3..).unwrap_or_default().join(".").as_str());
        let (headers, body) = self.face(Err(error));
        if let Err(error) = self.main.publish_with_headers(to, headers, body).await {
            tracing::debug!(%error, "an unknown verb was not answered");
        }
    }
}

async fn serve(desk: Arc<Desk>, request: ServiceRequest, permit: OwnedSemaphorePermit) {
    let started = Instant::now();
    let _in_flight = desk.context.metrics.enter();
    let call = Call::new(&request.message.subject, request.message.payload.clone());
    let verb = call.as_ref().map_or("?", |call| call.verb);
    let answered = match call {
        Ok(call) => perform_in_time(&desk.context, &call, desk.limits.deadline).await,
        Err(error) => Err(error),
    };
    let outcome = answered.as_ref().map_or_else(|error| error.code.name(), |_| "OK");
    desk.context.metrics.answered(verb, outcome, started.elapsed());
    desk.respond(&request, answered).await;
    drop(permit);
}

/// Carries a call out, but not for longer than the deadline.
pub(crate) async fn perform_in_time(
    context: &Context,
    call: &Call,
    deadline: Duration,
) -> Result<Answer, BallastError> {
    tokio::time::timeout(deadline, verbs::perform(context, call)).await.unwrap_or_else(|_| {
        let message = format!(
            "{} was not done within {} ms; it may still happen: ask again with the same ids to learn what became of it",
            call.verb,
            deadline.as_millis()
        );
        Err(BallastError::new(ErrorCode::Unavailable, message)
            .with_details(serde_json::json!({"outcome_unknown": true})))
    })
}

fn error_headers(error: &BallastError) -> HeaderMap {
    let line: String =
        error.to_string().chars().take(HEADER_TEXT_CHARS_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
    let mut headers = HeaderMap::new();
    headers.insert(NATS_SERVICE_ERROR, line.as_str());
    headers.insert(NATS_SERVICE_ERROR_CODE, error.code.number().to_string().as_str());
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_in_a_header_is_one_line() {
        let headers = error_headers(&BallastError::invalid("first\r\nsecond"));
        assert_eq!(headers.get(NATS_SERVICE_ERROR).unwrap().as_str(), "INVALID_ARGUMENT: first  second");
        assert_eq!(headers.get(NATS_SERVICE_ERROR_CODE).unwrap().as_str(), "1");
    }
}
