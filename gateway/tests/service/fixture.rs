//! A nats-server, a gateway, and nodes that say what a test wants them to say.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_gateway::{Gateway, GatewayHandle, GatewayOptions};
use ballast_journal::nodes::NodeListener;
use ballast_journal::{EmbeddedServer, ServerOptions};
use ballast_schemas::{
    BallastError, Bitmap, ClaimOperation, Command, DeletionFinished, Digest, ErrorCode, InstanceId, LogPosition,
    ManifestRef, NodeEndpoint, NodeId, NodeInventory, NodeReply, NodeRequest, NodeStatus, OperationId, Receipt,
    ReplicaId, Reply, RevisionIdentity, SessionId, WorkerId, subject,
};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Longer than anything a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const MIB: u64 = 1 << 20;

pub struct Fixture {
    pub client: async_nats::Client,
    gateways: Vec<Running>,
    pub server: EmbeddedServer,
    _folder: tempfile::TempDir,
}

struct Running {
    handle: GatewayHandle,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Fixture {
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = EmbeddedServer::start(ServerOptions::new(folder.path())).await.unwrap();
        let options = async_nats::ConnectOptions::new().request_timeout(Some(PATIENCE));
        let client = options.connect(server.url()).await.unwrap();
        let mut fixture = Self { client, gateways: Vec::new(), server, _folder: folder };
        fixture.add_gateway().await;
        fixture
    }

    pub fn options(&self, name: &str) -> GatewayOptions {
        GatewayOptions {
            http: Some("127.0.0.1:0".parse().unwrap()),
            ..GatewayOptions::new(self.server.url(), ReplicaId::new(name).unwrap())
        }
    }

    pub async fn add_gateway(&mut self) {
        let options = self.options(&format!("gateway-{}", self.gateways.len() + 1));
        self.add_gateway_with(options).await;
    }

    pub async fn add_gateway_with(&mut self, options: GatewayOptions) {
        let gateway = Gateway::open(options).await.unwrap();
        let handle = gateway.handle();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            gateway.run(async { stopped.await.unwrap_or_default() }).await.unwrap();
        });
        self.gateways.push(Running { handle, stop: Some(stop), task });
    }

    pub fn handle(&self) -> &GatewayHandle {
        &self.gateways[0].handle
    }

    /// Stops the gateway that was started first.
    pub async fn stop_gateway(&mut self) {
        let mut running = self.gateways.remove(0);
        running.stop.take().unwrap().send(()).unwrap();
        running.task.await.unwrap();
    }

    /// Calls a verb of tenant `default`.
    pub async fn call(&self, verb: &str, body: Value) -> Result<Value, BallastError> {
        self.call_raw(&format!("ballast.v1.default.{verb}"), body.to_string().into_bytes()).await
    }

    /// Calls anything with any bytes; the headers and the body of the answer must agree.
    pub async fn call_raw(&self, subject: &str, body: Vec<u8>) -> Result<Value, BallastError> {
        let message = self.client.request(subject.to_owned(), body.into()).await.unwrap();
        let code = message
            .headers
            .as_ref()
            .and_then(|headers| headers.get("Nats-Service-Error-Code"))
            .map(|code| code.as_str().to_owned());
        let body: Value = serde_json::from_slice(&message.payload).unwrap();
        assert!(body["log_seq"].is_u64(), "no log_seq in {body}");
        match BallastError::from_body(&body) {
            Some(error) => {
                assert_eq!(code, Some(error.code.number().to_string()), "{body}");
                let text = message.headers.unwrap().get("Nats-Service-Error").unwrap().as_str().to_owned();
                assert!(text.starts_with(error.code.name()), "{text}");
                Err(error)
            }
            None => {
                assert_eq!(code, None, "{body}");
                Ok(body)
            }
        }
    }

    /// Calls a verb that must be refused with `code`.
    pub async fn refuse(&self, verb: &str, body: Value, code: ErrorCode) -> BallastError {
        let shown = body.to_string();
        match self.call(verb, body).await {
            Err(error) if error.code == code => error,
            other => panic!("{verb} {shown}: expected {code}, found {other:?}"),
        }
    }

    /// Carries a deletion out, as a workflow worker would.
    pub async fn finish_deletion(&self, revision: &Value) {
        let operation_id: OperationId = serde_json::from_value(revision["operation_id"].clone()).unwrap();
        let worker = WorkerId::new("worker").unwrap();
        let claim = ClaimOperation { operation_id: operation_id.clone(), worker, ttl_ms: 6_000 };
        let replica = self.handle().replica();
        let (_, claimed) = replica.submit(Command::ClaimOperation(claim)).await.unwrap();
        let Ok(Reply::Operation(operation)) = claimed else { panic!("not claimed: {claimed:?}") };
        let finished = DeletionFinished { operation_id, epoch: operation.epoch, owed: vec![] };
        replica.submit(Command::DeletionFinished(finished)).await.unwrap().1.unwrap();
    }

    /// Imports a revision as far as READY + HOT on `node`, without a byte.
    pub async fn import(&self, node: &FakeNode, identity: &RevisionIdentity, policy: Value) -> Value {
        let session_id = format!("session-{}", identity.weight_generation);
        let begun = self.call("begin_import", begin(identity, &session_id, policy)).await.unwrap();
        let session = begun["session"].clone();
        let instance: InstanceId = serde_json::from_value(session["instance"].clone()).unwrap();
        let sha256 = node.seal(identity, &instance, &session_id);
        let body = json!({"identity": identity, "session_id": session_id, "manifest_sha256": sha256});
        self.call("commit_import", body).await.unwrap()["revision"].clone()
    }
}

/// A request for a small import: 2 units, 8 KiB reserved.
pub fn begin(identity: &RevisionIdentity, session_id: &str, policy: Value) -> Value {
    json!({"identity": identity, "session_id": session_id, "policy": policy, "placement_digest": Digest::of(b"geometry"),
        "logical_bytes": 8000, "reserved_bytes": 8192, "unit_count": 2})
}

pub fn minilm(generation: u64) -> RevisionIdentity {
    RevisionIdentity::new("default", "default", "minilm", "main", generation).unwrap()
}

/// A policy that starts nothing by itself.
pub fn hot() -> Value {
    json!({"preferred_residency": "HOT", "migration_mode": "MANUAL"})
}

/// Waits until `look` finds something.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A node that says it holds what the test told it.
pub struct FakeNode {
    pub node: NodeId,
    receipts: Arc<Mutex<HashMap<InstanceId, Receipt>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl FakeNode {
    /// Starts it and waits until the gateways have heard of it.
    pub async fn start(fixture: &Fixture, name: &str, memory_bytes: u64) -> Self {
        let node = NodeId::new(name).unwrap();
        let cluster_id = fixture.handle().streams().cluster_id().clone();
        let status = NodeStatus {
            endpoint: NodeEndpoint {
                node: node.clone(),
                host_id: "host".into(),
                unix_socket: None,
                tcp: Some("127.0.0.1:1".into()),
            },
            incarnation: "first".into(),
            cluster_id: Some(cluster_id),
            not_serving: None,
            memory_capacity_bytes: memory_bytes,
            memory_used_bytes: 0,
            memory_kind: "none".into(),
            cold_capacity_bytes: memory_bytes,
            cold_used_bytes: 0,
            cold_engine: "none".into(),
            instances: 0,
            quarantined: 0,
            objects: ballast_schemas::ObjectCounts::default(),
            shared_imports: true,
            labels: BTreeMap::new(),
        };
        let receipts: Arc<Mutex<HashMap<InstanceId, Receipt>>> = Arc::default();
        let mut listener = NodeListener::open(fixture.client.clone(), &node).await.unwrap();
        let answering = {
            let (node, receipts) = (node.clone(), Arc::clone(&receipts));
            tokio::spawn(async move {
                while let Some(call) = listener.next().await {
                    let reply = answer(&node, &receipts, &call.request);
                    call.finish(reply).await.unwrap();
                }
            })
        };
        let client = fixture.client.clone();
        let speaking = {
            let node = node.clone();
            tokio::spawn(async move {
                loop {
                    let body = serde_json::to_vec(&status).unwrap();
                    client.publish(subject::node_status(&node), body.into()).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            })
        };
        for gateway in &fixture.gateways {
            let heard = gateway.handle.directory().wait_for(PATIENCE, |directory| directory.node(&node)).await;
            assert!(heard.is_some());
        }
        Self { node, receipts, tasks: vec![answering, speaking] }
    }

    /// Claims to have sealed an import; the digest of the manifest it claims to hold.
    pub fn seal(&self, identity: &RevisionIdentity, instance: &InstanceId, session_id: &str) -> Digest {
        let sha256 = Digest::of(identity.to_string().as_bytes());
        let manifest = ManifestRef {
            key: identity.manifest_key(),
            sha256,
            group_id: identity.group_id(),
            payload_keys_sha256: Digest::of(b"keys"),
            payload_count: 2,
            logical_bytes: 8000,
            affinity_count: 2,
            affinity_digest: Digest::of(b"groups"),
        };
        let receipt = Receipt {
            node: self.node.clone(),
            incarnation: "first".into(),
            instance: instance.clone(),
            session_id: SessionId::new(session_id).unwrap(),
            layout_digest: Digest::of(b"layout"),
            checksums_digest: Digest::of(b"checksums"),
            manifest,
        };
        self.receipts.lock().unwrap().insert(instance.clone(), receipt);
        sha256
    }
}

fn answer(node: &NodeId, receipts: &Mutex<HashMap<InstanceId, Receipt>>, request: &NodeRequest) -> NodeReply {
    let receipts = receipts.lock().unwrap();
    match request {
        NodeRequest::Receipt { instance, .. } => match receipts.get(instance) {
            Some(receipt) => NodeReply::Receipt(Box::new(receipt.clone())),
            None => NodeReply::Failed(BallastError::new(ErrorCode::NotReady, "not sealed yet")),
        },
        NodeRequest::Inventory { instance } => match receipts.contains_key(instance) {
            true => NodeReply::Inventory(Box::new(NodeInventory {
                node: node.clone(),
                incarnation: "first".into(),
                instance: instance.clone(),
                fence: LogPosition::ZERO,
                sealed: true,
                manifest: true,
                hot: Bitmap::full(2),
                cold: Bitmap::empty(2),
                cold_lost: Bitmap::empty(2),
            })),
            false => NodeReply::Absent,
        },
        _ => NodeReply::Failed(BallastError::invalid("this node does nothing")),
    }
}
