//! The gateway process: connects, opens the cluster's streams, folds the log, and serves callers, nodes and scrapers until it is
//! told to stop. Any number of gateways may run; none is special.
//!
//! Beside the requests it keeps the cluster's chores going: ticks, snapshots, events, work hints.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Subscriber};
use ballast_journal::nodes::{Directory, NodeClient};
use ballast_journal::{
    ConnectError, DigestExchange, EventPublisher, HintPublisher, JetStreamLog, JetStreamSnapshots, KeyError, Log,
    Lookout, OpenStreamsError, Replica, ReplicaError, ReplicaOptions, RestoreFrom, SnapshotRules, StreamOptions,
    Streams, UpkeepOptions, connect, open_streams, token_key,
};
use ballast_schemas::{Capability, ClusterConfig, CreateCluster, ReplicaId};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::context::Context;
use crate::metrics::Metrics;
use crate::placement::Promises;
use crate::tokens::TokenIssuer;
use crate::{hello, http, inbox, service};

/// Left free of an answer for headers, below the server's largest message.
const HEADERS_BYTES: usize = 8 * 1024;
/// Requests under way get this long when the gateway stops.
const DRAIN_PATIENCE: Duration = Duration::from_secs(5);
const HTTP_PATIENCE: Duration = Duration::from_secs(1);

/// How a gateway runs.
#[derive(Debug, Clone)]
pub struct GatewayOptions {
    /// The NATS servers of one cluster, separated by commas.
    pub nats_url: String,
    /// This process's name among the replicas.
    pub replica_id: ReplicaId,
    /// Where health and metrics are served; `None` = nowhere. Port 0 is any free one.
    pub http: Option<SocketAddr>,
    /// How long the first connection is tried.
    pub connect_patience: Duration,
    /// How the streams are made where there are none.
    pub streams: StreamOptions,
    /// Settings of a cluster that this gateway creates.
    pub config: ClusterConfig,
    /// Families that are confirmed when this gateway creates the cluster. A new log has no older replica that could not
    /// fold them, so by default all are.
    pub capabilities: Vec<Capability>,
    /// Which snapshot to start from.
    pub restore_from: RestoreFrom,
    /// When snapshots are written and what of the log is kept.
    pub snapshots: SnapshotRules,
    /// Requests worked on at once; beyond that they are refused as UNAVAILABLE.
    pub requests_in_flight_max: u32,
    /// A request is answered after this long in any case.
    pub request_deadline: Duration,
}

impl GatewayOptions {
    /// The defaults for a gateway on `nats_url`.
    pub fn new(nats_url: impl Into<String>, replica_id: ReplicaId) -> Self {
        Self {
            nats_url: nats_url.into(),
            replica_id,
            http: None,
            connect_patience: Duration::from_secs(10),
            streams: StreamOptions::default(),
            config: ClusterConfig::default(),
            capabilities: Capability::ALL.to_vec(),
            restore_from: RestoreFrom::Newest,
            snapshots: SnapshotRules::default(),
            requests_in_flight_max: 4096,
            request_deadline: Duration::from_secs(15),
        }
    }
}

/// Why a gateway does not start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A setting that can not work.
    #[error("the cluster's settings are wrong: {reason}")]
    Config {
        /// Which, and what it must be.
        reason: String,
    },
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The cluster's streams can not be used.
    #[error(transparent)]
    Streams(#[from] OpenStreamsError),
    /// No token key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The log can not be folded.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The replica stopped while the gateway ran.
    #[error("the gateway stops: {0}")]
    Stopped(Arc<ReplicaError>),
    /// The service can not be registered.
    #[error("the NATS service cannot be registered: {reason}")]
    Service {
        /// What NATS said.
        reason: String,
    },
    /// The HTTP address can not be used.
    #[error("HTTP can not be served on {address}: {source} (give another --http)")]
    Http {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
}

/// A gateway that listens already; [`Gateway::run`] answers.
#[derive(Debug)]
pub struct Gateway {
    options: GatewayOptions,
    client: Client,
    context: Arc<Context>,
    log: Arc<dyn Log>,
    listening: service::Listening,
    hellos: Subscriber,
    http: Option<(TcpListener, SocketAddr)>,
    handle: GatewayHandle,
    _publishers: (EventPublisher, HintPublisher),
    _lookouts: [Lookout; 2],
}

/// What others in the same process may use of a gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub struct GatewayHandle {
    replica: Replica,
    directory: Directory,
    streams: Streams,
    http: Option<SocketAddr>,
}

impl GatewayHandle {
    /// The gateway's replica; whoever needs the state in this process can share it.
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// The gateway's directory of nodes.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The cluster's streams.
    pub fn streams(&self) -> &Streams {
        &self.streams
    }

    /// Where health and metrics are served.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http
    }
}

impl Gateway {
    /// Connects, opens (or creates) the cluster, catches up with the log, and begins to listen.
    ///
    /// # Errors
    /// When any of these fails; nothing is left running then.
    pub async fn open(options: GatewayOptions) -> Result<Self, GatewayError> {
        options.config.validate().map_err(|reason| GatewayError::Config { reason })?;
        let http = match options.http {
            Some(address) => Some(http::bind(address).await.map_err(|source| GatewayError::Http { address, source })?),
            None => None,
        };
        let name = format!("ballast-gateway {}", options.replica_id);
        let client = connect(&options.nats_url, &name, options.connect_patience).await?;
        let streams = open_streams(client.clone(), &options.streams).await?;
        let tokens = TokenIssuer::new(token_key(&streams).await?)?;
        let (events, sink) = EventPublisher::start(&streams);
        let log: Arc<dyn Log> = Arc::new(JetStreamLog::new(&streams));
        let create = CreateCluster {
            cluster_id: streams.cluster_id().clone(),
            incarnation: 1,
            config: options.config.clone(),
            capabilities: options.capabilities.clone(),
        };
        let replica_options = ReplicaOptions {
            cluster_id: Some(streams.cluster_id().clone()),
            create: Some(create),
            restore_from: options.restore_from,
            events: Some(sink),
            digests: Some(DigestExchange::new(&streams)),
            upkeep: UpkeepOptions { snapshots: Some(options.snapshots), ..UpkeepOptions::default() },
            ..ReplicaOptions::new(options.replica_id.clone())
        };
        let replica =
            Replica::start(Arc::clone(&log), Some(Arc::new(JetStreamSnapshots::new(&streams))), replica_options)
                .await?;
        let hints = HintPublisher::start(&streams, replica.clone());
        let directory = Directory::start(&streams);
        let context = Arc::new(Context {
            replica: replica.clone(),
            directory: directory.clone(),
            nodes: NodeClient::new(client.clone()),
            tokens,
            metrics: Metrics::new(),
            promises: Promises::default(),
            cluster_id: streams.cluster_id().clone(),
            replica_id: options.replica_id.clone(),
            answer_bytes_max: client.server_info().max_payload.saturating_sub(HEADERS_BYTES),
        });
        let refused = |reason: String| GatewayError::Service { reason };
        let hellos = hello::listen(&client).await.map_err(|error| refused(error.to_string()))?;
        let front = connect(&options.nats_url, &format!("{name} requests"), options.connect_patience).await?;
        let lookouts = [Lookout::start(&client), Lookout::start(&front)];
        let listening = service::listen(front, &context).await.map_err(|error| refused(error.to_string()))?;
        listening.pass_through(&client).await.map_err(|error| refused(error.to_string()))?;
        let handle = GatewayHandle { replica, directory, streams, http: http.as_ref().map(|(_, address)| *address) };
        Ok(Self {
            options,
            client,
            context,
            log,
            listening,
            hellos,
            http,
            handle,
            _publishers: (events, hints),
            _lookouts: lookouts,
        })
    }

    /// What others in this process may use of it.
    pub fn handle(&self) -> GatewayHandle {
        self.handle.clone()
    }

    /// Answers until `shutdown` resolves, then finishes what is under way.
    ///
    /// # Errors
    /// When the replica stops (the log can not be folded any further) or HTTP can not be served any more.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), GatewayError> {
        let Self { options, client, context, log, listening, hellos, http, handle, _publishers, _lookouts } = self;
        let (stop, stopping) = watch::channel(false);
        let mut chores = JoinSet::new();
        chores.spawn(hello::answer_all(hellos, client.clone(), Arc::clone(&context)));
        chores.spawn(inbox::run(inbox::jetstream(&client), Arc::clone(&context), options.request_deadline));
        let pages = http::Pages { context: Arc::clone(&context), client: client.clone(), log };
        let has_http = http.is_some();
        let http_ended = async move {
            match http {
                Some((listener, address)) => {
                    let served = http::serve(listener, pages, stopping).await;
                    served.map_err(|source| GatewayError::Http { address, source })
                }
                None => std::future::pending().await,
            }
        };
        tokio::pin!(http_ended);
        let mut failure = handle.replica.failure();
        let mut ended = Ok(());
        let mut is_http_over = false;
        let stopped = async {
            tokio::select! {
                () = shutdown => {}
                failed = failure.wait_for(Option::is_some) => {
                    if let Ok(Some(error)) = failed.as_deref() {
                        ended = Err(GatewayError::Stopped(Arc::clone(error)));
                    }
                }
                served = &mut http_ended => {
                    is_http_over = true;
                    ended = served;
                }
            }
        };
        let limits = service::Limits {
            in_flight_max: options.requests_in_flight_max.max(1),
            deadline: options.request_deadline,
        };
        service::run(listening, client.clone(), context, limits, stopped, DRAIN_PATIENCE).await;
        stop.send_replace(true);
        if has_http && !is_http_over {
            // A scraper that holds its connection open does not hold the gateway up.
            let _ = tokio::time::timeout(HTTP_PATIENCE, http_ended).await;
        }
        chores.shutdown().await;
        if let Err(error) = client.flush().await {
            tracing::debug!(%error, "the connection was gone already");
        }
        ended
    }
}
