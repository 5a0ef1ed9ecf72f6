//! A cluster without a gateway: a nats-server, a log, its replica, and the few chores of a gateway that workers need.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_journal::nodes::Directory;
use ballast_journal::{
    EmbeddedServer, HintPublisher, JetStreamLog, Log, MemoryLog, Replica, ReplicaOptions, ServerOptions, StreamOptions,
    Streams, UpkeepOptions, connect, open_streams,
};
use ballast_schemas::subject::HELLO_SUBJECT;
use ballast_schemas::*;
use ballast_transfer::TokenKey;
use ballast_workers::{WorkflowWorker, WorkflowWorkerOptions};
use futures::StreamExt;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Longer than anything a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const KEY: [u8; 32] = [7; 32];

/// Whose clock the log runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// The server's.
    Real,
    /// The test's: it stands still until [`Site::pass`].
    Test,
}

pub struct Site {
    pub streams: Streams,
    pub client: async_nats::Client,
    pub replica: Replica,
    pub directory: Directory,
    memory_log: Option<MemoryLog>,
    now: std::sync::atomic::AtomicU64,
    hello: Option<JoinHandle<()>>,
    _hints: HintPublisher,
    server: Option<EmbeddedServer>,
    folder: tempfile::TempDir,
}

impl Drop for Site {
    fn drop(&mut self) {
        self.stop_gateway();
    }
}

const START_NS: u64 = 1_800_000_000_000_000_000;

impl Site {
    pub async fn start(clock: Clock, config: ClusterConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = EmbeddedServer::start(ServerOptions::new(folder.path())).await.unwrap();
        let client = connect(&server.url(), "site", PATIENCE).await.unwrap();
        let streams = open_streams(client.clone(), &StreamOptions::default()).await.unwrap();
        let memory_log = (clock == Clock::Test).then(MemoryLog::new);
        if let Some(log) = &memory_log {
            log.set_time_ns(START_NS);
        }
        let log: Arc<dyn Log> = match &memory_log {
            Some(log) => Arc::new(log.clone()),
            None => Arc::new(JetStreamLog::new(&streams)),
        };
        let create = CreateCluster {
            cluster_id: streams.cluster_id().clone(),
            incarnation: 1,
            config,
            capabilities: Capability::ALL.to_vec(),
        };
        let upkeep = UpkeepOptions { announce: false, ticks: clock == Clock::Real, snapshots: None };
        let options =
            ReplicaOptions { create: Some(create), upkeep, ..ReplicaOptions::new(ReplicaId::new("site").unwrap()) };
        let replica = Replica::start(log, None, options).await.unwrap();
        let hints = HintPublisher::start(&streams, replica.clone());
        let directory = Directory::start(&streams);
        let hello = Some(tokio::spawn(answer_hellos(client.clone(), replica.clone()).await));
        let now = std::sync::atomic::AtomicU64::new(START_NS);
        Self {
            streams,
            client,
            replica,
            directory,
            memory_log,
            now,
            hello,
            _hints: hints,
            server: Some(server),
            folder,
        }
    }

    /// Lets time go by on the log's clock.
    pub async fn pass(&self, time: Duration) {
        let log = self.memory_log.as_ref().expect("a site on the test's clock");
        let mut left = time;
        while !left.is_zero() {
            // No entry advances the clock by more than this.
            let step = left.min(Duration::from_millis(CLOCK_STEP_MS_MAX));
            left -= step;
            let step = u64::try_from(step.as_nanos()).unwrap();
            log.set_time_ns(self.now.fetch_add(step, std::sync::atomic::Ordering::SeqCst) + step);
            self.accept(Command::Tick).await;
        }
    }

    /// Nobody answers introductions any more.
    pub fn stop_gateway(&mut self) {
        if let Some(task) = self.hello.take() {
            task.abort();
        }
    }

    pub async fn start_gateway(&mut self) {
        self.hello = Some(tokio::spawn(answer_hellos(self.client.clone(), self.replica.clone()).await));
    }

    pub async fn stop_nats(&mut self) {
        self.server.take().unwrap().stop().await;
    }

    /// On the same folder and port.
    pub async fn start_nats(&mut self) {
        self.server = Some(EmbeddedServer::start(ServerOptions::new(self.folder.path())).await.unwrap());
    }

    pub async fn connect(&self) -> async_nats::Client {
        connect(&self.server.as_ref().unwrap().url(), "test", PATIENCE).await.unwrap()
    }

    /// Appends a command that must be accepted.
    pub async fn accept(&self, command: Command) -> Reply {
        let (_, outcome) = self.replica.submit(command.clone()).await.unwrap();
        outcome.unwrap_or_else(|rejection| panic!("{command:?}: {}", rejection.message))
    }

    pub async fn begin_import(
        &self,
        identity: &RevisionIdentity,
        node: &NodeId,
        units: u32,
        logical_bytes: u64,
    ) -> ImportSession {
        let begin = BeginImport {
            identity: identity.clone(),
            session_id: SessionId::new(format!("session-{}", identity.weight_generation)).unwrap(),
            ttl_ms: 60_000,
            policy: Some(hot()),
            placement_digest: Digest::of(b"geometry"),
            placement: vec![node.clone()],
            logical_bytes,
            unit_count: units,
        };
        match self.accept(Command::BeginImport(begin)).await {
            Reply::Import(session) => *session,
            other => panic!("{other:?}"),
        }
    }

    pub async fn commit_import(&self, session: &ImportSession, receipt: Receipt) -> WeightRevisionMetadata {
        let commit = CommitImport {
            identity: session.identity.clone(),
            session_id: session.session_id.clone(),
            manifest: receipt.manifest.clone(),
            receipts: vec![receipt],
            coordinator: None,
        };
        match self.accept(Command::CommitImport(commit)).await {
            Reply::Revision(revision) => *revision,
            other => panic!("{other:?}"),
        }
    }

    pub fn revision(&self, identity: &RevisionIdentity) -> WeightRevisionMetadata {
        self.replica.read(|state| state.revision(identity).cloned()).unwrap()
    }

    pub async fn migrate(
        &self,
        identity: &RevisionIdentity,
        target: Residency,
        hot_ratio: Option<HotRatio>,
    ) -> OperationId {
        let start = StartMigration {
            identity: identity.clone(),
            target,
            target_hot_ratio: hot_ratio,
            expected_metadata_generation: self.revision(identity).metadata_generation,
            trigger: MigrationTrigger::Explicit,
        };
        operation_id(self.accept(Command::StartMigration(start)).await)
    }

    pub async fn remove(&self, identity: &RevisionIdentity) -> OperationId {
        let expected_metadata_generation = self.revision(identity).metadata_generation;
        self.accept(Command::Remove(Remove { identity: identity.clone(), expected_metadata_generation })).await;
        self.revision(identity).operation_id.unwrap()
    }

    pub fn operation(&self, id: &OperationId) -> WeightOperation {
        self.replica.read(|state| state.operation(id).cloned()).unwrap()
    }

    /// Waits until the operation is as `accept` wants it.
    pub async fn operation_is(
        &self,
        id: &OperationId,
        what: &str,
        accept: impl Fn(&WeightOperation) -> bool,
    ) -> WeightOperation {
        eventually(&format!("operation {id} {what}"), async || {
            Some(self.operation(id)).filter(|operation| accept(operation))
        })
        .await
    }

    pub async fn succeeded(&self, id: &OperationId) -> WeightOperation {
        let ended = self.operation_is(id, "has ended", |operation| operation.status.is_terminal()).await;
        assert_eq!(ended.status, OperationStatus::Succeeded, "{ended:?}");
        ended
    }

    /// Starts a workflow worker of its own.
    pub fn worker(&self, name: &str) -> Worker {
        let worker = WorkflowWorker::new(WorkflowWorkerOptions {
            streams: self.streams.clone(),
            replica: self.replica.clone(),
            directory: self.directory.clone(),
            worker: WorkerId::new(name).unwrap(),
            concurrency: 1,
        });
        let (stop, stopped) = oneshot::channel();
        let worker = worker.unwrap();
        let task = tokio::spawn(worker.run(async { stopped.await.unwrap_or_default() }));
        Worker { stop: Some(stop), task }
    }
}

/// A running workflow worker.
pub struct Worker {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Worker {
    /// It is gone in the middle of whatever it does, as after a crash.
    pub async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    pub async fn stop(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        self.task.await.unwrap();
    }
}

/// What a gateway answers to nodes.
async fn answer_hellos(client: async_nats::Client, replica: Replica) -> impl Future<Output = ()> {
    let mut hellos = client.subscribe(HELLO_SUBJECT).await.unwrap();
    client.flush().await.unwrap();
    async move {
        while let Some(message) = hellos.next().await {
            let hello: NodeHello = rmp_serde::from_slice(&message.payload).unwrap();
            let reply = replica.read(|state| HelloReply::Welcome {
                cluster_id: state.cluster_id().unwrap().clone(),
                incarnation: 1,
                log_seq: state.log_seq(),
                token_key: KEY.to_vec(),
                standings: hello.instances.iter().map(|instance| state.instance_standing(instance)).collect(),
            });
            let body = rmp_serde::to_vec_named(&reply).unwrap();
            client.publish(message.reply.unwrap(), body.into()).await.unwrap();
        }
    }
}

pub fn token(instance: &InstanceId, right: TokenRight, subject: &str) -> String {
    let claims = TokenClaims {
        instance: instance.clone(),
        right,
        subject: subject.to_owned(),
        part: None,
        holders: None,
        expires_unix_ms: u64::MAX / 2,
    };
    TokenKey::new(&KEY).unwrap().sign(&claims)
}

pub fn minilm(generation: u64) -> RevisionIdentity {
    RevisionIdentity::new("default", "default", "minilm", "main", generation).unwrap()
}

/// A policy that starts nothing by itself.
pub fn hot() -> WeightStoragePolicy {
    WeightStoragePolicy::new(Residency::Hot, HotRatio::HALF, MigrationMode::Manual).unwrap()
}

pub fn operation_id(reply: Reply) -> OperationId {
    match reply {
        Reply::Operation(operation) => operation.operation_id.clone(),
        other => panic!("{other:?}"),
    }
}

/// Waits until `look` finds something.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: it did not happen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
