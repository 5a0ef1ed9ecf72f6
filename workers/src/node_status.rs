//! What a node says of itself: the status that it publishes every second, and the report of what it runs on for the one who
//! starts it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use async_nats::connection::State as ConnectionState;
use ballast_schemas::{NodeEndpoint, NodeId, NodeStatus, subject};
use ballast_transfer::{Adoption, NodeStore};
use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

const STATUS_EVERY: Duration = Duration::from_secs(1);

/// What a transfer worker runs on, for its ready line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeReport {
    /// The node.
    pub node: NodeId,
    /// Bytes that the memory tier may use.
    pub memory_bytes: u64,
    /// Its folder.
    pub memory_folder: PathBuf,
    /// `tmpfs, huge pages`, or `tmpfs, 4 KiB pages (why)`.
    pub memory_kind: String,
    /// The cold tier, if there is one.
    pub cold: Option<ColdTierReport>,
    /// The Unix socket of the data plane.
    pub unix_socket: Option<PathBuf>,
    /// `address:port` of the data plane, as others are told.
    pub tcp: Option<String>,
    /// The devices and addresses that RDMA can be asked for at, or why there is none.
    pub rdma: Result<String, String>,
    /// What was found in the folders.
    pub adoption: Adoption,
}

impl NodeReport {
    /// RDMA as the node's status has it.
    pub(crate) fn rdma_text(&self) -> String {
        self.rdma.clone().unwrap_or_else(|why| format!("none ({why})"))
    }
}

/// What the cold tier of a transfer worker runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColdTierReport {
    /// The folder, or the address of the bucket.
    pub place: PathBuf,
    /// Bytes that the tier may use.
    pub quota_bytes: u64,
    /// The engine that moves the bytes, and why it is not the first choice if it is not.
    pub engine: String,
}

impl fmt::Display for NodeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "node {}: memory {} MiB in {} ({})",
            self.node,
            self.memory_bytes >> 20,
            self.memory_folder.display(),
            self.memory_kind
        )?;
        match &self.cold {
            Some(cold) => {
                write!(f, "; cold {} MiB in {} ({})", cold.quota_bytes >> 20, cold.place.display(), cold.engine)?
            }
            None => f.write_str("; no cold tier (--cold FOLDER or --cold-url URL gives it one)")?,
        }
        if let Some(path) = &self.unix_socket {
            write!(f, "; shared memory at {}", path.display())?;
        }
        if let Some(address) = &self.tcp {
            write!(f, "; TCP at {address}")?;
        }
        if let Ok(devices) = &self.rdma {
            write!(f, "; RDMA at {devices}")?;
        }
        let found = &self.adoption;
        if found.instances > 0 {
            write!(
                f,
                "; {} groups re-adopted, {} MiB in memory, {} MiB cold",
                found.instances,
                found.hot_bytes >> 20,
                found.cold_bytes >> 20
            )?;
        }
        Ok(())
    }
}

/// How the node stands towards the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeCondition {
    /// Introduced: it serves.
    Serving,
    /// It serves nothing that it held before, and takes no import.
    NotServing {
        /// Why, and what would change it.
        reason: String,
    },
}

/// The id of this host, for clients that may share memory with the node.
pub(crate) fn host_id() -> String {
    ballast_transfer::host_id().unwrap_or_else(|error| {
        // Nobody takes an empty id for their own, so everybody uses TCP.
        tracing::warn!(%error, "this host has no boot id: clients will use TCP");
        String::new()
    })
}

/// Publishes the node's status every second, and at once when its condition changes, for as long as it is polled.
pub(crate) async fn publish_status(
    client: Client,
    store: Arc<NodeStore>,
    endpoint: NodeEndpoint,
    rdma: String,
    labels: BTreeMap<String, String>,
    mut condition: watch::Receiver<NodeCondition>,
) {
    let subject = subject::node_status(store.node());
    let mut tick = tokio::time::interval(STATUS_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            changed = condition.changed() => if changed.is_err() { return },
        }
        // What is published while the connection is gone would arrive later, as news that is none.
        if client.connection_state() != ConnectionState::Connected {
            continue;
        }
        let not_serving = match &*condition.borrow_and_update() {
            NodeCondition::Serving => None,
            NodeCondition::NotServing { reason } => Some(reason.clone()),
        };
        let (store, endpoint, rdma, labels) = (Arc::clone(&store), endpoint.clone(), rdma.clone(), labels.clone());
        // Counting waits for instances whose records are being synced.
        let encoded = tokio::task::spawn_blocking(move || {
            serde_json::to_vec(&status(&store, endpoint, rdma, labels, not_serving))
        })
        .await;
        let body =
            match encoded.map_err(|error| error.to_string()).and_then(|body| body.map_err(|error| error.to_string())) {
                Ok(body) => Bytes::from(body),
                Err(error) => {
                    tracing::error!(error, "the node's status can not be told");
                    continue;
                }
            };
        if let Err(error) = client.publish(subject.clone(), body).await {
            tracing::debug!(%error, "status not published");
        }
    }
}

fn status(
    store: &NodeStore,
    endpoint: NodeEndpoint,
    rdma: String,
    labels: BTreeMap<String, String>,
    not_serving: Option<String>,
) -> NodeStatus {
    let usage = store.usage();
    NodeStatus {
        endpoint,
        incarnation: store.incarnation().to_owned(),
        cluster_id: store.cluster(),
        not_serving,
        memory_capacity_bytes: usage.memory.limit_bytes,
        memory_used_bytes: usage.memory.used_bytes.saturating_sub(usage.objects.bytes),
        memory_kind: store.memory_report().to_string(),
        cold_capacity_bytes: usage.cold.map_or(0, |cold| cold.limit_bytes),
        cold_used_bytes: usage.cold.map_or(0, |cold| cold.used_bytes),
        cold_engine: store.cold_report().map_or_else(|| "none".to_owned(), ToString::to_string),
        rdma,
        instances: usage.instances,
        quarantined: usage.quarantined,
        objects: usage.objects,
        shared_imports: true,
        labels,
    }
}
