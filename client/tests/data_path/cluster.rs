//! A NATS server, a node's real store and data plane, and a gateway that plays a part: it keeps one revision in a record
//! and answers as it was told, so that every answer a client may get can be had.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_client::{ConnectOptions, Gateway, Route, Transport, WeightStore};
use ballast_journal::{EmbeddedServer, ServerOptions};
use ballast_schemas::{
    AcquireLeaseReply, AcquireLeaseRequest, Availability, BallastError, BeginImportReply, BeginImportRequest,
    ClaimPhase, ClaimReply, ClockReply, CommitImportRequest, Coordinator, ErrorCode, IdentityRequest, ImportPart,
    ImportReply, ImportSession, InstanceId, JoinImportReply, JoinImportRequest, LeaseGrant, LogPosition, LogTime,
    NodeEndpoint, NodeId, OperationId, PartReply, PartRequest, ParticipantId, ReplacementClaim, Residency,
    RevisionIdentity, RevisionReply, RevisionView, SessionId, SessionReply, SessionRequest, TokenClaims, TokenPart,
    TokenRight, UnitEffect, UnitRange, UpsertRequest, WeightRevisionMetadata, WeightStoragePolicy, holders_digest,
};
use ballast_transfer::{
    ColdOptions, ColdPlace, DataPlane, DataPlaneOptions, EngineChoice, HugePages, MemoryOptions, NodeStore,
    NodeStoreOptions, Progress, TOKEN_LEEWAY_MS, TokenGate, TokenKey, host_id,
};
use futures::StreamExt;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Far beyond what anything here takes; a test that reaches it has failed.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Where the log clock stands.
pub const LOG_CLOCK: LogTime = LogTime(1_000_000);

/// What the gateway has heard and knows.
#[derive(Default)]
pub struct Desk {
    /// Calls of each verb.
    pub calls: BTreeMap<String, u32>,
    /// Request ids, in the order of the calls.
    pub request_ids: Vec<String>,
    /// Until when each of them was good.
    pub not_after: Vec<u64>,
    /// What the next calls of a verb are answered with, first come first served, instead of what is right.
    pub refusals: BTreeMap<String, Vec<BallastError>>,
    /// Whether leases turn out to have lapsed.
    pub lapsed: bool,
    pub record: Option<WeightRevisionMetadata>,
    pub session: Option<SessionId>,
    pub published_by: Option<SessionId>,
    /// Of the run that coordinates the session, where it has several writers.
    pub epoch: u64,
    /// Whether begins are answered without a node to go to.
    pub without_nodes: bool,
    /// The phases of a replacement, as they are shown call after call; the last one stays.
    pub phases: Vec<ClaimPhase>,
    pub leases: Vec<String>,
    /// The policy that the last import named.
    pub begun_with: Option<WeightStoragePolicy>,
    pub positions: u64,
    /// Of an import of several participants.
    pub parts: BTreeMap<ParticipantId, ImportPart>,
    /// Where a participant that joins is sent instead of the node.
    pub part_endpoint: Option<NodeEndpoint>,
    /// Of sessions.
    pub ttl_ms: Option<u64>,
    /// How long tokens for imports are good; without it, for ever.
    pub tokens_ms: Option<u64>,
    pub claim: Option<ReplacementClaim>,
    /// The base of a replacement, beside the record.
    pub base: Option<WeightRevisionMetadata>,
    /// What it becomes once a lease on it has been released.
    pub base_later: Option<WeightRevisionMetadata>,
    /// Where imports go and what leases name; none: the cluster's first node.
    pub placement: Vec<NodeEndpoint>,
    pub holders: Vec<NodeEndpoint>,
    /// Tokens vouch for nobody.
    pub vouches_not: bool,
    /// All nodes but the first one.
    pub others: Vec<Arc<NodeStore>>,
}

impl Desk {
    /// As the fold: none where there is one writer, and only the latest run where there are several.
    fn expect_coordinator(&self, coordinator: Option<&Coordinator>) -> Result<(), BallastError> {
        match coordinator.map_or(0, |own| own.epoch) == self.epoch {
            true => Ok(()),
            false => Err(BallastError::new(ErrorCode::Conflict, "another run has taken the session over")),
        }
    }

    /// As the gateway: with the session whose several writers have published it.
    fn refused_as_it_is_there(&self, record: &WeightRevisionMetadata) -> BallastError {
        let error = BallastError::new(ErrorCode::Conflict, format!("revision exists ({})", record.availability));
        match &self.published_by {
            None => error,
            Some(session) => error.with_details(json!({ "published_by": session })),
        }
    }

    fn next_claim(&mut self) -> ReplacementClaim {
        let claim = self.claim.as_mut().unwrap();
        claim.phase = if self.phases.len() > 1 { self.phases.remove(0) } else { self.phases[0] };
        claim.clone()
    }
}

pub struct Cluster {
    pub desk: Arc<Mutex<Desk>>,
    pub node: Arc<NodeStore>,
    pub server: EmbeddedServer,
    pub scratch: TempDir,
    memory: TempDir,
}

/// The address on which a node of the tests listens. In the RDMA lab it is one that RDMA has too, and what is for TCP is then asked of
/// RDMA beside TCP.
fn tcp_address() -> std::net::SocketAddr {
    let address = std::env::var("BALLAST_RDMA_LAB").unwrap_or_else(|_| "127.0.0.1".to_owned());
    format!("{address}:0").parse().unwrap()
}

/// What a test asks for when it does not want shared memory, and how bytes from memory then come.
pub fn over_tcp() -> (Route, Transport) {
    match std::env::var_os("BALLAST_RDMA_LAB") {
        Some(_) => (Route::Rdma, Transport::Rdma),
        None => (Route::Tcp, Transport::Tcp),
    }
}

pub fn identity(generation: u64) -> RevisionIdentity {
    RevisionIdentity::new("default", "default", "m", "main", generation).unwrap()
}

impl Cluster {
    pub async fn start() -> Self {
        Self::start_with(DataPlaneOptions::default()).await
    }

    pub async fn start_with(options: DataPlaneOptions) -> Self {
        let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        // The error says what to run when there is no nats-server.
        let server = EmbeddedServer::start(ServerOptions::new(scratch.path().join("nats"))).await;
        let server = server.unwrap_or_else(|error| panic!("{error}"));
        let node = open_node("node-1", memory.path(), &scratch.path().join("cold"));
        let (endpoint, _) = serve(&node, &memory.path().join("node.sock"), options).await;
        let key = key();
        let desk = Arc::new(Mutex::new(Desk::default()));
        let answering = Answering { desk: desk.clone(), node: node.clone(), endpoint, key };
        let nats = async_nats::connect(server.url()).await.unwrap();
        let mut calls = nats.subscribe("ballast.v1.>").await.unwrap();
        nats.flush().await.unwrap();
        tokio::spawn(async move {
            while let Some(call) = calls.next().await {
                let verb = call.subject.rsplit('.').next().unwrap().to_owned();
                let body = match answering.answer(&verb, &call.payload) {
                    Ok(mut body) => {
                        body["log_seq"] = 5.into();
                        body
                    }
                    Err(error) => error.to_body(),
                };
                if let Some(reply) = call.reply {
                    nats.publish(reply, body.to_string().into()).await.unwrap();
                }
            }
        });
        Self { desk, node, server, scratch, memory }
    }

    /// Another node. The handle stops it.
    pub async fn another_node(&self, name: &str) -> (Arc<NodeStore>, NodeEndpoint, tokio::task::JoinHandle<()>) {
        let node = open_node(name, &self.memory_of(name), &self.scratch.path().join(name));
        let (endpoint, running) =
            serve(&node, &self.memory.path().join(format!("{name}.sock")), DataPlaneOptions::default()).await;
        self.desk.lock().unwrap().others.push(node.clone());
        (node, endpoint, running)
    }

    /// Ends another node's process, and starts it again.
    pub async fn restart(
        &self,
        name: &str,
        (node, running): (Arc<NodeStore>, tokio::task::JoinHandle<()>),
    ) -> (Arc<NodeStore>, tokio::task::JoinHandle<()>) {
        self.desk.lock().unwrap().others.retain(|other| other.node() != node.node());
        drop(node);
        running.abort();
        running.await.unwrap_err();
        let (memory, cold) = (self.memory_of(name), self.scratch.path().join(name));
        let deadline = std::time::Instant::now() + PATIENCE;
        let node = loop {
            // What its connections were at holds the folders a moment longer.
            match NodeStore::open(&node_options(name, &memory, &cold)) {
                Ok(node) => break node,
                Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let socket = self.memory.path().join(format!("{name}.sock"));
        let (_, running) = serve(&node, &socket, DataPlaneOptions::default()).await;
        self.desk.lock().unwrap().others.push(node.clone());
        (node, running)
    }

    /// The folder of another node's memory tier.
    pub fn memory_of(&self, name: &str) -> std::path::PathBuf {
        let folder = self.memory.path().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    pub async fn gateway(&self, route: Route) -> Gateway {
        let route = if route == Route::Tcp { over_tcp().0 } else { route };
        let options = ConnectOptions { route, ..ConnectOptions::new(self.server.url()) };
        Gateway::connect(&options).await.unwrap()
    }

    pub async fn store(&self, route: Route) -> WeightStore {
        WeightStore::new(self.gateway(route).await)
    }

    pub fn calls(&self, verb: &str) -> u32 {
        self.desk.lock().unwrap().calls.get(verb).copied().unwrap_or(0)
    }

    /// The next calls of `verb` are refused.
    pub fn refuse(&self, verb: &str, code: ErrorCode, details: Value, times: usize) {
        let error = BallastError::new(code, "told to refuse").with_details(details);
        self.desk.lock().unwrap().refusals.entry(verb.to_owned()).or_default().extend(vec![error; times]);
    }

    pub fn instance(&self) -> InstanceId {
        self.desk.lock().unwrap().record.as_ref().unwrap().instance.clone()
    }

    /// Moves units of the revision to disk, out of memory.
    pub fn make_cold(&self, units: std::ops::Range<u32>) {
        let mut desk = self.desk.lock().unwrap();
        desk.positions += 1;
        let fence = LogPosition { seq: desk.positions, index: 0 };
        drop(desk);
        let effect = || UnitEffect {
            instance: self.instance(),
            fence,
            units: vec![UnitRange { start: units.start, end: units.end }],
        };
        self.node.copy_to_cold(&effect(), &Progress::default()).unwrap();
        self.node.release_memory(&effect(), PATIENCE, &Progress::default()).unwrap();
    }

    /// Files of the cold tier that are not empty.
    pub fn cold_files(&self) -> Vec<std::path::PathBuf> {
        files_in(&self.scratch.path().join("cold"))
    }

    /// Files of the first node's memory tier that are not empty.
    pub fn memory_files(&self) -> Vec<std::path::PathBuf> {
        files_in(&self.memory.path().join("instances"))
    }
}

fn files_in(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_in(&path));
        } else if std::fs::metadata(&path).unwrap().len() > 0 {
            found.push(path);
        }
    }
    found
}

pub fn now_unix_ms() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64
}

fn key() -> TokenKey {
    TokenKey::new(&[7; 32]).unwrap()
}

async fn serve(
    node: &Arc<NodeStore>,
    socket: &Path,
    options: DataPlaneOptions,
) -> (NodeEndpoint, tokio::task::JoinHandle<()>) {
    let gate = TokenGate::closed();
    gate.set(key());
    let options = DataPlaneOptions { unix_socket: Some(socket.to_owned()), tcp: Some(tcp_address()), ..options };
    let plane = DataPlane::bind(options, node.clone(), gate).await.unwrap();
    let endpoint = NodeEndpoint {
        node: node.node().clone(),
        host_id: host_id().unwrap(),
        unix_socket: plane.unix_socket().map(|path| path.display().to_string()),
        tcp: plane.tcp_address().map(|address| address.to_string()),
    };
    (endpoint, tokio::spawn(plane.run(std::future::pending())))
}

fn open_node(name: &str, memory: &Path, cold: &Path) -> Arc<NodeStore> {
    std::fs::create_dir_all(cold).unwrap();
    NodeStore::open(&node_options(name, memory, cold)).unwrap()
}

fn node_options(name: &str, memory: &Path, cold: &Path) -> NodeStoreOptions {
    NodeStoreOptions {
        node: NodeId::new(name).unwrap(),
        memory: MemoryOptions { folder: memory.to_owned(), budget_bytes: 64 << 20, huge_pages: HugePages::Off },
        cold: Some(ColdOptions {
            place: ColdPlace::Disk { folder: cold.to_owned(), engine: EngineChoice::Auto },
            quota_bytes: None,
        }),
    }
}

struct Answering {
    desk: Arc<Mutex<Desk>>,
    node: Arc<NodeStore>,
    endpoint: NodeEndpoint,
    key: TokenKey,
}

fn read<T: serde::de::DeserializeOwned>(body: &Value) -> T {
    serde_json::from_value(body.clone()).unwrap()
}

fn written(reply: &impl serde::Serialize) -> Result<Value, BallastError> {
    Ok(serde_json::to_value(reply).unwrap())
}

impl Answering {
    fn answer(&self, verb: &str, payload: &[u8]) -> Result<Value, BallastError> {
        if verb == "clock" {
            return written(&ClockReply { log_clock: LOG_CLOCK });
        }
        let mut body: Value = serde_json::from_slice(payload).unwrap();
        let options = body.as_object_mut().unwrap().remove("options").unwrap();
        let mut desk = self.desk.lock().unwrap();
        *desk.calls.entry(verb.to_owned()).or_default() += 1;
        if let Some(id) = options["request_id"].as_str() {
            desk.request_ids.push(id.to_owned());
            desk.not_after.push(options["not_after"].as_u64().unwrap());
        }
        if let Some(refusals) = desk.refusals.get_mut(verb).filter(|refusals| !refusals.is_empty()) {
            return Err(refusals.remove(0));
        }
        match verb {
            "begin_import" => self.begin(&mut desk, read(&body)),
            "renew_import" => {
                let request: SessionRequest = read(&body);
                desk.expect_coordinator(request.coordinator.as_ref())?;
                let session = session(&desk, &request.identity, &request.session_id)?;
                let token = self.import_token(&desk, &session.instance, &request.session_id, None);
                written(&SessionReply { session, token: Some(token) })
            }
            "join_import" => self.join(&mut desk, read(&body)),
            "renew_part" | "finish_part" => {
                let request: PartRequest = read(&body);
                let part = desk.parts.get_mut(&request.participant).unwrap();
                assert_eq!(part.epoch, request.epoch);
                if verb == "finish_part" {
                    (part.done, part.incarnations) = (true, request.incarnations);
                    return written(&PartReply { part: part.clone(), token: None });
                }
                let part = part.clone();
                let own = TokenPart { participant: request.participant, epoch: part.epoch };
                let token = self.import_token(&desk, &part.instance, &request.session_id, Some(own));
                written(&PartReply { part, token: Some(token) })
            }
            "get_import" => {
                let request: SessionRequest = read(&body);
                desk.expect_coordinator(request.coordinator.as_ref())?;
                let session = session(&desk, &request.identity, &request.session_id)?;
                let participants = desk.parts.values().cloned().collect();
                written(&ImportReply { session, participants, log_clock: LOG_CLOCK })
            }
            "abort_import" => {
                let request: SessionRequest = read(&body);
                desk.expect_coordinator(request.coordinator.as_ref())?;
                desk.session = None;
                let mut record = record(&desk)?;
                record.availability = Availability::Deleted;
                desk.record = Some(record.clone());
                written(&RevisionReply { revision: record })
            }
            "commit_import" => self.commit(&mut desk, read(&body)),
            "get_metadata" => {
                let metadata = record_of(&desk, &read::<IdentityRequest>(&body).identity)?;
                written(&RevisionView {
                    metadata,
                    active_lease_count: 0,
                    nearest_lease_expiry_ms: None,
                    watermark: 0,
                    import: None,
                })
            }
            "upsert" => {
                let request: UpsertRequest = read(&body);
                let same = desk
                    .claim
                    .as_ref()
                    .is_some_and(|claim| Some(&claim.request_id) == request.replacement_request_id.as_ref());
                if same && desk.base.is_some() {
                    assert_eq!(
                        desk.claim.as_ref().unwrap().expected_base_generation,
                        request.expected_metadata_generation
                    );
                    return written(&ClaimReply { claim: desk.next_claim() });
                }
                if desk
                    .base
                    .as_ref()
                    .is_some_and(|base| base.metadata_generation != request.expected_metadata_generation)
                {
                    return Err(BallastError::new(ErrorCode::StaleGeneration, "read it again and decide anew"));
                }
                desk.claim = Some(ReplacementClaim {
                    lineage: request.base.lineage(),
                    request_id: request.replacement_request_id.unwrap(),
                    base: request.base,
                    target: request.target,
                    mode: request.mode,
                    phase: ClaimPhase::PreparingTarget,
                    expected_base_generation: request.expected_metadata_generation,
                    policy: request.policy,
                    operation_id: OperationId::at(LogPosition { seq: 3, index: 0 }, 0),
                    attempt: 1,
                    started_unix_ms: 0,
                    updated_unix_ms: 0,
                });
                written(&ClaimReply { claim: desk.next_claim() })
            }
            "get_upsert" if desk.claim.is_none() => Err(BallastError::new(ErrorCode::NotFound, "no such replacement")),
            "get_upsert" => written(&ClaimReply { claim: desk.next_claim() }),
            "acquire_lease" => self.lease(&mut desk, read(&body)),
            "renew_lease" => Err(BallastError::new(ErrorCode::NotReady, "the revision is retired")),
            "release_lease" => {
                desk.leases.retain(|lease| *lease != body["lease_id"]);
                if let Some(later) = desk.base_later.take() {
                    desk.base = Some(later);
                }
                Ok(json!({"lapsed": desk.lapsed}))
            }
            other => panic!("nobody should call {other}"),
        }
    }

    fn token(
        &self,
        instance: &InstanceId,
        right: TokenRight,
        subject: &str,
        part: Option<TokenPart>,
        holders: Option<&[NodeEndpoint]>,
    ) -> String {
        let claims = TokenClaims {
            instance: instance.clone(),
            right,
            subject: subject.to_owned(),
            part,
            holders: holders.map(holders_digest),
            expires_unix_ms: u64::MAX,
        };
        self.key.sign(&claims)
    }

    /// For as long as imports' tokens are good.
    fn import_token(
        &self,
        desk: &Desk,
        instance: &InstanceId,
        session_id: &SessionId,
        part: Option<TokenPart>,
    ) -> String {
        let claims = TokenClaims {
            instance: instance.clone(),
            right: TokenRight::Import,
            subject: session_id.to_string(),
            part,
            holders: None,
            // Nodes forgive a minute.
            expires_unix_ms: desk.tokens_ms.map_or(u64::MAX, |ms| now_unix_ms() + ms - TOKEN_LEEWAY_MS),
        };
        self.key.sign(&claims)
    }

    fn join(&self, desk: &mut Desk, request: JoinImportRequest) -> Result<Value, BallastError> {
        if desk.session.is_none() {
            return Err(desk.refused_as_it_is_there(&record(desk)?));
        }
        let session = session(desk, &request.identity, &request.session_id)?;
        let part = desk.parts.get_mut(&request.participant).unwrap();
        let (epoch, incarnations) = (part.epoch + 1, BTreeMap::new());
        *part = ImportPart { epoch, heard_at: LOG_CLOCK, done: false, incarnations, ..part.clone() };
        let part = part.clone();
        let own = TokenPart { participant: request.participant, epoch: part.epoch };
        let token = self.import_token(desk, &part.instance, &request.session_id, Some(own));
        let endpoint = desk.part_endpoint.clone().unwrap_or_else(|| self.endpoint.clone());
        written(&JoinImportReply { session, part, endpoints: vec![endpoint], token })
    }

    fn begin(&self, desk: &mut Desk, request: BeginImportRequest) -> Result<Value, BallastError> {
        if desk.session.as_ref() == Some(&request.session_id) {
            desk.epoch += 1;
            return self.begun(desk, &request);
        }
        if let Some(record) = desk.record.as_ref().filter(|record| record.availability != Availability::Deleted) {
            return Err(desk.refused_as_it_is_there(record));
        }
        desk.positions += 1;
        let group_id = request.identity.group_id();
        let instance = InstanceId { group_id, position: LogPosition { seq: desk.positions, index: 0 } };
        desk.session = Some(request.session_id.clone());
        desk.epoch = u64::from(request.writer_id.is_some());
        desk.begun_with = request.policy;
        desk.record = Some(WeightRevisionMetadata {
            identity: request.identity.clone(),
            instance: instance.clone(),
            manifest: None,
            availability: Availability::Importing,
            residency: Residency::Unknown,
            observed_hot_ppm: 0,
            policy: request.policy.unwrap_or_default(),
            operation_id: None,
            retired: false,
            metadata_generation: 1,
            placement: vec![self.endpoint.node.clone()],
            created_unix_ms: 0,
            updated_unix_ms: 0,
            last_accessed_unix_ms: 0,
        });
        let declared = |participant: &ParticipantId| ImportPart {
            participant: participant.clone(),
            instance: instance.clone(),
            epoch: 0,
            heard_at: LOG_CLOCK,
            done: false,
            incarnations: BTreeMap::new(),
        };
        desk.parts = request.participants.iter().map(|name| (name.clone(), declared(name))).collect();
        self.begun(desk, &request)
    }

    fn begun(&self, desk: &Desk, request: &BeginImportRequest) -> Result<Value, BallastError> {
        let session = session(desk, &request.identity, &request.session_id)?;
        let token = self.import_token(desk, &session.instance, &request.session_id, None);
        let endpoints = if desk.without_nodes { vec![] } else { or_else(&desk.placement, &self.endpoint) };
        written(&BeginImportReply { session, endpoints, token })
    }

    fn commit(&self, desk: &mut Desk, request: CommitImportRequest) -> Result<Value, BallastError> {
        desk.expect_coordinator(request.coordinator.as_ref())?;
        let mut record = record(desk)?;
        let placed = or_else(&desk.placement, &self.endpoint);
        let nodes = desk.others.iter().chain([&self.node]);
        let on = nodes.filter(|node| placed.iter().any(|endpoint| endpoint.node == *node.node()));
        let receipts = on.map(|node| node.receipt(&record.instance, &request.session_id));
        let receipts: Result<Vec<_>, _> = receipts.collect();
        let receipt = receipts.map_err(|error| error.to_error())?.remove(0);
        assert_eq!(receipt.manifest.sha256, request.manifest_sha256);
        record.manifest = Some(receipt.manifest);
        record.availability = Availability::Ready;
        desk.published_by = desk.session.take().filter(|_| desk.epoch > 0);
        desk.record = Some(record.clone());
        written(&RevisionReply { revision: record })
    }

    fn lease(&self, desk: &mut Desk, request: AcquireLeaseRequest) -> Result<Value, BallastError> {
        let revision = record_of(desk, &request.identity)?;
        let lease_id = request.lease_id.as_str().to_owned();
        if !desk.leases.contains(&lease_id) {
            desk.leases.push(lease_id.clone());
        }
        let instance = revision.instance.clone();
        let lease = LeaseGrant {
            lease_id: request.lease_id,
            holder: request.holder,
            identity: request.identity,
            instance: instance.clone(),
            ttl_ms: request.ttl_ms,
            expires_at: LogTime(request.ttl_ms),
        };
        let endpoints = or_else(&desk.holders, &self.endpoint);
        let vouched = (!desk.vouches_not).then_some(endpoints.as_slice());
        let token = self.token(&instance, TokenRight::Read, &lease_id, None, vouched);
        written(&AcquireLeaseReply { lease, revision, endpoints, token })
    }
}

fn or_else(endpoints: &[NodeEndpoint], first: &NodeEndpoint) -> Vec<NodeEndpoint> {
    if endpoints.is_empty() { vec![first.clone()] } else { endpoints.to_vec() }
}

fn record_of(desk: &Desk, identity: &RevisionIdentity) -> Result<WeightRevisionMetadata, BallastError> {
    match &desk.base {
        Some(base) if base.identity == *identity => Ok(base.clone()),
        Some(_) => record(desk).and_then(|record| {
            let other = || BallastError::new(ErrorCode::NotFound, "no such revision");
            (record.identity == *identity).then_some(record).ok_or_else(other)
        }),
        None => record(desk),
    }
}

fn record(desk: &Desk) -> Result<WeightRevisionMetadata, BallastError> {
    desk.record.clone().ok_or_else(|| BallastError::new(ErrorCode::NotFound, "no such revision"))
}

fn session(desk: &Desk, identity: &RevisionIdentity, session_id: &SessionId) -> Result<ImportSession, BallastError> {
    Ok(ImportSession {
        session_id: session_id.clone(),
        identity: identity.clone(),
        instance: record(desk)?.instance,
        placement: vec![],
        placement_digest: ballast_schemas::Digest::of(b""),
        ttl_ms: desk.ttl_ms.unwrap_or(15_000),
        expires_at: LogTime(15_000),
        epoch: desk.epoch,
    })
}

/// Asks until the answer is yes.
pub async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
