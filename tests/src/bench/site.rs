//! A real server that syncs every write, with a gateway and a node that only says it is there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use ballast_gateway::{Gateway, GatewayOptions};
use ballast_journal::nodes::Directory;
use ballast_journal::{
    EmbeddedServer, JetStreamLog, Replica, ReplicaOptions, ServerOptions, SnapshotRules, StreamOptions, Streams,
    UpkeepOptions, connect, open_streams,
};
use ballast_schemas::{
    Command, InstanceId, MigrationMode, NodeEndpoint, NodeStatus, ObjectCounts, Reply, RevisionIdentity, subject,
};
use futures::future::try_join_all;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::world::{begin, commit, create, identity, name, node};
use super::{Error, Options};

const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
const NODE_SPEAKS_EVERY: Duration = Duration::from_secs(1);
/// The log is measured, not its trimming.
pub(super) const LOG_BYTES_MAX: u64 = 16 << 30;
/// Imports under way while revisions are published.
const PUBLISH_AT_ONCE: usize = 1_000;

/// A server in a folder of its own, and the cluster on it.
pub(super) struct Site {
    pub client: Client,
    pub streams: Streams,
    pub server: EmbeddedServer,
    _folder: TempDir,
}

impl Site {
    pub async fn start(options: &Options) -> Result<Self, Error> {
        std::fs::create_dir_all(&options.folder)?;
        let folder = tempfile::Builder::new().prefix("nats-").tempdir_in(&options.folder)?;
        let server = EmbeddedServer::start(ServerOptions::new(folder.path())).await?;
        let client = connect(&server.url(), "bench", CONNECT_PATIENCE).await?;
        let streams = open_streams(client.clone(), &stream_options()).await?;
        Ok(Self { client, streams, server, _folder: folder })
    }

    /// One more connection.
    pub async fn connect(&self) -> Result<Client, Error> {
        Ok(connect(&self.server.url(), "bench", CONNECT_PATIENCE).await?)
    }

    /// A replica as a workflow worker runs one: without events, snapshots and announcements.
    pub async fn replica(&self) -> Result<Replica, Error> {
        let log = Arc::new(JetStreamLog::new(&self.streams));
        Ok(Replica::start(log, None, self.replica_options()).await?)
    }

    pub fn replica_options(&self) -> ReplicaOptions {
        let mut create = create();
        create.cluster_id = self.streams.cluster_id().clone();
        ReplicaOptions {
            create: Some(create),
            upkeep: UpkeepOptions { announce: false, ..UpkeepOptions::default() },
            ..ReplicaOptions::new(name("bench-replica"))
        }
    }

    /// A gateway that knows of no node.
    pub async fn gateway_alone(&self) -> Result<GatewayAtWork, Error> {
        let never = Duration::from_secs(24 * 3600);
        let options = GatewayOptions {
            streams: stream_options(),
            snapshots: SnapshotRules { every_entries: u64::MAX, every: never, keep: never },
            ..GatewayOptions::new(self.server.url(), name("bench-gateway"))
        };
        let gateway = Gateway::open(options).await?;
        let handle = gateway.handle();
        let replica = handle.replica().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(async move {
            // Stopped by the sender's end.
            let ended = gateway.run(async { drop(stopped.await) }).await;
            ended.map_err(|error| error.to_string())
        });
        Ok(GatewayAtWork { replica, directory: handle.directory().clone(), stop, running, speaking: None })
    }

    /// A gateway, and a node that it can send readers to.
    pub async fn gateway(&self) -> Result<GatewayAtWork, Error> {
        let mut gateway = self.gateway_alone().await?;
        gateway.speaking = Some(tokio::spawn(speak(self.client.clone(), self.status())));
        let heard = gateway.directory.wait_for(CONNECT_PATIENCE, |directory| directory.node(&node(0))).await;
        heard.ok_or("the gateway did not hear of the node")?;
        Ok(gateway)
    }

    fn status(&self) -> NodeStatus {
        NodeStatus {
            endpoint: NodeEndpoint {
                node: node(0),
                host_id: "host".into(),
                unix_socket: None,
                tcp: Some("127.0.0.1:1".into()),
            },
            incarnation: "first".into(),
            cluster_id: Some(self.streams.cluster_id().clone()),
            not_serving: None,
            memory_capacity_bytes: 1 << 40,
            memory_used_bytes: 0,
            memory_kind: "none".into(),
            cold_capacity_bytes: 1 << 40,
            cold_used_bytes: 0,
            cold_engine: "none".into(),
            instances: 0,
            quarantined: 0,
            objects: ObjectCounts::default(),
            shared_imports: true,
            labels: BTreeMap::new(),
        }
    }
}

fn stream_options() -> StreamOptions {
    StreamOptions { log_bytes_max: LOG_BYTES_MAX, ..StreamOptions::default() }
}

async fn speak(client: Client, status: NodeStatus) {
    let Ok(body) = serde_json::to_vec(&status) else { return };
    while client.publish(subject::node_status(&node(0)), body.clone().into()).await.is_ok() {
        tokio::time::sleep(NODE_SPEAKS_EVERY).await;
    }
}

/// A gateway that answers.
pub(super) struct GatewayAtWork {
    pub replica: Replica,
    pub directory: Directory,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), String>>,
    speaking: Option<JoinHandle<()>>,
}

impl GatewayAtWork {
    pub async fn stop(self) -> Result<(), Error> {
        if let Some(speaking) = self.speaking {
            speaking.abort();
        }
        drop(self.stop);
        Ok(self.running.await??)
    }
}

/// Publishes `count` revisions on the first node and returns them.
pub(super) async fn publish(replica: &Replica, count: usize) -> Result<Vec<RevisionIdentity>, Error> {
    let identities: Vec<RevisionIdentity> = (0..count).map(identity).collect();
    for batch in identities.chunks(PUBLISH_AT_ONCE) {
        try_join_all(batch.iter().map(|identity| publish_one(replica, identity))).await?;
    }
    Ok(identities)
}

async fn publish_one(replica: &Replica, identity: &RevisionIdentity) -> Result<(), Error> {
    let Reply::Import(session) = submit(replica, begin(identity, &node(0), MigrationMode::Manual)).await? else {
        return Err("an import was not answered with its session".into());
    };
    let instance: &InstanceId = &session.instance;
    submit(replica, commit(identity, instance, &node(0))).await?;
    Ok(())
}

/// Appends a command that must be accepted.
pub(super) async fn submit(replica: &Replica, command: Command) -> Result<Reply, Error> {
    let (_, outcome) = replica.submit(command).await?;
    outcome.map_err(|rejection| {
        format!("a command of the benchmark was refused: {}: {}", rejection.code, rejection.message).into()
    })
}
