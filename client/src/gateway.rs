//! Requests to the gateway's verbs over NATS: one deadline for a request and all its repeats, the same request id each
//! time, and a sentence of its own for each way in which nobody answers (RFC, Concurrency, Consistency, and Error Handling).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::ReconnectToServer;
use async_nats::client::RequestErrorKind;
use async_nats::connection::State as ConnectionState;
use ballast_schemas::{BallastError, COMMAND_WINDOW_MS, ClockReply, ErrorCode, LogTime, TenantId, subject};
use ballast_transfer::Route;
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::watch;
use uuid::Uuid;

use crate::progress::Progress;

/// Verbs that change nothing: they may be answered from any state that is recent enough.
const QUERIES: &[&str] = &[
    "is_exist",
    "get_metadata",
    "get_size",
    "get_import",
    "list",
    "get_upsert",
    "get_operation",
    "list_operations",
    "clock",
    "status",
];
/// Verbs that are answered at once or not at all, and whose caller has little time.
const RENEWALS: &[&str] = &["renew_import", "renew_part", "renew_lease"];
/// The first attempt is given up after this long, and the request is sent again: servers pass requests on to one that says nothing
/// for as long as they take it for alive. Each further attempt gets half as much again.
const ATTEMPT_MIN: Duration = Duration::from_secs(3);
const ATTEMPT_MAX: Duration = Duration::from_secs(10);
const RENEWAL_ATTEMPT_MAX: Duration = Duration::from_secs(2);
const BACK_OFF_MIN: Duration = Duration::from_millis(50);
const BACK_OFF_MAX: Duration = Duration::from_secs(1);
const CONNECT_ATTEMPT_MAX: Duration = Duration::from_secs(3);
/// How long a reading of the log clock is used for. The clock never runs faster than time, so every mutation is good for at
/// least [`COMMAND_WINDOW_MS`], and never beyond the time for which the fold remembers a repeat of it.
const CLOCK_GOOD_FOR: Duration = Duration::from_secs(30);
/// A server that says nothing is left after three of these.
const PING_EVERY: Duration = Duration::from_secs(1);
/// How often the connection is looked at for having been made anew while an answer is awaited.
const CONNECTION_LOOK_EVERY: Duration = Duration::from_millis(100);
/// Another server is tried at most this often.
const ELSEWHERE_EVERY: Duration = Duration::from_secs(2);

/// Counts the connections that this process made or tried.
static TURN: AtomicUsize = AtomicUsize::new(0);

/// How to reach a cluster.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// `nats://host:port`; several, separated by commas, are the servers of one cluster.
    pub nats_url: String,
    /// What the server's monitoring shows, and the holder of leases.
    pub name: String,
    /// The tenant of requests that name no identity.
    pub tenant: TenantId,
    /// How long to try to connect.
    pub connect_patience: Duration,
    /// How long one request, with all its repeats, may take.
    pub request_deadline: Duration,
    /// Which way to nodes: the Unix socket of the same host where there is one, by default.
    pub route: Route,
    /// Told, as something that is waited for, why a request is being sent again.
    pub waiting: Progress,
    /// What the caller gives the address with, for the error that nobody answers there: a flag, an argument.
    pub address_flag: &'static str,
}

impl ConnectOptions {
    /// The defaults: tenant `default`, 5 s to connect, 30 s for a request.
    pub fn new(nats_url: impl Into<String>) -> Self {
        Self {
            nats_url: nats_url.into(),
            name: format!("ballast-client-{}", std::process::id()),
            tenant: TenantId::default_tenant(),
            connect_patience: Duration::from_secs(5),
            request_deadline: Duration::from_secs(30),
            route: Route::Best,
            waiting: Progress::none(),
            address_flag: "nats_url",
        }
    }
}

/// A connection to whichever gateway answers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gateway {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    client: async_nats::Client,
    url: String,
    address_flag: &'static str,
    name: String,
    tenant: TenantId,
    request_deadline: Duration,
    route: Route,
    waiting: Progress,
    /// Releases and aborts that go on behind their caller's back.
    background: watch::Sender<usize>,
    /// The highest log sequence that an answer reflected: later queries see at least that.
    seen_seq: AtomicU64,
    /// The log clock as a gateway told it, and when it was asked.
    clock: Mutex<Option<(Instant, LogTime)>>,
    /// When the connection was last sent to another server.
    went_elsewhere_at: Mutex<Option<Instant>>,
}

impl Gateway {
    /// Connects to NATS; whether a gateway answers shows with the first request.
    ///
    /// # Errors
    /// `UNAVAILABLE` when no server answers in time.
    pub async fn connect(options: &ConnectOptions) -> Result<Self, BallastError> {
        let deadline = Instant::now() + options.connect_patience;
        let client = loop {
            let addresses: Vec<&str> =
                options.nats_url.split(',').map(str::trim).filter(|url| !url.is_empty()).collect();
            let attempt = async_nats::ConnectOptions::new()
                .name(&options.name)
                // By turns: who leaves a server must not come back to it by chance.
                .reconnect_to_server_callback(|servers, _| {
                    let turn = std::process::id() as usize + TURN.fetch_add(1, Ordering::Relaxed);
                    let next = servers.get(turn % servers.len().max(1)).cloned();
                    async move { next.map(|server| ReconnectToServer { addr: server.addr, delay: None }) }
                })
                .ping_interval(PING_EVERY)
                .connection_timeout(CONNECT_ATTEMPT_MAX)
                .reconnect_delay_callback(|attempts| {
                    BACK_OFF_MIN.saturating_mul(attempts.min(20) as u32).min(BACK_OFF_MAX)
                })
                .event_callback(|event| async move { tracing::debug!(%event, "NATS connection") })
                .connect(addresses)
                .await;
            match attempt {
                Ok(client) => break client,
                Err(error) if Instant::now() >= deadline => {
                    return Err(no_server(&options.nats_url, &error.to_string(), options.address_flag));
                }
                Err(_) => tokio::time::sleep(BACK_OFF_MIN).await,
            }
        };
        Ok(Self {
            shared: Arc::new(Shared {
                client,
                url: options.nats_url.clone(),
                address_flag: options.address_flag,
                name: options.name.clone(),
                tenant: options.tenant.clone(),
                request_deadline: options.request_deadline,
                route: options.route,
                waiting: options.waiting.clone(),
                background: watch::Sender::new(0),
                seen_seq: AtomicU64::new(0),
                clock: Mutex::new(None),
                went_elsewhere_at: Mutex::new(None),
            }),
        })
    }

    /// The tenant of requests that name no identity.
    #[must_use]
    pub fn tenant(&self) -> &TenantId {
        &self.shared.tenant
    }

    /// The name that was given at connect.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    pub(crate) fn route(&self) -> Route {
        self.shared.route
    }

    /// Goes on with `work` (a release, an abort) after its caller has given up. Without a runtime nobody can.
    pub(crate) fn in_background(&self, work: impl Future<Output = ()> + Send + 'static) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let shared = self.shared.clone();
        shared.background.send_modify(|count| *count += 1);
        runtime.spawn(async move {
            work.await;
            shared.background.send_modify(|count| *count -= 1);
        });
    }

    /// Waits until leases are released and imports aborted whose caller was cancelled, or until `patience` is over. For
    /// programs that are about to exit.
    pub async fn settle(&self, patience: Duration) {
        let mut background = self.shared.background.subscribe();
        // What is not settled by then ends by itself, a little later.
        let _ = tokio::time::timeout(patience, background.wait_for(|count| *count == 0)).await;
    }

    /// The NATS connection itself.
    #[must_use]
    pub fn nats(&self) -> &async_nats::Client {
        &self.shared.client
    }

    /// Calls a verb for a tenant. A mutation carries one request id and one end through all its repeats, so that it happens
    /// once, however late one of them arrives.
    ///
    /// # Errors
    /// What the gateway answers; `UNAVAILABLE` when nothing answers before the deadline.
    pub async fn call<Q: Serialize, R: DeserializeOwned>(
        &self,
        tenant: &TenantId,
        verb: &str,
        body: &Q,
    ) -> Result<R, BallastError> {
        self.call_within(tenant, verb, body, self.shared.request_deadline).await
    }

    /// As [`Gateway::call`] with a deadline of its own.
    ///
    /// # Errors
    /// As there.
    pub async fn call_within<Q: Serialize, R: DeserializeOwned>(
        &self,
        tenant: &TenantId,
        verb: &str,
        body: &Q,
        patience: Duration,
    ) -> Result<R, BallastError> {
        let mut payload = None;
        let subject = subject::verb(tenant, verb);
        let deadline = Instant::now() + patience;
        let mut back_off = BACK_OFF_MIN;
        let mut answered: Option<BallastError> = None;
        let is_renewal = RENEWALS.contains(&verb);
        let mut attempt_max = if is_renewal { RENEWAL_ATTEMPT_MAX } else { ATTEMPT_MIN };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let attempt = self.attempt_call(&subject, verb, body, &mut payload, left.min(attempt_max));
            let error = match attempt.await {
                Err(error) if error.code == ErrorCode::Unavailable => error,
                other => return other,
            };
            // A last attempt that had no time to be answered says less than the answer before it.
            let error = match answered.take() {
                Some(earlier) if left < attempt_max && error.details["missing"] == "answer" => earlier,
                _ => error,
            };
            match error.details["missing"].is_null() {
                true => answered = Some(error.clone()),
                false => self.go_elsewhere().await,
            }
            if Instant::now() + back_off >= deadline {
                return Err(error);
            }
            tracing::debug!(verb, %error, "asking again");
            self.shared.waiting.waiting(error.message);
            tokio::time::sleep(back_off).await;
            back_off = (back_off * 2).min(BACK_OFF_MAX);
            if !is_renewal {
                attempt_max = (attempt_max * 3 / 2).min(ATTEMPT_MAX);
            }
        }
    }

    /// One attempt of a call. `payload` is made by the first attempt that can, and stays.
    async fn attempt_call<Q: Serialize, R: DeserializeOwned>(
        &self,
        subject: &str,
        verb: &str,
        body: &Q,
        payload: &mut Option<Bytes>,
        patience: Duration,
    ) -> Result<R, BallastError> {
        if payload.is_none() {
            let not_after = match QUERIES.contains(&verb) {
                true => None,
                false => Some(self.not_after(patience).await?),
            };
            *payload = Some(self.payload(verb, body, not_after)?);
        }
        self.attempt(subject, payload.clone().unwrap_or_default(), patience).await
    }

    /// When a mutation that is sent now for the first time stops being good.
    async fn not_after(&self, patience: Duration) -> Result<LogTime, BallastError> {
        let asked_at = Instant::now();
        let known = *self.shared.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let clock = match known.filter(|(at, _)| asked_at.duration_since(*at) < CLOCK_GOOD_FOR) {
            Some((_, clock)) => clock,
            None => {
                let subject = subject::verb(&self.shared.tenant, "clock");
                let told: ClockReply = self.attempt(&subject, Bytes::new(), patience).await?;
                *self.shared.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some((asked_at, told.log_clock));
                told.log_clock
            }
        };
        Ok(clock.plus_ms(COMMAND_WINDOW_MS + CLOCK_GOOD_FOR.as_millis() as u64))
    }

    fn payload<Q: Serialize>(&self, verb: &str, body: &Q, not_after: Option<LogTime>) -> Result<Bytes, BallastError> {
        let wrong = |error: serde_json::Error| {
            BallastError::invalid(format!("the body of {verb} can not be written as JSON: {error}"))
        };
        let mut body = serde_json::to_value(body).map_err(wrong)?;
        let Some(fields) = body.as_object_mut() else {
            return Err(BallastError::invalid(format!("the body of {verb} is not a JSON object")));
        };
        if !fields.contains_key("options") {
            let seen = self.shared.seen_seq.load(Ordering::Relaxed);
            let options = match not_after {
                Some(not_after) => json!({"request_id": Uuid::new_v4().to_string(), "not_after": not_after}),
                None if seen == 0 => json!({}),
                None => json!({"min_log_seq": seen}),
            };
            fields.insert("options".to_owned(), options);
        }
        serde_json::to_vec(&body).map(Bytes::from).map_err(wrong)
    }

    async fn attempt<R: DeserializeOwned>(
        &self,
        subject: &str,
        payload: Bytes,
        patience: Duration,
    ) -> Result<R, BallastError> {
        let request = async_nats::Request::new().payload(payload).timeout(Some(patience));
        let connects = self.connects();
        let answered = tokio::select! {
            answered = self.shared.client.send_request(subject.to_owned(), request) => answered,
            // What was under way on the old connection is lost, and nobody says so.
            () = self.connected_anew(connects) => {
                let message = "the connection was made anew before an answer came";
                return Err(BallastError::new(ErrorCode::Unavailable, message));
            }
        };
        match answered {
            Ok(message) => self.read(&message.payload),
            Err(error) => Err(self.nobody(error.kind(), &error.to_string(), patience)),
        }
    }

    fn connects(&self) -> u64 {
        self.shared.client.statistics().connects.load(Ordering::Relaxed)
    }

    async fn connected_anew(&self, connects: u64) {
        while self.connects() == connects {
            tokio::time::sleep(CONNECTION_LOOK_EVERY).await;
        }
    }

    /// Goes on to another server of the cluster: one that is cut off from the rest keeps its clients and reaches no gateway.
    async fn go_elsewhere(&self) {
        let client = &self.shared.client;
        let is_alone = !self.shared.url.contains(',') && client.server_info().connect_urls.len() < 2;
        if is_alone || client.connection_state() != ConnectionState::Connected {
            return;
        }
        {
            let mut went_at = self.shared.went_elsewhere_at.lock().unwrap_or_else(PoisonError::into_inner);
            if went_at.is_some_and(|at| at.elapsed() < ELSEWHERE_EVERY) {
                return;
            }
            *went_at = Some(Instant::now());
        }
        if let Err(error) = client.force_reconnect().await {
            tracing::debug!(%error, "the connection is closed");
        }
    }

    fn read<R: DeserializeOwned>(&self, payload: &[u8]) -> Result<R, BallastError> {
        let unreadable = |error: serde_json::Error| {
            let message =
                format!("the gateway's answer can not be read ({error}); are client and gateway of one version?");
            BallastError::new(ErrorCode::InvalidArgument, message)
        };
        let mut body: Value = serde_json::from_slice(payload).map_err(unreadable)?;
        if let Some(error) = BallastError::from_body(&body) {
            return Err(error);
        }
        // Replies refuse unknown fields, so the one that every reply carries is taken out first.
        let seq = body.as_object_mut().and_then(|fields| fields.remove("log_seq"));
        self.shared.seen_seq.fetch_max(seq.and_then(|seq| seq.as_u64()).unwrap_or(0), Ordering::Relaxed);
        serde_json::from_value(body).map_err(unreadable)
    }

    fn nobody(&self, kind: RequestErrorKind, reason: &str, waited: Duration) -> BallastError {
        let url = &self.shared.url;
        if self.shared.client.connection_state() != ConnectionState::Connected {
            return no_server(url, "the connection is gone", self.shared.address_flag);
        }
        match kind {
            RequestErrorKind::NoResponders => {
                let message = format!(
                    "no Ballast gateway answers on the NATS server at {url}: start one with `ballast gateway --nats {url}` (`ballast dev` brings its own)"
                );
                BallastError::new(ErrorCode::Unavailable, message).with_details(json!({"missing": "gateway"}))
            }
            RequestErrorKind::TimedOut => {
                let message = format!("the Ballast gateway at {url} has not answered for {} s", waited.as_secs());
                BallastError::new(ErrorCode::Unavailable, message).with_details(json!({"missing": "answer"}))
            }
            RequestErrorKind::InvalidSubject | RequestErrorKind::MaxPayloadExceeded => {
                BallastError::invalid(format!("the request can not be sent: {reason}"))
            }
            RequestErrorKind::Other => {
                BallastError::new(ErrorCode::Unavailable, format!("the request to {url} was not sent: {reason}"))
            }
        }
    }
}

fn no_server(url: &str, reason: &str, address_flag: &str) -> BallastError {
    let message = format!(
        "no NATS server answers at {url} ({reason}): start one (`ballast dev` brings its own) or give the right address with {address_flag}"
    );
    BallastError::new(ErrorCode::Unavailable, message).with_details(json!({"missing": "server"}))
}
