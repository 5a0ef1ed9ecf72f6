//! The command line: flags, their defaults and their help. What the commands do is in `commands`.

use std::net::SocketAddr;
use std::path::PathBuf;

use ballast_schemas::{
    Capability, Component, HotRatio, LineageKey, MigrationMode, NodeId, ObjectKey, Residency, RevisionIdentity,
    UpsertMode,
};
use clap::{Args, Parser, Subcommand, ValueEnum};

/// Keeps model weights as complete, immutable revisions: publish, read under a lease, move between memory and disk,
/// replace, delete — and survive any crash.
#[derive(Debug, Parser)]
#[command(name = "ballast", version, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    /// NATS server(s) to talk to.
    #[arg(long, global = true, env = "BALLAST_NATS", default_value = "nats://127.0.0.1:4222", value_name = "URL")]
    pub nats: String,
    /// How to print results.
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    pub output: Format,
    /// Show progress even when standard error is not a terminal.
    #[arg(long, global = true)]
    pub progress: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For programs: one JSON document (`watch` and `log`: one per line).
    Json,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run everything on this machine: an embedded NATS server, a gateway, a workflow worker and a transfer worker.
    Dev(DevArgs),
    /// Run a gateway: answers the verbs, folds the log, publishes events.
    Gateway(GatewayArgs),
    /// Run a workflow worker: drives migrations, deletions and replacements.
    WorkflowWorker(WorkflowWorkerArgs),
    /// Run a transfer worker: owns a memory tier and a cold tier and moves the bytes.
    TransferWorker(TransferWorkerArgs),
    /// Publish a model file or folder as a revision.
    Put(PutArgs),
    /// Read a revision back into a folder, under a lease.
    Get(GetArgs),
    /// Map a revision without copying and hold its lease until a command (or standard input) ends.
    Open(OpenArgs),
    /// List revisions.
    Ls(LsArgs),
    /// Show one revision.
    Show(NameArgs),
    /// Show or change a revision's residency policy.
    Policy(PolicyArgs),
    /// Replace one generation by a higher one, with every argument explicit (`put --replace` is the short form).
    Upsert(UpsertArgs),
    /// Move a revision to HOT, COLD or MIXED.
    Migrate(MigrateArgs),
    /// Make the copies that a revision lacks from those that it has.
    Repair(RepairArgs),
    /// Read a revision's bytes back on every tier and compare their checksums; wrong copies are no longer served.
    Verify(NameArgs),
    /// Show operations, or act on one.
    Op(OpArgs),
    /// Delete a revision; a tombstone remains.
    Rm(RmArgs),
    /// Keep small ordinary objects in a node's memory, beside the weights: a cache that gives way to them.
    Object(ObjectArgs),
    /// Follow events.
    Watch(WatchArgs),
    /// Show the cluster, its nodes and counts.
    Status,
    /// Show entries of the log: each command, and what folding it decided. Needs no gateway.
    Log(LogArgs),
    /// Show the state as it was after any entry of the log, or what changed between two. Needs no gateway.
    Replay(ReplayArgs),
    /// List the snapshots that a service can start from (`--restore-from`), each read and checked. Needs no gateway.
    Snapshots,
    /// Show and change what holds for the whole cluster: gates, fold version, settings. Needs no gateway.
    Admin(AdminArgs),
    /// List the places where a test can have a worker kill itself (BALLAST_FAILPOINT).
    #[command(hide = true)]
    Failpoints,
}

/// A revision's short name.
#[derive(Clone, Debug)]
pub struct Name {
    /// As it was given.
    pub text: String,
    /// Which lineage.
    pub lineage: LineageKey,
    /// Which generation; none: the newest that is READY.
    pub generation: Option<u64>,
}

impl Name {
    /// Whether the name means this revision: a name without a generation means every generation.
    pub fn means(&self, identity: &RevisionIdentity) -> bool {
        identity.lineage() == self.lineage && self.generation.is_none_or(|it| it == identity.weight_generation)
    }
}

fn name(text: &str) -> Result<Name, String> {
    let (lineage, generation) = LineageKey::parse_short_name(text).map_err(|error| error.to_string())?;
    Ok(Name { text: text.to_owned(), lineage, generation })
}

/// The beginning of short names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    /// Of this namespace alone.
    pub namespace: Option<Component>,
    /// How the model's name begins.
    pub resource: Option<String>,
}

fn prefix(text: &str) -> Result<Prefix, String> {
    if let Some(mark) = text.find(['#', '@', ':']).and_then(|at| text[at..].chars().next()) {
        let reason = match mark {
            ':' => "whose revisions is said with --tenant",
            _ => "a listing goes by namespace and name alone; `ballast show` shows one revision",
        };
        return Err(format!("{text:?} holds {mark:?}: {reason} (in a name it is written %{:02X})", mark as u32));
    }
    let (namespace, resource) = match text.split_once('/') {
        Some((namespace, resource)) => (Some(namespace), resource),
        None => (None, text),
    };
    if resource.contains('/') {
        return Err(format!(
            "{text:?} is not [namespace/]name-prefix: at most one '/' is allowed; write others as %2F"
        ));
    }
    // Read as every name is; after a namespace alone any name may follow.
    let any = if resource.is_empty() && namespace.is_some() { "x" } else { resource };
    let whole = namespace.map_or_else(|| any.to_owned(), |namespace| format!("{namespace}/{any}"));
    let (key, _) = LineageKey::parse_short_name(&whole).map_err(|error| error.to_string())?;
    Ok(Prefix {
        namespace: namespace.map(|_| key.namespace),
        resource: (any == resource).then(|| key.resource_id.as_str().to_owned()),
    })
}

/// Parses `512MiB`, `4GiB`, `1.5GB` or plain bytes.
fn size(text: &str) -> Result<u64, String> {
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits_end);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("unit {unit:?} is not one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")),
    };
    let value: f64 = number.parse().map_err(|_| format!("{text:?} is not a size; write 4GiB, say"))?;
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let bytes = value * factor as f64;
    if !(1.0..9e15).contains(&bytes) {
        return Err(format!("{text:?} is out of range; write 4GiB, say"));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    Ok(bytes as u64)
}

fn residency(text: &str) -> Result<Residency, String> {
    match Residency::from_name(text) {
        Some(residency @ (Residency::Hot | Residency::Cold | Residency::Mixed)) => Ok(residency),
        _ => Err(format!("{text:?} is not hot, cold or mixed")),
    }
}

fn mode(text: &str) -> Result<MigrationMode, String> {
    MigrationMode::from_name(text).ok_or_else(|| format!("{text:?} is not pinned, manual or auto"))
}

fn ratio(text: &str) -> Result<HotRatio, String> {
    let number: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    HotRatio::from_f64(number).map_err(|error| error.to_string())
}

fn upsert_mode(text: &str) -> Result<UpsertMode, String> {
    UpsertMode::from_name(&text.replace('-', "_")).ok_or_else(|| format!("{text:?} is not put-first or delete-first"))
}

/// Settings that a new cluster is created with. One that exists keeps its own, and the service says which differ.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// YAML file with settings; `ballast admin config` prints every key. Environment variables (BALLAST_ and the key in capitals)
    /// go before it, --set before both.
    #[arg(long, env = "BALLAST_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// One setting of a new cluster; can be repeated.
    #[arg(long, value_parser = label, value_name = "KEY=VALUE")]
    pub set: Vec<(String, String)>,
}

/// A cold tier in object storage.
#[derive(Debug, Args)]
pub struct BucketArgs {
    /// Keep the cold tier in object storage instead: s3://BUCKET[/PREFIX], the same for every node of a cluster. Copies there outlive
    /// the node: another takes them over. Also key `cold_url` of the configuration file. Credentials, region and endpoint come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    /// AWS_REGION, AWS_ENDPOINT_URL and their kin.
    #[arg(long, env = "BALLAST_COLD_URL", hide_env_values = true, conflicts_with = "cold", value_name = "URL")]
    pub cold_url: Option<String>,
}

/// `ballast dev`.
#[derive(Debug, Args)]
pub struct DevArgs {
    /// Where the log, the cold tier and everything else that must last is kept.
    #[arg(long, default_value = "./ballast-data", value_name = "DIR")]
    pub data: PathBuf,
    /// Size of the memory tier.
    #[arg(long, default_value = "4GiB", value_parser = size, value_name = "SIZE")]
    pub memory: u64,
    /// Folder of the memory tier, on tmpfs; by default one under /dev/shm.
    #[arg(long, value_name = "DIR")]
    pub memory_dir: Option<PathBuf>,
    /// Folder of the cold tier; by default `cold` in the data folder.
    #[arg(long, value_name = "DIR")]
    pub cold: Option<PathBuf>,
    #[command(flatten)]
    pub bucket: BucketArgs,
    /// Port of the NATS server; by default 4222, or the port this data folder used before; 0 picks a free one.
    #[arg(long, value_name = "PORT")]
    pub port: Option<u16>,
    /// Where health and metrics are served.
    #[arg(long, default_value = "127.0.0.1:8480", value_name = "ADDR")]
    pub http: SocketAddr,
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Start from the snapshot at this log entry instead of the newest (`ballast snapshots` lists them): the way out when the newest
    /// can not be used. A fresh snapshot then takes its place.
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub restore_from: Option<u64>,
}

/// `ballast gateway`.
#[derive(Debug, Args)]
pub struct GatewayArgs {
    /// Where health and metrics are served.
    #[arg(long, value_name = "ADDR")]
    pub http: Option<SocketAddr>,
    /// Name of this replica; random by default.
    #[arg(long)]
    pub id: Option<String>,
    /// Copies of the streams that a new cluster keeps: 1, or 3 on a NATS cluster.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=5))]
    pub replicas: u8,
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Write a snapshot of the state after so many log entries (and, whatever comes first, every ten minutes).
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(2..), value_name = "N", allow_negative_numbers = true)]
    pub snapshot_entries: u64,
    /// Bytes that the log of a new cluster may take. In its last tenth new work is refused as CAPACITY_EXHAUSTED.
    #[arg(long, default_value = "1GiB", value_parser = size, value_name = "SIZE")]
    pub log_size: u64,
    /// Seconds for which log entries are kept, whatever the snapshots would let go.
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub log_keep: u64,
    /// Start from the snapshot at this log entry instead of the newest (`ballast snapshots` lists them): the way out when the newest
    /// can not be used. A fresh snapshot then takes its place.
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub restore_from: Option<u64>,
}

/// `ballast workflow-worker`.
#[derive(Debug, Args)]
pub struct WorkflowWorkerArgs {
    /// Operations driven at once.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub concurrency: u16,
    /// Name of this worker; random by default.
    #[arg(long)]
    pub id: Option<String>,
    /// Start from the snapshot at this log entry instead of the newest (`ballast snapshots` lists them): the way out when the newest
    /// can not be used.
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub restore_from: Option<u64>,
}

/// `ballast transfer-worker`.
#[derive(Debug, Args)]
pub struct TransferWorkerArgs {
    /// Size of the memory tier.
    #[arg(long, value_parser = size, value_name = "SIZE")]
    pub memory: u64,
    /// Durable name of this node; by default the host's name.
    #[arg(long)]
    pub name: Option<String>,
    /// Folder of the memory tier, on tmpfs; by default one under /dev/shm.
    #[arg(long, value_name = "DIR")]
    pub memory_dir: Option<PathBuf>,
    /// Folder of the cold tier, on local disk; without it (and without --cold-url) nothing can be demoted.
    #[arg(long, value_name = "DIR")]
    pub cold: Option<PathBuf>,
    #[command(flatten)]
    pub bucket: BucketArgs,
    /// Most bytes the cold tier may take; by default what its file system has, or 1 PiB of a bucket.
    #[arg(long, value_parser = size, value_name = "SIZE")]
    pub cold_quota: Option<u64>,
    /// YAML file with settings, the same for all services of a cluster; of these, `cold_url` is a node's own. Flags and environment
    /// variables go before it.
    #[arg(long, env = "BALLAST_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Unix socket for readers and writers on this host; by default in the memory folder.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// TCP listener for readers and writers on other hosts.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    pub listen: SocketAddr,
    /// Address other hosts reach the listener at, if it is another.
    #[arg(long, value_name = "ADDR")]
    pub advertise: Option<String>,
    /// Do not use RDMA beside TCP, also where this host has it.
    #[arg(long)]
    pub no_rdma: bool,
    /// Free labels of this node, for people and placement.
    #[arg(long = "label", value_parser = label, value_name = "KEY=VALUE")]
    pub labels: Vec<(String, String)>,
}

fn label(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .ok_or_else(|| format!("{text:?} is not KEY=VALUE"))
}

/// The three parts of a residency policy.
#[derive(Debug, Args)]
pub struct PolicyFlags {
    /// Where the revision should converge: hot, cold or mixed.
    #[arg(long, value_parser = residency, value_name = "RESIDENCY")]
    pub preferred: Option<Residency>,
    /// Hot share of the bytes when mixed, above 0 and below 1.
    #[arg(long, value_parser = ratio, value_name = "RATIO")]
    pub hot_ratio: Option<HotRatio>,
    /// What may move it afterwards: pinned (nothing), manual (only `migrate`) or auto (access and pressure too).
    #[arg(long, value_parser = mode, value_name = "MODE")]
    pub mode: Option<MigrationMode>,
}

/// `ballast put`.
#[derive(Debug, Args)]
pub struct PutArgs {
    /// A `.safetensors` file, or a folder with one, or with `model.safetensors.index.json` and its shards.
    pub path: PathBuf,
    /// `[namespace/]name[@revision][#generation]`; without a generation the next one is taken.
    #[arg(value_parser = name)]
    pub name: Name,
    #[command(flatten)]
    pub policy: PolicyFlags,
    /// Replace the newest READY generation: `put-first` (readable throughout) or `delete-first` (less space).
    #[arg(long, value_parser = upsert_mode, num_args = 0..=1, default_missing_value = "put-first", value_name = "MODE")]
    pub replace: Option<UpsertMode>,
    /// Idempotency key of the replacement.
    #[arg(long, requires = "replace")]
    pub request_id: Option<String>,
    /// Wait until the revision has its preferred residency (and the replaced generation is gone).
    #[arg(long)]
    pub wait: bool,
}

/// `ballast upsert`.
#[derive(Debug, Args)]
pub struct UpsertArgs {
    /// A `.safetensors` file or a model folder.
    pub path: PathBuf,
    /// The target; without a generation the next one is taken.
    #[arg(value_parser = name)]
    pub name: Name,
    /// The generation to replace.
    #[arg(long, value_name = "GENERATION", allow_negative_numbers = true)]
    pub replacing: u64,
    /// `put-first` or `delete-first`.
    #[arg(long = "upsert-mode", value_parser = upsert_mode, default_value = "put-first", value_name = "MODE")]
    pub upsert_mode: UpsertMode,
    /// Idempotency key of the replacement; by default derived from the arguments.
    #[arg(long)]
    pub request_id: Option<String>,
    /// The base's metadata generation you saw; by default the current one.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub expected: Option<u64>,
    #[command(flatten)]
    pub policy: PolicyFlags,
    /// Wait until the base is gone.
    #[arg(long)]
    pub wait: bool,
}

/// `ballast get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// `[namespace/]name[@revision][#generation]`; without a generation the newest READY one.
    #[arg(value_parser = name)]
    pub name: Name,
    /// Folder to write to; created if missing.
    #[arg(long, value_name = "DIR")]
    pub to: PathBuf,
    /// Overwrite files that are there.
    #[arg(long)]
    pub force: bool,
}

/// `ballast open`.
#[derive(Debug, Args)]
pub struct OpenArgs {
    /// Which revision.
    #[arg(value_parser = name)]
    pub name: Name,
    /// Digest every tensor when it opens and again when it ends, and say whether they are the same.
    #[arg(long)]
    pub check: bool,
    /// Hold the lease while this runs; without it, until standard input ends.
    #[arg(last = true)]
    pub run: Vec<String>,
}

/// `ballast ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// `[namespace/]name-prefix`; everything of the tenant without it.
    #[arg(value_parser = prefix)]
    pub prefix: Option<Prefix>,
    /// Also tombstones and imports in progress.
    #[arg(long)]
    pub all: bool,
    /// Whose revisions.
    #[arg(long, default_value = "default")]
    pub tenant: String,
}

/// A command about one revision.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// Which revision; without a generation the newest READY one (or, if none is, the newest).
    #[arg(value_parser = name)]
    pub name: Name,
}

/// `ballast policy`.
#[derive(Debug, Args)]
pub struct PolicyArgs {
    /// Which revision.
    #[arg(value_parser = name)]
    pub name: Name,
    #[command(flatten)]
    pub policy: PolicyFlags,
    /// The metadata generation you saw; by default the current one.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub expected: Option<u64>,
}

/// `ballast migrate`.
#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// Which revision.
    #[arg(value_parser = name)]
    pub name: Name,
    /// hot, cold or mixed.
    #[arg(value_parser = residency)]
    pub target: Residency,
    /// Hot share of the bytes when mixed; by default the policy's.
    #[arg(long, value_parser = ratio, value_name = "RATIO")]
    pub hot_ratio: Option<HotRatio>,
    /// The metadata generation you saw; by default the current one.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub expected: Option<u64>,
    /// Wait until it has ended.
    #[arg(long)]
    pub wait: bool,
}

/// `ballast repair`.
#[derive(Debug, Args)]
pub struct RepairArgs {
    /// Which revision.
    #[arg(value_parser = name)]
    pub name: Name,
    /// The metadata generation you saw; by default the current one.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub expected: Option<u64>,
    /// Wait until it has ended.
    #[arg(long)]
    pub wait: bool,
}

/// `ballast op`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct OpArgs {
    /// What to do with an operation; without it, show.
    #[command(subcommand)]
    pub action: Option<OpAction>,
    /// Which operation; without it, the list.
    pub id: Option<String>,
    /// Also operations that have ended.
    #[arg(long)]
    pub all: bool,
    /// Wait until it has ended.
    #[arg(long, requires = "id")]
    pub wait: bool,
    /// Whose operations.
    #[arg(long, default_value = "default")]
    pub tenant: String,
}

/// What can be done with an operation.
#[derive(Debug, Subcommand)]
pub enum OpAction {
    /// Show its life from the log: what created it, claims, steps, waits, failures, its end. Needs no gateway.
    History(OpIdArgs),
    /// End it: at once when it waits, else at its next step boundary.
    Cancel(OpIdArgs),
    /// Stop it until it is resumed.
    Pause(OpIdArgs),
    /// Go on with a paused one.
    Resume(OpIdArgs),
    /// Try a waiting one again now.
    Retry(OpIdArgs),
}

/// One operation.
#[derive(Debug, Args)]
pub struct OpIdArgs {
    /// Which operation.
    pub id: String,
    /// Whose operation.
    #[arg(long, default_value = "default")]
    pub tenant: String,
}

/// `ballast rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// Which revision.
    #[arg(value_parser = name)]
    pub name: Name,
    /// The metadata generation you saw; by default the current one.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub expected: Option<u64>,
    /// Wait until every byte is gone.
    #[arg(long)]
    pub wait: bool,
    /// Only say what would be deleted.
    #[arg(long)]
    pub dry_run: bool,
}

/// `ballast object`.
#[derive(Debug, Args)]
pub struct ObjectArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: ObjectAction,
    /// Whose objects; needed only where several nodes serve.
    #[arg(long, global = true, value_parser = node, value_name = "NAME")]
    pub node: Option<NodeId>,
}

/// What can be done with ordinary objects. They are evicted when weights need the room, the longest unused first, and
/// do not outlive a restart of their node. Managed groups are left alone by all of these.
#[derive(Debug, Subcommand)]
pub enum ObjectAction {
    /// Store a file's bytes (768 KiB at most) under a key.
    Put {
        /// The key; weights/… and weight:… are for weights.
        #[arg(value_parser = object_key)]
        key: ObjectKey,
        /// The file.
        file: PathBuf,
    },
    /// Read an object into a file.
    Get {
        /// The key.
        #[arg(value_parser = object_key)]
        key: ObjectKey,
        /// The file to write.
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
    },
    /// Remove one object.
    Rm {
        /// The key.
        #[arg(value_parser = object_key)]
        key: ObjectKey,
    },
    /// List the objects.
    Ls,
    /// Remove every object.
    Clear {
        /// Only say what would be removed.
        #[arg(long)]
        dry_run: bool,
    },
}

fn object_key(text: &str) -> Result<ObjectKey, String> {
    ObjectKey::new(text).map_err(|error| error.to_string())
}

fn node(text: &str) -> Result<NodeId, String> {
    NodeId::new(text).map_err(|error| error.to_string())
}

/// `ballast watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Only this lineage or generation.
    #[arg(value_parser = name)]
    pub name: Option<Name>,
    /// From the oldest event that is kept, not from now.
    #[arg(long)]
    pub from_start: bool,
    /// Stop after this many.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub count: Option<u64>,
    /// Whose events, when no name is given.
    #[arg(long, default_value = "default")]
    pub tenant: String,
}

/// `ballast log`.
#[derive(Debug, Args)]
pub struct LogArgs {
    /// From this entry on.
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub from: Option<u64>,
    /// Up to and including this entry.
    #[arg(long, value_name = "SEQ", conflicts_with = "follow", allow_negative_numbers = true)]
    pub to: Option<u64>,
    /// Go on with entries as they come.
    #[arg(long)]
    pub follow: bool,
    /// Only commands about this revision, or about any generation of it.
    #[arg(long, value_parser = name, value_name = "NAME")]
    pub revision: Option<Name>,
    /// Only commands about this operation.
    #[arg(long, value_name = "ID")]
    pub op: Option<String>,
    /// Only the last so many commands; 20 when nothing else narrows the range.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub last: Option<u32>,
}

/// `ballast replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Show the state after this entry; by default after the newest.
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub to: Option<u64>,
    /// Show what changed between the states after these two entries.
    #[arg(long, num_args = 2, value_names = ["SEQ1", "SEQ2"], conflicts_with = "to")]
    pub diff: Option<Vec<u64>>,
    /// Only this revision, or every generation of it.
    #[arg(long, value_parser = name, value_name = "NAME")]
    pub revision: Option<Name>,
}

/// `ballast admin`.
#[derive(Debug, Args)]
pub struct AdminArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: AdminAction,
}

/// What can be done with a cluster.
#[derive(Debug, Subcommand)]
pub enum AdminAction {
    /// Show the gates, and every replica that announced itself with the command families it folds.
    Capabilities,
    /// Open a gate for good; refused while a live replica can not fold what it opens.
    ConfirmCapability(CapabilityArgs),
    /// Fold later entries by newer rules; refused while a live replica does not know them. There is no way back.
    RaiseFoldVersion(FoldVersionArgs),
    /// Show the cluster's settings, as a configuration file has them, or change some.
    Config(AdminConfigArgs),
}

/// `ballast admin confirm-capability`.
#[derive(Debug, Args)]
pub struct CapabilityArgs {
    /// weight_management, weight_lineage or weight_sharing.
    #[arg(value_parser = capability)]
    pub capability: Capability,
}

fn capability(text: &str) -> Result<Capability, String> {
    Capability::from_name(text)
        .ok_or_else(|| format!("{text:?} is not weight_management, weight_lineage or weight_sharing"))
}

/// `ballast admin raise-fold-version`.
#[derive(Debug, Args)]
pub struct FoldVersionArgs {
    /// To which.
    #[arg(value_name = "VERSION")]
    pub fold_version: u32,
}

/// `ballast admin config`.
#[derive(Debug, Args)]
pub struct AdminConfigArgs {
    /// What to do; without it, show.
    #[command(subcommand)]
    pub action: Option<ConfigAction>,
}

/// What can be done with the settings.
#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Change settings for everyone, from now on; published revisions keep their own policy.
    Set(ConfigSetArgs),
}

/// `ballast admin config set`.
#[derive(Debug, Args)]
pub struct ConfigSetArgs {
    /// What to change.
    #[arg(required = true, value_parser = label, value_name = "KEY=VALUE")]
    pub settings: Vec<(String, String)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(size("4GiB"), Ok(4 << 30));
        assert_eq!(size("64M"), Ok(64 << 20));
        assert_eq!(size("1.5GB"), Ok(1_500_000_000));
        for wrong in ["", "x", "0", "-1GiB", "4 parsecs", "1e99GiB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_prefix_is_read_as_names_are_and_what_can_be_none_is_refused() {
        let component = |text| Some(Component::new("namespace", text).unwrap());
        let resource = |text: &str| Some(text.to_owned());
        assert_eq!(prefix("min"), Ok(Prefix { namespace: None, resource: resource("min") }));
        assert_eq!(prefix("x%20y/"), Ok(Prefix { namespace: component("x y"), resource: None }));
        assert_eq!(prefix("x y/z%2Fq"), Ok(Prefix { namespace: component("x y"), resource: resource("z/q") }));
        for (wrong, said) in [
            ("x y/z/q", "at most one '/'"),
            ("minilm#9", "ballast show"),
            ("minilm@main", "ballast show"),
            ("acme:minilm", "--tenant"),
            ("", "resource_id is empty"),
            ("/x", "namespace is empty"),
            ("a\u{7}", "control character"),
            ("%ff", "UTF-8"),
        ] {
            let refused = prefix(wrong).unwrap_err();
            assert!(refused.contains(said), "{wrong:?}: {refused}");
        }
    }

    #[test]
    fn replace_alone_means_put_first() {
        let cli = Cli::try_parse_from(["ballast", "put", "m", "minilm", "--replace"]).unwrap();
        let Command::Put(put) = cli.command else { panic!("not put") };
        assert_eq!(put.replace, Some(UpsertMode::PutFirst));
        assert!(Cli::try_parse_from(["ballast", "put", "m", "minilm", "--hot-ratio", "1"]).is_err());
        assert!(Cli::try_parse_from(["ballast", "op", "cancel", "op-1.0"]).is_ok());
        assert!(Cli::try_parse_from(["ballast", "op", "op-1.0", "--wait"]).is_ok());
    }
}
