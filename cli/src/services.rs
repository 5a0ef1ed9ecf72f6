//! Running the services: each alone in its process, or all of them with an embedded NATS server (`ballast dev`).
//!
//! A service that is up prints one ready line on standard output; Ctrl-C or SIGTERM stops it in order.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ballast_gateway::{Gateway, GatewayHandle, GatewayOptions};
use ballast_journal::nodes::Directory;
use ballast_journal::{
    DigestExchange, EmbeddedServer, JetStreamLog, JetStreamSnapshots, LastSeen, Lookout, Replica, ReplicaOptions,
    RestoreFrom, ServerOptions, StartServerError, StreamOptions, Streams, connect, open_streams,
};
use ballast_schemas::{BallastError, ErrorCode, NodeId, ReplicaId, WorkerId};
use ballast_transfer::{BucketUrl, ColdOptions, ColdPlace, EngineChoice, FolderIdentity, HugePages, MemoryOptions};
use ballast_workers::{NodeReport, TransferWorker, TransferWorkerOptions, WorkflowWorker, WorkflowWorkerOptions};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::args::{BucketArgs, DevArgs, GatewayArgs, TransferWorkerArgs, WorkflowWorkerArgs};
use crate::output::{self, Output};
use crate::settings::{self, Given};

const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// A worker started before its gateway waits this long for the cluster to be there.
const CLUSTER_PATIENCE: Duration = Duration::from_secs(60);
const RETRY_EVERY: Duration = Duration::from_millis(500);
/// How often `ballast dev` notes how far the log has come.
const NOTE_EVERY: Duration = Duration::from_secs(1);

/// A service that can not start or go on, as the CLI shows it.
fn failed(error: &dyn std::fmt::Display) -> BallastError {
    BallastError::new(ErrorCode::Unavailable, error.to_string())
}

/// Resolves on Ctrl-C or SIGTERM.
async fn told_to_stop() {
    use tokio::signal::unix::{SignalKind, signal};
    // Without handlers the default action ends the process, which every part survives.
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

fn fresh(kind: &str) -> String {
    let id = uuid::Uuid::new_v4().simple().to_string();
    format!("{kind}-{}", &id[..8])
}

fn replica_id(given: Option<String>, kind: &str) -> Result<ReplicaId, BallastError> {
    ReplicaId::new(given.unwrap_or_else(|| fresh(kind))).map_err(|error| BallastError::invalid(error.to_string()))
}

/// What a cluster that the gateway creates begins with.
fn give(options: &mut GatewayOptions, given: &Given) {
    options.config = given.settings.config.clone();
    options.capabilities = given.settings.capabilities.iter().copied().collect();
}

/// A cluster that was there keeps its settings: a service started with an old file must not change them.
fn say_what_differs(handle: &GatewayHandle, given: &Given) {
    if let Some(line) = handle.replica().read(|state| given.differs_from(state)) {
        tracing::warn!("{line}");
    }
}

fn restore_from(seq: Option<u64>) -> RestoreFrom {
    seq.map_or(RestoreFrom::Newest, RestoreFrom::Seq)
}

/// Runs a gateway until told to stop.
pub async fn gateway(nats: &str, args: GatewayArgs, out: Output) -> Result<(), BallastError> {
    let id = replica_id(args.id, "gateway")?;
    let mut options = GatewayOptions::new(nats, id.clone());
    options.http = args.http;
    options.streams.replicas = usize::from(args.replicas);
    options.restore_from = restore_from(args.restore_from);
    options.streams.log_bytes_max = args.log_size;
    options.snapshots.every_entries = args.snapshot_entries;
    options.snapshots.keep = Duration::from_secs(args.log_keep);
    let given = settings::given(&args.config)?;
    give(&mut options, &given);
    let gateway = Gateway::open(options).await.map_err(|error| failed(&error))?;
    let handle = gateway.handle();
    say_what_differs(&handle, &given);
    let (cluster, seq) = (handle.streams().cluster_id().to_string(), handle.replica().log_seq());
    let http = handle.http_address().map(|address| address.to_string());
    out.show(
        &json!({"ready": "gateway", "id": id, "cluster_id": cluster, "log_seq": seq, "nats": nats, "http": http}),
        || {
            let http = http.as_ref().map_or_else(String::new, |http| format!(", http {http}"));
            format!("ready: gateway {id}, cluster {cluster} at entry {seq}, nats {nats}{http}")
        },
    );
    gateway.run(told_to_stop()).await.map_err(|error| failed(&error))
}

/// A worker's own view of the cluster.
struct Follower {
    streams: Streams,
    replica: Replica,
    directory: Directory,
    lookout: Lookout,
}

async fn follow(nats: &str, id: ReplicaId, restore_from: RestoreFrom) -> Result<Follower, BallastError> {
    let client = connect(nats, &format!("ballast {id}"), CONNECT_PATIENCE).await.map_err(|error| failed(&error))?;
    let lookout = Lookout::start(&client);
    let options = StreamOptions { create: false, ..StreamOptions::default() };
    let deadline = tokio::time::Instant::now() + CLUSTER_PATIENCE;
    let streams = loop {
        match open_streams(client.clone(), &options).await {
            Ok(streams) => break streams,
            Err(error) if error.is_retryable() && tokio::time::Instant::now() < deadline => {
                tracing::info!(%error, "waiting for the cluster");
                tokio::time::sleep(RETRY_EVERY).await;
            }
            Err(error) => return Err(failed(&error)),
        }
    };
    let log = Arc::new(JetStreamLog::new(&streams));
    let cluster_id = Some(streams.cluster_id().clone());
    let digests = Some(DigestExchange::new(&streams));
    let replica_options = ReplicaOptions { cluster_id, restore_from, digests, ..ReplicaOptions::new(id) };
    let snapshots = Arc::new(JetStreamSnapshots::new(&streams));
    let replica = Replica::start(log, Some(snapshots), replica_options).await.map_err(|error| failed(&error))?;
    let directory = Directory::start(&streams);
    Ok(Follower { streams, replica, directory, lookout })
}

/// Runs a workflow worker until told to stop, or until its replica can not go on.
pub async fn workflow_worker(nats: &str, args: WorkflowWorkerArgs, out: Output) -> Result<(), BallastError> {
    let id = replica_id(args.id, "workflow-worker")?;
    let follower = follow(nats, id.clone(), restore_from(args.restore_from)).await?;
    let mut failure = follower.replica.failure();
    let _lookout = follower.lookout;
    let worker = WorkflowWorker::new(WorkflowWorkerOptions {
        streams: follower.streams,
        replica: follower.replica,
        directory: follower.directory,
        worker: WorkerId::new(id.as_str()).map_err(|error| BallastError::invalid(error.to_string()))?,
        concurrency: usize::from(args.concurrency),
    })
    .map_err(|error| failed(&error))?;
    out.show(&json!({"ready": "workflow-worker", "id": id, "nats": nats}), || {
        format!("ready: workflow-worker {id}, nats {nats}")
    });
    let mut stopped = Ok(());
    let end = async {
        tokio::select! {
            () = told_to_stop() => {}
            failed_replica = failure.wait_for(Option::is_some) => {
                if let Ok(Some(error)) = failed_replica.as_deref() {
                    stopped = Err(failed(error));
                }
            }
        }
    };
    worker.run(end).await;
    stopped
}

/// Runs a transfer worker until told to stop.
pub async fn transfer_worker(nats: &str, args: TransferWorkerArgs, out: Output) -> Result<(), BallastError> {
    let name = match args.name {
        Some(name) => name,
        None => host_name()?,
    };
    let node = NodeId::new(name).map_err(|error| BallastError::invalid(error.to_string()))?;
    let client = connect(nats, &format!("ballast transfer-worker {node}"), CONNECT_PATIENCE)
        .await
        .map_err(|error| failed(&error))?;
    let _lookout = Lookout::start(&client);
    let tiers = Tiers {
        memory_bytes: args.memory,
        memory_dir: args.memory_dir.unwrap_or_else(|| Path::new("/dev/shm").join(format!("ballast-{node}"))),
        cold: cold_place(args.cold, &args.bucket, args.config.as_deref())?,
        cold_quota_bytes: args.cold_quota,
    };
    let mut options = transfer_options(client, node.clone(), tiers)?;
    options.unix_socket = args.socket.or(options.unix_socket);
    options.tcp_listen = Some(args.listen.to_string());
    options.tcp_advertise = args.advertise;
    options.rdma = !args.no_rdma;
    options.labels = args.labels.into_iter().collect();
    let worker = TransferWorker::open(options).await.map_err(|error| failed(&error))?;
    let report = worker.report().clone();
    out.show(&json!({"ready": "transfer-worker", "node": node, "nats": nats, "report": report_json(&report)}), || {
        format!("ready: transfer-worker {node}, nats {nats}\n{}", report_text(&report))
    });
    worker.run(told_to_stop()).await.map_err(|error| failed(&error))
}

/// Where a node keeps its bytes.
struct Tiers {
    memory_bytes: u64,
    memory_dir: PathBuf,
    cold: Option<ColdPlace>,
    cold_quota_bytes: Option<u64>,
}

/// Where the cold tier is, if there is one: a folder that was named, before what a configuration file says. The address is parsed
/// here and not by the command line, which would repeat what it can not parse, secrets included.
fn cold_place(
    folder: Option<PathBuf>,
    bucket: &BucketArgs,
    config: Option<&Path>,
) -> Result<Option<ColdPlace>, BallastError> {
    let on_disk = |folder| ColdPlace::Disk { folder, engine: EngineChoice::Auto };
    if folder.is_some() {
        return Ok(folder.map(on_disk));
    }
    let Some(url) = settings::cold_url(bucket.cold_url.as_deref(), config)? else { return Ok(None) };
    let url = url.parse::<BucketUrl>().map_err(|error| BallastError::invalid(format!("cold_url: {error}")))?;
    Ok(Some(ColdPlace::Bucket(url)))
}

fn transfer_options(
    client: async_nats::Client,
    node: NodeId,
    tiers: Tiers,
) -> Result<TransferWorkerOptions, BallastError> {
    if let Some(ColdPlace::Disk { folder, .. }) = &tiers.cold {
        make_folder("cold", "--cold", folder)?;
    }
    let socket = socket_of(&node, &tiers.memory_dir);
    let cold = tiers.cold.map(|place| ColdOptions { place, quota_bytes: tiers.cold_quota_bytes });
    Ok(TransferWorkerOptions {
        client,
        node,
        memory: MemoryOptions {
            folder: tiers.memory_dir,
            budget_bytes: tiers.memory_bytes,
            huge_pages: HugePages::Auto,
        },
        cold,
        unix_socket: Some(socket),
        tcp_listen: Some("127.0.0.1:0".to_owned()),
        tcp_advertise: None,
        rdma: true,
        labels: std::collections::BTreeMap::new(),
    })
}

/// A socket path that is short enough for the kernel, and another for every memory folder.
fn socket_of(node: &NodeId, memory_dir: &Path) -> PathBuf {
    std::env::temp_dir().join(format!("ballast-{node}-{}.sock", short_digest(memory_dir)))
}

fn host_name() -> Result<String, BallastError> {
    let name = rustix::system::uname().nodename().to_string_lossy().replace('.', "-");
    if name.is_empty() {
        return Err(BallastError::invalid("this host has no name; give the node one with --name"));
    }
    Ok(name)
}

fn report_json(report: &NodeReport) -> serde_json::Value {
    let cold = report
        .cold
        .as_ref()
        .map(|cold| json!({"folder": cold.place, "quota_bytes": cold.quota_bytes, "engine": cold.engine}));
    json!({
        "memory": {"bytes": report.memory_bytes, "folder": report.memory_folder, "kind": report.memory_kind},
        "cold": cold,
        "unix_socket": report.unix_socket,
        "tcp": report.tcp,
        "rdma": report.rdma.as_ref().ok(),
        "why_no_rdma": report.rdma.as_ref().err(),
    })
}

fn report_text(report: &NodeReport) -> String {
    let cold = match &report.cold {
        Some(cold) => format!("{} in {}, {}", output::bytes(cold.quota_bytes), cold.place.display(), cold.engine),
        None => "none: nothing can be demoted (give --cold DIR or --cold-url URL)".to_owned(),
    };
    let unix = report.unix_socket.as_ref().map_or_else(|| "none".to_owned(), |path| path.display().to_string());
    format!(
        "  memory tier  {} in {}, {}\n  cold tier    {cold}\n  data plane   unix {unix}, tcp {}, rdma {}",
        output::bytes(report.memory_bytes),
        report.memory_folder.display(),
        report.memory_kind,
        report.tcp.as_deref().unwrap_or("none"),
        report.rdma.as_ref().map_or_else(|why| format!("none: {why}"), Clone::clone),
    )
}

/// What a data folder remembers of its cluster, so that a lost log is noticed.
#[derive(Debug, Serialize, Deserialize)]
struct DevRecord {
    cluster_id: String,
    log_seq: u64,
}

impl DevRecord {
    fn path(data: &Path) -> PathBuf {
        data.join("cluster.json")
    }

    fn read(data: &Path) -> Result<Option<LastSeen>, BallastError> {
        let path = Self::path(data);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(BallastError::invalid(format!("{} can not be read: {error}", path.display()))),
        };
        let wrong = |reason: String| {
            BallastError::invalid(format!("{} is damaged: {reason}; nothing was started", path.display()))
        };
        let record: DevRecord = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let cluster_id = record.cluster_id.parse().map_err(|error| wrong(format!("{error}")))?;
        Ok(Some(LastSeen { cluster_id, log_seq: record.log_seq }))
    }

    fn write(&self, data: &Path) -> std::io::Result<()> {
        let path = Self::path(data);
        let next = path.with_extension("json.next");
        std::fs::write(&next, serde_json::to_vec(self)?)?;
        std::fs::File::open(&next)?.sync_all()?;
        std::fs::rename(&next, &path)
    }
}

/// Notes how far the log has come for as long as the process runs.
async fn keep_record(handle: GatewayHandle, data: PathBuf) {
    let mut noted = 0;
    loop {
        let log_seq = handle.replica().log_seq();
        if log_seq != noted {
            let record = DevRecord { cluster_id: handle.streams().cluster_id().to_string(), log_seq };
            match record.write(&data) {
                Ok(()) => noted = log_seq,
                Err(error) => tracing::warn!(%error, "the cluster record of the data folder is not written"),
            }
        }
        tokio::time::sleep(NOTE_EVERY).await;
    }
}

/// A service of `ballast dev` running as a task, with its own switch.
struct Running {
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<(), BallastError>>,
}

impl Running {
    fn start<F, R>(service: F) -> Self
    where
        F: FnOnce(std::pin::Pin<Box<dyn Future<Output = ()> + Send>>) -> R,
        R: Future<Output = Result<(), BallastError>> + Send + 'static,
    {
        let (stop, mut stopped) = watch::channel(false);
        let shutdown = Box::pin(async move {
            // A dropped switch means the same as a thrown one.
            let _ = stopped.wait_for(|stop| *stop).await;
        });
        Self { stop, task: tokio::spawn(service(shutdown)) }
    }

    async fn stop(self) -> Result<(), BallastError> {
        let _ = self.stop.send(true);
        self.task.await.unwrap_or_else(|error| Err(failed(&error)))
    }
}

fn cold_dir_of(args: &DevArgs, data: &Path) -> PathBuf {
    args.cold.clone().unwrap_or_else(|| data.join("cold"))
}

fn memory_dir(args: &DevArgs, data: &Path) -> PathBuf {
    args.memory_dir.clone().unwrap_or_else(|| memory_dir_of(data))
}

/// The cluster whose bytes are in these folders, if any are: its log is not made anew for another one.
fn cluster_of_tiers(folders: &[PathBuf]) -> Result<Option<LastSeen>, BallastError> {
    for folder in folders {
        let found = FolderIdentity::of(folder).map_err(|error| failed(&error))?;
        if let Some(cluster_id) = found.and_then(|identity| identity.cluster) {
            return Ok(Some(LastSeen { cluster_id, log_seq: 0 }));
        }
    }
    Ok(None)
}

fn make_folder(what: &str, flag: &str, path: &Path) -> Result<(), BallastError> {
    std::fs::create_dir_all(path).map_err(|error| {
        let reason = match path.exists() {
            true => "there is something else than a folder".to_owned(),
            false => error.to_string(),
        };
        BallastError::invalid(format!(
            "the {what} folder {} can not be made: {reason}; name another with {flag}",
            path.display()
        ))
    })
}

/// Runs everything in this process, with an embedded NATS server, until told to stop.
pub async fn dev(args: DevArgs, out: Output) -> Result<(), BallastError> {
    let given = settings::given(&args.config)?;
    let is_made = !args.data.exists();
    make_folder("data", "--data", &args.data)?;
    let data = args.data.canonicalize().map_err(|error| failed(&error))?;
    let last_seen = match DevRecord::read(&data)? {
        Some(seen) => Some(seen),
        None => cluster_of_tiers(&[cold_dir_of(&args, &data), memory_dir(&args, &data)])?,
    };
    let nats_dir = data.join("nats");
    let is_new = !nats_dir.exists();
    // A folder's first start takes the usual port, so that every other command finds it without a flag.
    let mut server_options = ServerOptions::new(&nats_dir);
    server_options.port = args.port.unwrap_or(if is_new { 4222 } else { 0 });
    let server = EmbeddedServer::start(server_options).await.map_err(|error| {
        if is_made {
            // Only if nothing is in it.
            let _ = std::fs::remove_dir(&data);
        }
        not_started(&error)
    })?;
    let ended = dev_services(&args, &given, &data, last_seen, &server, out).await;
    server.stop().await;
    ended
}

/// Why the server of `ballast dev` did not start, with the flag that helps.
fn not_started(error: &StartServerError) -> BallastError {
    match error {
        StartServerError::Port { .. } => failed(&format!("{error}; name another with --port (0 takes a free one)")),
        error => failed(error),
    }
}

async fn dev_services(
    args: &DevArgs,
    given: &Given,
    data: &Path,
    last_seen: Option<LastSeen>,
    server: &EmbeddedServer,
    out: Output,
) -> Result<(), BallastError> {
    let nats = server.url();
    let mut gateway_options = GatewayOptions::new(nats.clone(), replica_id(None, "dev")?);
    gateway_options.http = Some(args.http);
    gateway_options.restore_from = restore_from(args.restore_from);
    give(&mut gateway_options, given);
    gateway_options.streams.last_seen = last_seen;
    let gateway = Gateway::open(gateway_options).await.map_err(|error| failed(&error))?;
    let handle = gateway.handle();
    say_what_differs(&handle, given);
    let record = tokio::spawn(keep_record(handle.clone(), data.to_owned()));
    let gateway = Running::start(|shutdown| async move { gateway.run(shutdown).await.map_err(|error| failed(&error)) });

    let node = NodeId::new("dev").map_err(|error| BallastError::invalid(error.to_string()))?;
    let client =
        connect(&nats, "ballast transfer-worker dev", CONNECT_PATIENCE).await.map_err(|error| failed(&error))?;
    let tiers = Tiers {
        memory_bytes: args.memory,
        memory_dir: memory_dir(args, data),
        cold: cold_place(args.cold.clone(), &args.bucket, args.config.config.as_deref())?
            .or_else(|| Some(ColdPlace::Disk { folder: cold_dir_of(args, data), engine: EngineChoice::Auto })),
        cold_quota_bytes: None,
    };
    let transfer =
        TransferWorker::open(transfer_options(client, node, tiers)?).await.map_err(|error| failed(&error))?;
    let report = transfer.report().clone();
    let transfer =
        Running::start(|shutdown| async move { transfer.run(shutdown).await.map_err(|error| failed(&error)) });

    let worker = WorkerId::new(fresh("dev")).map_err(|error| BallastError::invalid(error.to_string()))?;
    let workflow = WorkflowWorker::new(WorkflowWorkerOptions {
        streams: handle.streams().clone(),
        replica: handle.replica().clone(),
        directory: handle.directory().clone(),
        worker,
        concurrency: ballast_workers::CONCURRENCY_DEFAULT,
    })
    .map_err(|error| failed(&error))?;
    let workflow = Running::start(|shutdown| async move {
        workflow.run(shutdown).await;
        Ok(())
    });

    let http = handle.http_address().map(|address| address.to_string());
    let cluster = handle.streams().cluster_id().to_string();
    let ready = json!({
        "ready": "dev", "nats": nats, "http": http, "data": data, "cluster_id": cluster,
        "log_seq": handle.replica().log_seq(), "report": report_json(&report),
    });
    out.show(&ready, || {
        let http = http.as_deref().unwrap_or("none");
        format!(
            "ballast dev is ready: nats {nats}, http http://{http}, data {}, cluster {cluster}\n{}",
            data.display(),
            report_text(&report)
        )
    });

    let mut failure = handle.replica().failure();
    let mut stopped = Ok(());
    tokio::select! {
        () = told_to_stop() => {}
        failed_replica = failure.wait_for(Option::is_some) => {
            if let Ok(Some(error)) = failed_replica.as_deref() {
                stopped = Err(failed(error));
            }
        }
    }
    out.note("stopping: workflow worker, transfer worker, gateway, NATS server");
    // Whoever depends on the others goes first.
    let ended = [workflow.stop().await, transfer.stop().await, gateway.stop().await];
    record.abort();
    let last = DevRecord { cluster_id: cluster, log_seq: handle.replica().log_seq() };
    if let Err(error) = last.write(data) {
        tracing::warn!(%error, "the cluster record of the data folder is not written");
    }
    stopped.and(ended.into_iter().find(Result::is_err).unwrap_or(Ok(())))
}

/// The memory folder of a data folder: on tmpfs, found again by the next start on the same data folder.
fn memory_dir_of(data: &Path) -> PathBuf {
    Path::new("/dev/shm").join(format!("ballast-dev-{}", short_digest(data)))
}

fn short_digest(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    ballast_schemas::Digest::of(path.as_os_str().as_bytes()).to_string()[..12].to_owned()
}
