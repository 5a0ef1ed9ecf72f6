//! Connecting to NATS: the options every part of Ballast uses, and the check that the server is new enough.
//!
//! Not here: starting a server (`server.rs`), setting up streams (`streams.rs`). See ARCHITECTURE.md, The log and the fold.

use std::time::{Duration, Instant};

use async_nats::{Client, ConnectOptions};

use crate::server::{OLDEST_VERSION, RECOMMENDED_VERSION, ServerVersion};

/// A dead peer that sends no reset is noticed after two of these.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const RECONNECT_DELAY_MAX: Duration = Duration::from_millis(500);
const RETRY_EVERY: Duration = Duration::from_millis(200);

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
        .name(name)
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
