//! The transfer worker: one node. Owns a node's two tiers through the store, belongs to a cluster (`membership`), serves the data
//! plane to clients, carries out the control requests of workflow workers (`node_control`) and tells what it holds
//! (`inventory_mirror`, `node_status`). RFC, Overall Architecture; ARCHITECTURE.md, Nodes.
//!
//! While NATS is away the data plane goes on: what a lease allowed stays readable.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use ballast_journal::nodes::{Directory, NodeListener, NodeListenerError};
use ballast_schemas::{NodeEndpoint, NodeId};
use ballast_transfer::{
    BindError, ColdOptions, DataPlane, DataPlaneOptions, MemoryOptions, NodeStore, NodeStoreOptions, OpenError,
    TokenGate, rdma_devices,
};
use tokio::net::lookup_host;
use tokio::sync::watch;

use crate::failpoint::{Failpoint, FailpointError};
use crate::inventory_mirror::{InventoryMirror, Touched};
use crate::membership::Membership;
use crate::node_control::NodeControl;
use crate::node_status::{ColdTierReport, NodeCondition, NodeReport, host_id, publish_status};
use crate::object_desk::ObjectDesk;
use crate::take_over::TakeOver;

/// How long a stopping node lets the control requests under way end.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How long the last status may take to leave.
const FAREWELL_PATIENCE: Duration = Duration::from_millis(500);

/// What a transfer worker needs.
#[derive(Clone, Debug)]
pub struct TransferWorkerOptions {
    /// The connection to NATS.
    pub client: Client,
    /// The node's durable name; one subject token.
    pub node: NodeId,
    /// The memory tier.
    pub memory: MemoryOptions,
    /// The cold tier, if the node has one.
    pub cold: Option<ColdOptions>,
    /// Where clients on this host connect; `None`: nowhere.
    pub unix_socket: Option<PathBuf>,
    /// Where other clients connect, `address:port`; port 0 takes any. `None`: nowhere.
    pub tcp_listen: Option<String>,
    /// The `host` or `host:port` that other clients are told; `None`: the address listened on.
    pub tcp_advertise: Option<String>,
    /// Whether other clients may use RDMA beside TCP, where this host has it.
    pub rdma: bool,
    /// Free labels for people and placement.
    pub labels: BTreeMap<String, String>,
}

/// Why a transfer worker does not start, or ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum TransferWorkerError {
    /// The name would split a subject.
    #[error("the node name {node} can not stand as one subject token: choose one without '.', '*' and '>'")]
    Name {
        /// The name.
        node: NodeId,
    },
    /// The store can not be opened.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// Opening it ended badly.
    #[error("opening the node's folders ended badly: {reason}")]
    OpenEnded {
        /// What happened.
        reason: String,
    },
    /// No address to listen on.
    #[error("{given:?} is no address to listen on ({reason}); give <address>:<port>, like 127.0.0.1:0")]
    Address {
        /// What was given.
        given: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Clients could not be told where to connect.
    #[error("{listen} is every address of this host: say which of them (or which name) clients are told")]
    Advertise {
        /// The address listened on.
        listen: SocketAddr,
    },
    /// A listener can not be opened.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Control requests can not be heard.
    #[error(transparent)]
    Listener(#[from] NodeListenerError),
    /// Requests about ordinary objects can not be heard.
    #[error("requests about ordinary objects can not be heard: {reason}")]
    Objects {
        /// What happened.
        reason: String,
    },
    /// A test aid makes no sense.
    #[error(transparent)]
    Failpoint(#[from] FailpointError),
    /// Nothing can be heard any more.
    #[error("the NATS connection was closed for good")]
    ConnectionClosed,
}

/// A node with its folders taken and its doors open; [`TransferWorker::run`] lets people in.
#[derive(Debug)]
pub struct TransferWorker {
    client: Client,
    store: Arc<NodeStore>,
    data_plane: DataPlane,
    endpoint: NodeEndpoint,
    labels: BTreeMap<String, String>,
    report: NodeReport,
    membership: Membership,
    failpoint: Failpoint,
}

impl TransferWorker {
    /// Takes the folders, adopts what is intact in them, and opens the listeners. Nobody is served yet.
    ///
    /// # Errors
    /// When a folder or an address can not be used. Nothing is changed then.
    pub async fn open(options: TransferWorkerOptions) -> Result<Self, TransferWorkerError> {
        let failpoint = Failpoint::from_env()?;
        let TransferWorkerOptions { client, node, memory, cold, unix_socket, tcp_listen, tcp_advertise, rdma, labels } =
            options;
        if !node.is_subject_token() {
            return Err(TransferWorkerError::Name { node });
        }
        let tcp = match tcp_listen {
            Some(given) => Some(resolve(&given).await?),
            None => None,
        };
        let store_options = NodeStoreOptions { node: node.clone(), memory, cold };
        let opened = tokio::task::spawn_blocking(move || NodeStore::open(&store_options)).await;
        let store = opened.map_err(|error| TransferWorkerError::OpenEnded { reason: error.to_string() })??;
        let gate = TokenGate::closed();
        let plane_options = DataPlaneOptions { unix_socket, tcp, rdma, ..DataPlaneOptions::default() };
        let data_plane = DataPlane::bind(plane_options, Arc::clone(&store), gate.clone()).await?;
        let tcp = match data_plane.tcp_address() {
            Some(bound) => Some(advertised(bound, tcp_advertise)?),
            None => None,
        };
        let unix = data_plane.unix_socket().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        let endpoint = NodeEndpoint {
            node: node.clone(),
            host_id: host_id(),
            unix_socket: unix.as_ref().map(|path| path.display().to_string()),
            tcp: tcp.clone(),
        };
        let rdma = match rdma {
            true => tokio::task::spawn_blocking(rdma_devices).await.unwrap_or_else(|error| Err(error.to_string())),
            false => Err("switched off".to_owned()),
        };
        let report = report_of(&store, unix, tcp, rdma);
        let condition =
            watch::Sender::new(NodeCondition::NotServing { reason: "not introduced to a gateway yet".to_owned() });
        let membership = Membership {
            client: client.clone(),
            store: Arc::clone(&store),
            gate,
            condition,
            touched: Touched::default(),
            news: Arc::default(),
        };
        Ok(Self { client, store, data_plane, endpoint, labels, report, membership, failpoint })
    }

    /// What it runs on.
    #[must_use]
    pub fn report(&self) -> &NodeReport {
        &self.report
    }

    /// How it stands towards the cluster, now and later.
    #[must_use]
    pub fn condition(&self) -> watch::Receiver<NodeCondition> {
        self.membership.condition.subscribe()
    }

    /// Works until `shutdown` resolves, then lets the control requests under way end for a moment.
    ///
    /// # Errors
    /// When nothing can be heard any more.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), TransferWorkerError> {
        let Self { client, store, data_plane, endpoint, labels, report, membership, failpoint } = self;
        let rdma = report.rdma_text();
        let stop = watch::Sender::new(false);
        let condition = membership.condition.clone();
        let status = tokio::spawn(publish_status(
            client.clone(),
            Arc::clone(&store),
            endpoint,
            rdma,
            labels,
            condition.subscribe(),
        ));
        let data_plane = tokio::spawn(data_plane.run(told(stop.subscribe())));
        let ended = {
            let service = serve(client.clone(), store, membership, failpoint, stop.subscribe());
            tokio::pin!(service);
            tokio::select! {
                () = shutdown => {
                    stop.send_replace(true);
                    condition.send_replace(NodeCondition::NotServing { reason: "stopping".to_owned() });
                    service.await
                }
                ended = &mut service => ended,
            }
        };
        stop.send_replace(true);
        if let Err(error) = data_plane.await {
            tracing::error!(%error, "the data plane ended badly");
        }
        status.abort();
        // So that nobody waits for a node that went on purpose; the connection may be gone itself.
        let _ = tokio::time::timeout(FAREWELL_PATIENCE, client.flush()).await;
        ended
    }
}

/// Joins the cluster, then answers control requests and tells what is held, until told to stop.
async fn serve(
    client: Client,
    store: Arc<NodeStore>,
    membership: Membership,
    failpoint: Failpoint,
    stopping: watch::Receiver<bool>,
) -> Result<(), TransferWorkerError> {
    let streams = tokio::select! {
        streams = membership.join() => streams,
        () = told(stopping.clone()) => return Ok(()),
    };
    let listener = NodeListener::open(client.clone(), store.node()).await?;
    let objects = ObjectDesk::open(client.clone(), Arc::clone(&store))
        .await
        .map_err(|error| TransferWorkerError::Objects { reason: error.to_string() })?;
    // Whoever hears that the node serves can ask it: the subscription has reached the server. If it has not, the connection is
    // gone, and what was subscribed to is subscribed to again when it is back.
    let _ = tokio::time::timeout(FAREWELL_PATIENCE, client.flush()).await;
    let touched = membership.touched.clone();
    let take_over = store.cold_outlives_node().then(|| TakeOver {
        client,
        store: Arc::clone(&store),
        directory: Directory::start(&streams),
        taken: Arc::clone(&membership.news),
    });
    let mirror = InventoryMirror::new(Arc::clone(&store), streams, touched.clone());
    let control = NodeControl { store, touched, failpoint };
    let asked_to_stop = stopping.clone();
    tokio::select! {
        () = membership.stay() => {}
        () = mirror.run() => {}
        () = take_over_if(take_over) => {}
        () = objects.serve() => {}
        () = control.serve(listener, told(stopping), STOP_GRACE) => {}
    }
    if *asked_to_stop.borrow() { Ok(()) } else { Err(TransferWorkerError::ConnectionClosed) }
}

async fn take_over_if(take_over: Option<TakeOver>) {
    match take_over {
        Some(take_over) => take_over.run().await,
        None => std::future::pending().await,
    }
}

/// Resolves once it is told to; a dropped sender means the same.
async fn told(mut stopping: watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}

async fn resolve(given: &str) -> Result<SocketAddr, TransferWorkerError> {
    let wrong = |reason: String| TransferWorkerError::Address { given: given.to_owned(), reason };
    let mut found = lookup_host(given).await.map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("it has no address".to_owned()))
}

/// What clients are told of the address that was bound.
fn advertised(bound: SocketAddr, told: Option<String>) -> Result<String, TransferWorkerError> {
    match told {
        Some(host) if has_port(&host) => Ok(host),
        Some(host) => Ok(format!("{host}:{}", bound.port())),
        None if bound.ip().is_unspecified() => Err(TransferWorkerError::Advertise { listen: bound }),
        None => Ok(bound.to_string()),
    }
}

fn has_port(host: &str) -> bool {
    // An IPv6 address without a port is full of colons; with one it stands in brackets.
    let after_brackets = host.rsplit_once(']').map_or(host, |(_, rest)| rest);
    after_brackets.matches(':').count() == 1
}

fn report_of(
    store: &NodeStore,
    unix_socket: Option<PathBuf>,
    tcp: Option<String>,
    rdma: Result<String, String>,
) -> NodeReport {
    let memory = store.memory_report();
    NodeReport {
        node: store.node().clone(),
        memory_bytes: memory.budget_bytes,
        memory_folder: memory.folder.clone(),
        memory_kind: memory.to_string(),
        cold: store.cold_report().map(|cold| ColdTierReport {
            place: cold.place.clone(),
            quota_bytes: cold.quota_bytes,
            engine: cold.to_string(),
        }),
        unix_socket,
        tcp,
        rdma,
        adoption: store.adoption().clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_told_an_address_that_they_can_reach() {
        let told = |bound: &str, told: Option<&str>| advertised(bound.parse().unwrap(), told.map(str::to_owned));
        assert_eq!(told("127.0.0.1:7001", None).unwrap(), "127.0.0.1:7001");
        assert_eq!(told("0.0.0.0:7001", Some("node-1.site")).unwrap(), "node-1.site:7001");
        assert_eq!(told("0.0.0.0:7001", Some("node-1.site:9000")).unwrap(), "node-1.site:9000");
        assert_eq!(told("[::]:7001", Some("[fd00::1]")).unwrap(), "[fd00::1]:7001");
        assert_eq!(told("[::]:7001", Some("[fd00::1]:9000")).unwrap(), "[fd00::1]:9000");
        assert!(matches!(told("0.0.0.0:7001", None), Err(TransferWorkerError::Advertise { .. })));
    }
}
