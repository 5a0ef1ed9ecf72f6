//! Takes over the cold replicas of nodes that are gone, where they are kept in object storage and so outlive their node (see
//! ARCHITECTURE.md, The cold tier's back-ends). What was taken over is served once a gateway has said that the log knows it.
//!
//! Taking from a node that was only cut off harms nobody: it finds out before it next relies on its replica.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use async_nats::connection::State as ConnectionState;
use ballast_journal::nodes::Directory;
use ballast_schemas::NodeId;
use ballast_transfer::NodeStore;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How often it is looked who is there.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often the object storage is asked for replicas of nodes that are away.
const ASK_EVERY: Duration = Duration::from_secs(10);
/// A node that was not heard of for this long is gone. Long enough for a restart of a machine's service, and for the watch
/// over losses to have said what is lost.
const GONE_AFTER: Duration = Duration::from_secs(30);

/// Looks after what other nodes have left.
#[derive(Debug)]
pub(crate) struct TakeOver {
    pub client: Client,
    pub store: Arc<NodeStore>,
    pub directory: Directory,
    /// Told when something was taken over, so that the node introduces itself with it.
    pub taken: Arc<Notify>,
}

impl TakeOver {
    /// Takes over for as long as it is polled.
    pub(crate) async fn run(self) {
        let mut heard: BTreeMap<NodeId, Instant> = BTreeMap::new();
        let mut listening_since = Instant::now();
        let mut asked = Instant::now();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = Instant::now();
            // Whoever hears nobody is the one that is cut off.
            if self.client.connection_state() != ConnectionState::Connected {
                listening_since = now;
                continue;
            }
            heard.extend(self.directory.nodes().into_iter().map(|status| (status.endpoint.node, now)));
            if asked.elapsed() < ASK_EVERY {
                continue;
            }
            asked = now;
            let store = Arc::clone(&self.store);
            let last = heard.clone();
            let is_gone = move |node: &NodeId| {
                let last = last.get(node).copied().unwrap_or(listening_since).max(listening_since);
                now.duration_since(last) >= GONE_AFTER
            };
            match tokio::task::spawn_blocking(move || store.adopt_from(&is_gone)).await {
                Ok(Ok(taken)) if taken.is_empty() => {}
                Ok(Ok(taken)) => {
                    tracing::info!(instances = taken.len(), "took over cold replicas of nodes that are gone");
                    self.taken.notify_one();
                }
                Ok(Err(error)) => tracing::warn!(%error, "cold replicas of nodes that are gone can not be looked for"),
                Err(error) => tracing::error!(%error, "taking over cold replicas ended badly"),
            }
        }
    }
}
