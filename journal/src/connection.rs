//! Connecting to NATS: the options every part of Ballast uses, and the check that the server is new enough.
//!
//! Of several servers a connection takes the next one each time, and a [`Lookout`] has it leave one through which JetStream can
//! not be reached: a server that is cut off from the others answers pings all the same.
//!
//! Not here: starting a server (`server.rs`), setting up streams (`streams.rs`). See ARCHITECTURE.md, The log and the fold.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_nats::connection::State as ConnectionState;
use async_nats::{Client, ConnectOptions, ReconnectToServer, Request};
use tokio::task::JoinHandle;

use crate::server::{OLDEST_VERSION, RECOMMENDED_VERSION, ServerVersion};

/// A dead peer that sends no reset is noticed after three of these.
const PING_INTERVAL: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const RECONNECT_DELAY_MAX: Duration = Duration::from_millis(500);
const RETRY_EVERY: Duration = Duration::from_millis(200);

/// Counts the connections that this process made or tried.
static TURN: AtomicUsize = AtomicUsize::new(0);

/// Answered by the leader of the JetStream cluster alone, or refused by a server that knows none.
const JETSTREAM_INFO: &str = "$JS.API.INFO";
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// Most elections are over by then.
const LEAVE_AFTER: Duration = Duration::from_secs(6);
/// Where no server is better, changing is of no use.
const LEAVE_AFTER_MAX: Duration = Duration::from_secs(60);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(
        "no NATS server answers at {url} ({reason}): start one (`ballast dev` brings its own) or give the right address with --nats"
    )]
    Unreachable { url: String, reason: String },
    #[error(
        "the NATS server at {url} is version {found}, and Ballast needs >= {OLDEST_VERSION}: older servers lack stream metadata, the strict JetStream API and fixes for lost streams"
    )]
    TooOld { url: String, found: String },
}

impl ConnectError {
    /// Whether trying again later can help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// Connects to `url` (several, separated by commas, are the servers of one cluster), trying for up to `patience`.
///
/// `name` is what the server's monitoring shows. Once connected, the client reconnects by itself for ever.
pub async fn connect(url: &str, name: &str, patience: Duration) -> Result<Client, ConnectError> {
    let deadline = Instant::now() + patience;
    let client = loop {
        let addresses: Vec<&str> = url.split(',').map(str::trim).filter(|address| !address.is_empty()).collect();
        let attempt = options(name).connect(addresses).await;
        match attempt {
            Ok(client) => break client,
            Err(error) if Instant::now() >= deadline => {
                return Err(ConnectError::Unreachable { url: url.to_owned(), reason: error.to_string() });
            }
            Err(_) => tokio::time::sleep(RETRY_EVERY).await,
        }
    };
    let found = client.server_info().version;
    match found.parse::<ServerVersion>() {
        Ok(version) if version < OLDEST_VERSION => return Err(ConnectError::TooOld { url: url.to_owned(), found }),
        Ok(version) if version < RECOMMENDED_VERSION => {
            tracing::warn!(%version, "nats-server < {RECOMMENDED_VERSION} syncs replicated streams one by one: durable appends will be slow");
        }
        Ok(_) => {}
        // A private build may name itself as it likes; it is the operator's choice.
        Err(()) => {
            tracing::warn!(version = found, "the NATS server's version can not be read: expected >= {OLDEST_VERSION}")
        }
    }
    Ok(client)
}

fn options(name: &str) -> ConnectOptions {
    ConnectOptions::new()
        // By turns: who leaves a server must not come back to it by chance.
        .reconnect_to_server_callback(|servers, _| {
            let turn = std::process::id() as usize + TURN.fetch_add(1, Ordering::Relaxed);
            let next = servers.get(turn % servers.len().max(1)).cloned();
            async move { next.map(|server| ReconnectToServer { addr: server.addr, delay: None }) }
        })
        .name(name)
        // A fork would count on where its parent stood, as would its siblings, and they would hear each other's replies.
        .custom_inbox_prefix(format!("_INBOX.{}", uuid::Uuid::new_v4().simple()))
        .ping_interval(PING_INTERVAL)
        .connection_timeout(CONNECT_TIMEOUT)
        .request_timeout(Some(REQUEST_TIMEOUT))
        .reconnect_delay_callback(|attempts| {
            let exponent = u32::try_from(attempts.min(16)).unwrap_or(16);
            Duration::from_millis(2_u64.saturating_pow(exponent)).min(RECONNECT_DELAY_MAX)
        })
        .event_callback(|event| async move {
            match event {
                async_nats::Event::Connected => tracing::debug!("connected to NATS"),
                async_nats::Event::Disconnected => tracing::warn!("the NATS connection is gone: reconnecting"),
                other => tracing::debug!(event = %other, "NATS client"),
            }
        })
}

/// Watches a connection for as long as it lives: when JetStream can not be reached through its server, the connection goes on
/// to another one.
#[derive(Debug)]
pub struct Lookout {
    task: JoinHandle<()>,
}

impl Lookout {
    pub fn start(client: &Client) -> Self {
        Self { task: tokio::spawn(look_out(client.clone())) }
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn look_out(client: Client) {
    let mut leave_after = LEAVE_AFTER;
    let mut useless_since = None;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        // Without a connection the client library looks for a server by itself.
        if client.connection_state() != ConnectionState::Connected {
            useless_since = None;
            continue;
        }
        let asked_at = Instant::now();
        if reaches_jetstream(&client).await {
            (leave_after, useless_since) = (LEAVE_AFTER, None);
            continue;
        }
        let since = *useless_since.get_or_insert(asked_at);
        if since.elapsed() >= leave_after {
            tracing::warn!("JetStream does not answer through this NATS server: going on to another");
            // An error means that the client is closed.
            if client.force_reconnect().await.is_err() {
                return;
            }
            (leave_after, useless_since) = ((leave_after * 2).min(LEAVE_AFTER_MAX), None);
        }
    }
}

async fn reaches_jetstream(client: &Client) -> bool {
    let request = Request::new().timeout(Some(LOOK_TIMEOUT));
    let Ok(answer) = client.send_request(JETSTREAM_INFO, request).await else { return false };
    let body: serde_json::Value = serde_json::from_slice(&answer.payload).unwrap_or_default();
    body["error"]["code"] != 503
}
