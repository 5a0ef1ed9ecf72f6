//! What each command does: resolve the name, call, wait if asked to, print. One file per family.

mod admin;
mod follow;
mod life;
mod log;
mod object;
mod operations;
mod past;
mod read;
mod repair;
mod replay;
mod revisions;
mod write;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballast_client::{Admin, ConnectOptions, Gateway, Progress, WeightStore, explain_missing};
use ballast_schemas::{
    BallastError, ErrorCode, OperationId, OperationStatus, Residency, RevisionIdentity, TenantId, WeightOperation,
    WeightStoragePolicy,
};

use crate::args::{
    Command, GetArgs, MigrateArgs, NameArgs, OpAction, OpArgs, OpenArgs, PolicyArgs, PolicyFlags, RepairArgs, RmArgs,
    UpsertArgs,
};
use crate::output::Output;

/// How often something that is waited for is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a command waits for an answer without a word.
const QUIET_FOR: Duration = Duration::from_secs(1);
/// How long an interrupted command takes to abort its import and release its lease.
const SETTLE_PATIENCE: Duration = Duration::from_secs(5);
/// Exit code after Ctrl-C, as shells have it.
const INTERRUPTED: i32 = 130;

/// What every command works with.
pub struct Context {
    pub store: WeightStore,
    pub admin: Admin,
    pub gateway: Gateway,
    pub out: Output,
}

/// Runs a command that reads the log itself; `None`, with the command, if it is not one of those.
async fn run_on_the_log(nats: &str, command: Command, out: Output) -> Result<Option<Command>, BallastError> {
    match command {
        Command::Log(args) => log::log(&past::open(nats).await?, args, out).await?,
        Command::Op(OpArgs { action: Some(OpAction::History(args)), .. }) => {
            life::history(&past::open(nats).await?, &args.id, out).await?;
        }
        Command::Replay(args) => replay::replay(&past::open(nats).await?, args, out).await?,
        Command::Admin(args) => admin::admin(nats, args.action, out).await?,
        Command::Snapshots => replay::snapshots(&past::open(nats).await?, out).await?,
        other => return Ok(Some(other)),
    }
    Ok(None)
}

/// Connects and runs one command. Ctrl-C drops what it is at: a put is aborted, a lease released, before the program ends.
pub async fn run(nats: &str, command: Command, out: Output) -> Result<(), BallastError> {
    let Some(command) = run_on_the_log(nats, command, out).await? else { return Ok(()) };
    let options = ConnectOptions { waiting: said_waiting(out), address_flag: "--nats", ..ConnectOptions::new(nats) };
    let gateway = Gateway::connect(&options).await?;
    let context =
        Context { store: WeightStore::new(gateway.clone()), admin: Admin::new(gateway.clone()), gateway, out };
    let named = command.generation();
    // Those two end well on Ctrl-C by themselves.
    let ends_by_itself = matches!(command, Command::Open(_) | Command::Watch(_));
    let interrupted = async {
        if ends_by_itself || tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let result = tokio::select! {
        result = dispatch(&context, command) => Some(result),
        () = interrupted => None,
    };
    let result = match (result, named) {
        (Some(Err(error)), Some(named)) => Some(Err(explain_missing(&context.store, &named, error).await)),
        (result, _) => result,
    };
    let result = result.map(|done| done.map_err(advised));
    // What failed or was dropped releases its lease and aborts its import in the background; the process outlives that.
    context.gateway.settle(SETTLE_PATIENCE).await;
    result.unwrap_or_else(|| {
        context.out.note("interrupted: what was under way is given up");
        std::process::exit(INTERRUPTED)
    })
}

/// Says what a request waits for (no gateway, no node that serves) once that has taken a moment, and each reason once.
fn said_waiting(out: Output) -> Progress {
    let started = Instant::now();
    let said = Mutex::new(String::new());
    Progress::new(move |update| {
        let Some(note) = update.note.as_deref().filter(|_| started.elapsed() >= QUIET_FOR) else { return };
        let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
        if *said != note {
            out.note(&format!("waiting: {note}"));
            note.clone_into(&mut said);
        }
    })
}

/// BUSY with the command that waits for what is in the way.
fn advised(mut error: BallastError) -> BallastError {
    if let (ErrorCode::Busy, Some(id)) = (error.code, error.details["operation_id"].as_str()) {
        error.message = format!("{} (`ballast op {id} --wait` waits for it)", error.message);
    }
    error
}

async fn dispatch(context: &Context, command: Command) -> Result<(), BallastError> {
    match command {
        Command::Put(args) => write::put(context, args).await,
        Command::Upsert(args) => write::upsert(context, args).await,
        Command::Get(args) => read::get(context, args).await,
        Command::Open(args) => read::open(context, args).await,
        Command::Ls(args) => revisions::ls(context, args).await,
        Command::Show(args) => revisions::show(context, args).await,
        Command::Policy(args) => revisions::policy(context, args).await,
        Command::Rm(args) => revisions::rm(context, args).await,
        Command::Migrate(args) => operations::migrate(context, args).await,
        Command::Repair(args) => repair::repair(context, args).await,
        Command::Verify(args) => repair::verify(context, args).await,
        Command::Op(args) => operations::op(context, args).await,
        Command::Object(args) => object::object(context, args).await,
        Command::Watch(args) => follow::watch(context, args).await,
        Command::Status => follow::status(context).await,
        // Services are run by `services`, what reads the log by `run_on_the_log`; they never reach this place.
        Command::Dev(_) | Command::Gateway(_) | Command::WorkflowWorker(_) | Command::TransferWorker(_) => Ok(()),
        Command::Log(_) | Command::Replay(_) | Command::Snapshots | Command::Admin(_) | Command::Failpoints => Ok(()),
    }
}

impl Command {
    /// The generation that a command is about, where it names one that must be there.
    fn generation(&self) -> Option<RevisionIdentity> {
        let (lineage, generation) = match self {
            Command::Get(GetArgs { name, .. })
            | Command::Open(OpenArgs { name, .. })
            | Command::Show(NameArgs { name })
            | Command::Verify(NameArgs { name })
            | Command::Policy(PolicyArgs { name, .. })
            | Command::Migrate(MigrateArgs { name, .. })
            | Command::Repair(RepairArgs { name, .. })
            | Command::Rm(RmArgs { name, .. }) => (&name.lineage, name.generation?),
            Command::Upsert(UpsertArgs { name, replacing, .. }) => (&name.lineage, *replacing),
            _ => return None,
        };
        lineage.generation(generation).ok()
    }
}

impl PolicyFlags {
    /// Whether the flags say something, but not everything.
    fn is_partial(&self) -> bool {
        let given = [self.preferred.is_some(), self.hot_ratio.is_some(), self.mode.is_some()];
        given.contains(&true) && given.contains(&false)
    }

    /// `base` with what the flags say, or `None` when they say nothing.
    fn over(&self, base: WeightStoragePolicy, out: Output) -> Result<Option<WeightStoragePolicy>, BallastError> {
        if self.preferred.is_none() && self.hot_ratio.is_none() && self.mode.is_none() {
            return Ok(None);
        }
        let preferred = self.preferred.unwrap_or(base.preferred_residency);
        if let Some(ratio) = self.hot_ratio.filter(|_| preferred != Residency::Mixed) {
            out.note(&format!(
                "--hot-ratio {} is kept for when the revision is MIXED (`ballast migrate NAME mixed`) and changes nothing now: \
                 the policy prefers {preferred}",
                f64::from(ratio)
            ));
        }
        WeightStoragePolicy::new(
            preferred,
            self.hot_ratio.unwrap_or(base.mixed_hot_ratio),
            self.mode.unwrap_or(base.migration_mode),
        )
        .map(Some)
        .map_err(|error| BallastError::invalid(error.to_string()))
    }
}

/// Waits until an operation has ended, showing its progress. An operation that waits for something says so.
async fn wait_for(context: &Context, tenant: &TenantId, id: &OperationId) -> Result<WeightOperation, BallastError> {
    let mut bar = context.out.bytes_bar(&format!("{id}"));
    let mut said = None;
    loop {
        let operation = context.store.weight_get_operation(tenant, id).await?;
        if operation.status.is_terminal() {
            return Ok(operation);
        }
        if operation.total_bytes > 0 {
            bar.set(operation.processed_bytes, operation.total_bytes);
        }
        let waits = match operation.status {
            OperationStatus::Parked => operation.park_reason.map(|reason| format!("{id} waits: {reason}")),
            OperationStatus::Paused => Some(format!("{id} is paused; `ballast op resume {id}` lets it go on")),
            OperationStatus::BackingOff => operation
                .last_error
                .as_ref()
                .map(|error| format!("{id} tries again after {}: {}", error.code, error.message)),
            _ => None,
        };
        if waits.is_some() && waits != said {
            context.out.note(waits.as_deref().unwrap_or_default());
            said = waits;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The operation if it ended well, else why it did not.
fn succeeded(operation: WeightOperation) -> Result<WeightOperation, BallastError> {
    if operation.status == OperationStatus::Succeeded {
        return Ok(operation);
    }
    let why = operation.last_error.as_ref();
    let code = why.map_or(ErrorCode::Conflict, |error| error.code);
    let reason = why.map_or_else(String::new, |error| format!(": {}", error.message));
    let message = format!("operation {} ended as {}{reason}", operation.operation_id, operation.status);
    let details = serde_json::to_value(&operation).unwrap_or_default();
    Err(BallastError::new(code, message).with_details(details))
}

fn tenant(text: &str) -> Result<TenantId, BallastError> {
    TenantId::new(text).map_err(|error| BallastError::invalid(error.to_string()))
}
