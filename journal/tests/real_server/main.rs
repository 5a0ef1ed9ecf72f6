//! The journal against a real nats-server child (`ops/fetch-nats-server` installs it): the log, its loss, replicas, snapshots.

mod agreement;
mod history;
mod log;
mod replicas;
mod server;
mod side_streams;
mod streams;

use std::time::{Duration, Instant};

use ballast_journal::{EmbeddedServer, ServerOptions, StreamOptions, Streams, connect, open_streams};
use tempfile::TempDir;

/// Far beyond what anything here takes; a test that reaches it has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server in a folder of its own, with a cluster's streams.
struct Cluster {
    server: EmbeddedServer,
    streams: Streams,
    folder: TempDir,
}

impl Cluster {
    async fn start() -> Self {
        Self::start_with(&StreamOptions::default()).await
    }

    async fn start_with(options: &StreamOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = start_server(&folder).await;
        let streams = streams_of(&server, options).await;
        Self { server, streams, folder }
    }

    /// Stops the server in order and starts it again on the same folder.
    async fn restart(self) -> Self {
        let Self { server, streams, folder } = self;
        server.stop().await;
        let server = start_server(&folder).await;
        Self { server, streams, folder }
    }
}

async fn start_server(folder: &TempDir) -> EmbeddedServer {
    // The error says what to run when there is no nats-server.
    EmbeddedServer::start(ServerOptions::new(folder.path())).await.unwrap_or_else(|error| panic!("{error}"))
}

async fn streams_of(server: &EmbeddedServer, options: &StreamOptions) -> Streams {
    let client = connect(&server.url(), "journal-test", PATIENCE).await.unwrap();
    open_streams(client, options).await.unwrap()
}

/// Asks until the answer is yes.
async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Fails the test when `future` takes longer than anything here may.
async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}
