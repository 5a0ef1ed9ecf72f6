//! A transfer worker on scratch folders, and what it does with what it finds in them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ballast_journal::nodes::NodeClient;
use ballast_schemas::frame::ReadRange;
use ballast_schemas::manifest::{Manifest, ManifestPlan, PlannedTensor, Tensor};
use ballast_schemas::*;
use ballast_transfer::{
    ColdOptions, ColdPlace, ConnectOptions, EngineChoice, GroupLayout, HugePages, MappedInstance, MemoryOptions,
    NodeConnection, NodeStore, NodeStoreOptions, Route, checksum,
};
use ballast_workers::{NodeCondition, TransferWorker, TransferWorkerOptions};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use super::site::*;

/// A node's folders, which outlive its process.
pub struct Folders {
    memory: tempfile::TempDir,
    cold: tempfile::TempDir,
}

impl Folders {
    pub fn new() -> Self {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Self { memory: tempfile::tempdir_in("/dev/shm").unwrap(), cold: tempfile::tempdir_in(target).unwrap() }
    }

    fn memory_options(&self) -> MemoryOptions {
        MemoryOptions { folder: self.memory.path().to_owned(), budget_bytes: 64 << 20, huge_pages: HugePages::Off }
    }

    fn cold_options(&self) -> ColdOptions {
        ColdOptions {
            place: ColdPlace::Disk { folder: self.cold.path().to_owned(), engine: EngineChoice::Auto },
            quota_bytes: Some(64 << 20),
        }
    }
}

/// A running transfer worker.
pub struct Node {
    pub node: NodeId,
    folders: Folders,
    condition: watch::Receiver<NodeCondition>,
    client: async_nats::Client,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
    endpoint: NodeEndpoint,
}

impl Node {
    /// Starts it and waits until it serves.
    pub async fn start(site: &Site, name: &str) -> Self {
        let mut node = Self::start_on(site.connect().await, name, Folders::new()).await;
        node.serves(site).await;
        node
    }

    /// Starts it and waits for nothing.
    pub async fn start_on(client: async_nats::Client, name: &str, folders: Folders) -> Self {
        let node = NodeId::new(name).unwrap();
        let worker = TransferWorker::open(TransferWorkerOptions {
            client: client.clone(),
            node: node.clone(),
            memory: folders.memory_options(),
            cold: Some(folders.cold_options()),
            unix_socket: Some(folders.cold.path().join("socket")),
            tcp_listen: Some("127.0.0.1:0".to_owned()),
            tcp_advertise: None,
            rdma: true,
            labels: [("rack".to_owned(), "7".to_owned())].into(),
        })
        .await
        .unwrap();
        let report = worker.report().clone();
        let endpoint = NodeEndpoint {
            node: node.clone(),
            host_id: ballast_transfer::host_id().unwrap(),
            unix_socket: report.unix_socket.map(|path| path.display().to_string()),
            tcp: report.tcp,
        };
        let condition = worker.condition();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move { worker.run(async { stopped.await.unwrap_or_default() }).await.unwrap() });
        Self { node, folders, condition, client, stop, task, endpoint }
    }

    /// Waits until it says that it serves, and the site has heard it.
    pub async fn serves(&mut self, site: &Site) -> NodeStatus {
        let served =
            tokio::time::timeout(PATIENCE, self.condition.wait_for(|condition| *condition == NodeCondition::Serving))
                .await;
        served.expect("the node serves in time").unwrap();
        let heard = site
            .directory
            .wait_for(PATIENCE, |directory| directory.node(&self.node).filter(|status| status.not_serving.is_none()));
        heard.await.expect("the node's status is heard")
    }

    /// Waits until it says why it does not serve.
    pub async fn does_not_serve(&mut self) -> String {
        let told = self.condition.wait_for(|condition| match condition {
            NodeCondition::Serving => false,
            NodeCondition::NotServing { reason } => reason != "not introduced to a gateway yet",
        });
        match &*tokio::time::timeout(PATIENCE, told).await.expect("the node says why in time").unwrap() {
            NodeCondition::NotServing { reason } => reason.clone(),
            NodeCondition::Serving => unreachable!("waited for another one"),
        }
    }

    /// Stops it; its folders stay.
    pub async fn stop(self) -> Folders {
        self.stop.send(()).unwrap();
        self.task.await.unwrap();
        self.folders
    }

    async fn connect(&self, instance: &InstanceId, right: TokenRight, subject: &str, route: Route) -> NodeConnection {
        let options = ConnectOptions { route, ..ConnectOptions::default() };
        NodeConnection::connect(&self.endpoint, &token(instance, right, subject), &options).await.unwrap()
    }

    /// Publishes a revision as a client and a gateway do together.
    pub async fn import(&self, site: &Site, identity: &RevisionIdentity, payload: &Payload) -> InstanceId {
        let manifest = payload.manifest(identity);
        let session = site.begin_import(identity, &self.node, payload.units(), manifest.logical_bytes()).await;
        let instance = session.instance.clone();
        let mut connection =
            self.connect(&instance, TokenRight::Import, session.session_id.as_str(), Route::Best).await;
        connection.allocate(&payload.sizes()).await.unwrap();
        for (unit, bytes) in (0..).zip(&payload.0) {
            connection.write(unit, 0, bytes).await.unwrap();
        }
        connection.seal(&manifest.to_canonical_bytes()).await.unwrap();
        // As a gateway does: the receipt comes from the node, not from the client.
        let nodes = NodeClient::new(site.client.clone());
        let receipt = nodes.receipt(&self.node, &instance, &session.session_id).await.unwrap();
        assert_eq!(receipt.manifest, manifest.manifest_ref(identity).unwrap());
        site.commit_import(&session, receipt).await;
        instance
    }

    /// Every byte, over both transports.
    pub async fn reads_back(&self, instance: &InstanceId, payload: &Payload) {
        for route in [Route::Unix, Route::Tcp] {
            let mut connection = self.connect(instance, TokenRight::Read, "lease", route).await;
            assert_eq!(read(&mut connection, payload).await, payload.0);
        }
    }

    pub async fn map(&self, instance: &InstanceId, payload: &Payload) -> MappedInstance {
        let mut connection = self.connect(instance, TokenRight::Read, "lease", Route::Unix).await;
        connection.map(Arc::new(GroupLayout::new(&payload.sizes()).unwrap())).await.unwrap()
    }

    /// Whether no folder of an instance is left on either tier.
    pub fn is_empty(&self) -> bool {
        let count = |folder: &Path| std::fs::read_dir(folder.join("instances")).unwrap().count();
        count(self.folders.memory.path()) + count(self.folders.cold.path()) == 0
    }
}

async fn read(connection: &mut NodeConnection, payload: &Payload) -> Vec<Vec<u8>> {
    let ranges: Vec<ReadRange> =
        (0..).zip(payload.sizes()).map(|(unit, bytes)| ReadRange { unit, offset: 0, bytes }).collect();
    let mut found: Vec<Vec<u8>> = payload.sizes().iter().map(|bytes| vec![0; *bytes as usize]).collect();
    let mut buffers: Vec<&mut [u8]> = found.iter_mut().map(Vec::as_mut_slice).collect();
    connection.read_ranges(&ranges, &mut buffers).await.unwrap();
    found
}

/// Units of given sizes with bytes of their own.
pub struct Payload(Vec<Vec<u8>>);

impl Payload {
    pub fn new(sizes: &[usize]) -> Self {
        let content =
            |unit: usize, bytes: usize| (0..bytes).map(|at| (at.wrapping_mul(31) >> 3) as u8 ^ unit as u8).collect();
        Self(sizes.iter().enumerate().map(|(unit, &bytes)| content(unit, bytes)).collect())
    }

    pub fn units(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap()
    }

    fn sizes(&self) -> Vec<u64> {
        self.0.iter().map(|bytes| bytes.len() as u64).collect()
    }

    fn manifest(&self, identity: &RevisionIdentity) -> Manifest {
        let tensor = |(unit, bytes): (usize, &Vec<u8>)| {
            PlannedTensor::from(Tensor::plain(format!("layer.{unit:03}"), "U8", 1, vec![bytes.len() as u64]))
        };
        let plan = ManifestPlan::new(identity, self.0.iter().enumerate().map(tensor).collect(), Vec::new()).unwrap();
        assert_eq!(plan.extents(), self.sizes());
        plan.seal(&self.0.iter().map(|bytes| checksum(bytes)).collect::<Vec<_>>()).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_comes_back_serves_what_it_held() {
    let site = Site::start(Clock::Real, ClusterConfig::default()).await;
    let node = Node::start(&site, "node-1").await;
    let payload = Payload::new(&[300_000, 70_000]);
    let instance = node.import(&site, &minilm(1), &payload).await;
    let folders = node.stop().await;

    let mut node = Node::start_on(site.connect().await, "node-1", folders).await;
    let status = node.serves(&site).await;
    assert_eq!((status.instances, status.quarantined, status.labels["rack"].as_str()), (1, 0, "7"));
    node.reads_back(&instance, &payload).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_deleted_while_a_node_was_away_goes_when_it_is_back() {
    let site = Site::start(Clock::Real, ClusterConfig::default()).await;
    let node = Node::start(&site, "node-1").await;
    let instance = node.import(&site, &minilm(1), &Payload::new(&[300_000])).await;
    eventually("the inventory is published", async || site.directory.group(&instance).nodes.get(&node.node).cloned())
        .await;
    let folders = node.stop().await;
    // Nobody waits for a lost node for ever: its copies are owed.
    let operation_id = site.remove(&minilm(1)).await;
    let claim = ClaimOperation {
        operation_id: operation_id.clone(),
        worker: WorkerId::new("a-person").unwrap(),
        ttl_ms: CLAIM_TTL_MS,
    };
    site.accept(Command::ClaimOperation(claim)).await;
    let owed = vec![NodeId::new("node-1").unwrap()];
    site.accept(Command::DeletionFinished(DeletionFinished { operation_id, epoch: 1, owed })).await;

    let mut node = Node::start_on(site.connect().await, "node-1", folders).await;
    let status = node.serves(&site).await;
    assert_eq!((status.instances, status.memory_used_bytes, status.cold_used_bytes), (0, 0, 0));
    assert!(node.is_empty());
    // What the earlier run published of it is withdrawn too.
    eventually("the old inventory is withdrawn", async || {
        site.directory.group(&instance).nodes.is_empty().then_some(())
    })
    .await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_log_does_not_know_is_kept_and_not_served() {
    let site = Site::start(Clock::Real, ClusterConfig::default()).await;
    let folders = Folders::new();
    let stranger = InstanceId { group_id: minilm(1).group_id(), position: LogPosition { seq: 1, index: 0 } };
    let payload = Payload::new(&[70_000]);
    seal_in(&folders, &stranger, &payload, &minilm(1));

    let mut node = Node::start_on(site.connect().await, "node-1", folders).await;
    let status = node.serves(&site).await;
    assert_eq!((status.instances, status.quarantined), (1, 1));
    assert!(!node.is_empty());
    let nodes = NodeClient::new(site.client.clone());
    let error = BallastError::from(nodes.inventory(&node.node, &stranger).await.unwrap_err());
    assert_eq!(error.code, ErrorCode::NotReady, "{error}");
    node.stop().await;
}

/// As an earlier run of the node, in another cluster's days, left it.
fn seal_in(folders: &Folders, instance: &InstanceId, payload: &Payload, identity: &RevisionIdentity) {
    let options = NodeStoreOptions {
        node: NodeId::new("node-1").unwrap(),
        memory: folders.memory_options(),
        cold: Some(folders.cold_options()),
    };
    let store = NodeStore::open(&options).unwrap();
    let session = SessionId::new("session").unwrap();
    store.allocate(instance, &session, &payload.sizes()).unwrap();
    for (unit, bytes) in (0..).zip(&payload.0) {
        store.write(instance, &session, unit, 0, bytes).unwrap();
    }
    store.seal(instance, &session, payload.manifest(identity).to_canonical_bytes().into()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_waits_for_a_gateway_and_says_so() {
    let mut site = Site::start(Clock::Real, ClusterConfig::default()).await;
    site.stop_gateway();
    let mut node = Node::start_on(site.connect().await, "node-1", Folders::new()).await;
    let reason = node.does_not_serve().await;
    assert!(reason.contains("ballast gateway"), "{reason}");
    let heard = site.directory.wait_for(PATIENCE, |directory| directory.node(&node.node)).await.unwrap();
    assert!(heard.not_serving.is_some());
    site.start_gateway().await;
    node.serves(&site).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_cluster_keeps_its_bytes_and_serves_nothing() {
    let site = Site::start(Clock::Real, ClusterConfig::default()).await;
    let node = Node::start(&site, "node-1").await;
    node.import(&site, &minilm(1), &Payload::new(&[70_000])).await;
    let folders = node.stop().await;
    let other = Site::start(Clock::Real, ClusterConfig::default()).await;
    let mut node = Node::start_on(other.connect().await, "node-1", folders).await;
    let reason = node.does_not_serve().await;
    assert!(reason.contains(site.streams.cluster_id().as_str()) && reason.contains("other folders"), "{reason}");
    assert!(!node.is_empty());
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_go_on_while_nats_is_away() {
    let mut site = Site::start(Clock::Real, ClusterConfig::default()).await;
    let mut node = Node::start(&site, "node-1").await;
    let payload = Payload::new(&[300_000, 70_000]);
    let instance = node.import(&site, &minilm(1), &payload).await;
    site.stop_nats().await;
    eventually("the node has noticed", async || {
        (node.client.connection_state() != async_nats::connection::State::Connected).then_some(())
    })
    .await;
    node.reads_back(&instance, &payload).await;
    site.start_nats().await;
    // Asked again after the pause: it is still a member, and still answers.
    let nodes = NodeClient::new(site.connect().await);
    eventually("the node answers again", async || nodes.inventory(&node.node, &instance).await.ok().flatten()).await;
    node.serves(&site).await;
    node.reads_back(&instance, &payload).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_in_use_is_refused_by_name() {
    let site = Site::start(Clock::Real, ClusterConfig::default()).await;
    let node = Node::start(&site, "node-1").await;
    let again = TransferWorker::open(TransferWorkerOptions {
        client: site.connect().await,
        node: node.node.clone(),
        memory: node.folders.memory_options(),
        cold: Some(node.folders.cold_options()),
        unix_socket: None,
        tcp_listen: None,
        tcp_advertise: None,
        rdma: true,
        labels: Default::default(),
    });
    let error = tokio::time::timeout(Duration::from_secs(10), again).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("in use by process"), "{error}");
    node.stop().await;
}
