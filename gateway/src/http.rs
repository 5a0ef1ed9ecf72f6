//! Health and metrics over HTTP: `/healthz` (the process runs), `/readyz` (it can answer callers, or why not), `/metrics`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use async_nats::connection::State as ConnectionState;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ballast_journal::Log;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::context::Context;

/// How long a scrape waits for the log's figures.
const LOG_PATIENCE: Duration = Duration::from_secs(1);
/// A replica further behind than this is not ready: its answers are old.
const LAG_MAX: u64 = 10_000;

/// What the pages are made of.
#[derive(Debug, Clone)]
pub(crate) struct Pages {
    pub context: Arc<Context>,
    pub client: Client,
    pub log: Arc<dyn Log>,
}

/// Takes the address; port 0 is any free one.
pub(crate) async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), std::io::Error> {
    let listener = TcpListener::bind(address).await?;
    let local = listener.local_addr()?;
    Ok((listener, local))
}

/// Serves until `stop` turns true.
pub(crate) async fn serve(
    listener: TcpListener,
    pages: Pages,
    mut stop: watch::Receiver<bool>,
) -> Result<(), std::io::Error> {
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(pages);
    let stopped = async move {
        // A sender that is gone means the same.
        let _ = stop.wait_for(|stop| *stop).await;
    };
    axum::serve(listener, router).with_graceful_shutdown(stopped).await
}

async fn ready(State(pages): State<Pages>) -> Response {
    let not_ready =
        |reason: String| (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")).into_response();
    if let Some(error) = pages.context.replica.failure().borrow().as_ref() {
        return not_ready(error.to_string());
    }
    if pages.client.connection_state() != ConnectionState::Connected {
        return not_ready("the NATS connection is gone".to_owned());
    }
    let folded = pages.context.replica.log_seq();
    match tokio::time::timeout(LOG_PATIENCE, pages.log.bounds()).await {
        Ok(Ok(bounds)) if bounds.last_seq.saturating_sub(folded) > LAG_MAX => {
            not_ready(format!("the log is at {}, this replica has folded {folded}", bounds.last_seq))
        }
        Ok(Ok(_)) => format!("ready: folded {folded}\n").into_response(),
        Ok(Err(error)) => not_ready(error.to_string()),
        Err(_) => not_ready(format!("the log does not answer within {} ms", LOG_PATIENCE.as_millis())),
    }
}

async fn metrics(State(pages): State<Pages>) -> Response {
    let bounds = tokio::time::timeout(LOG_PATIENCE, pages.log.bounds()).await.ok().and_then(Result::ok);
    let nodes = pages.context.directory.nodes();
    let look =
        |state: &ballast_workflows::State| (state.log_seq(), state.counts(), state.automatic_migrations().clone());
    let (folded, counts, automatic) = pages.context.replica.read(look);
    match pages.context.metrics.scrape(folded, &counts, &automatic, bounds.as_ref(), &nodes) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
            .into_response(),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("metrics cannot be encoded: {error}\n")).into_response()
        }
    }
}
