//! `ballast get` and `ballast open`: read a revision under a lease, into a folder or in place.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitStatus;

use ballast_client::{GetOptions, GetReport, GetTarget, OpenRevision, resolve};
use ballast_schemas::{BallastError, Digest, ErrorCode};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::write::shown_progress;
use super::{Context, INTERRUPTED, SETTLE_PATIENCE};
use crate::args::{GetArgs, OpenArgs};
use crate::output::{bytes, speed};

pub async fn get(context: &Context, args: GetArgs) -> Result<(), BallastError> {
    let identity = resolve(&context.store, &args.name.text).await?;
    let options = GetOptions { progress: shown_progress(context.out, "get"), ..GetOptions::default() };
    let target = GetTarget::Directory { path: &args.to, overwrite: args.force };
    let report = context.store.weight_get(&identity, target, options).await.map_err(|error| match error.code {
        ErrorCode::Conflict if !args.force => BallastError { message: format!("{} (--force)", error.message), ..error },
        _ => error,
    })?;
    context.out.show(&get_json(&report), || {
        let how = report.transport.map_or_else(String::new, |transport| format!(", {transport}"));
        format!(
            "{identity} is in {}: {} files, {} in {:.2} s ({}{how}), {} from memory and {} from disk",
            args.to.display(),
            report.files.len(),
            bytes(report.bytes),
            report.elapsed.as_secs_f64(),
            speed(report.bytes, report.elapsed),
            bytes(report.hot_bytes),
            bytes(report.cold_bytes)
        )
    });
    Ok(())
}

fn get_json(report: &GetReport) -> Value {
    json!({
        "identity": report.revision.identity,
        "bytes": report.bytes,
        "hot_bytes": report.hot_bytes,
        "cold_bytes": report.cold_bytes,
        "seconds": report.elapsed.as_secs_f64(),
        "tensors": report.manifest.tensors().len(),
        "files": report.files,
        "transport": report.transport.map(|transport| transport.to_string()),
        "why_not_rdma": report.why_not_rdma,
    })
}

/// One digest over every tensor's bytes, in the manifest's order.
fn digest(opened: &OpenRevision) -> Digest {
    let names = opened.manifest().tensors().iter().map(|tensor| tensor.tensor_id.as_str());
    ballast_schemas::hash_list(names.filter_map(|name| opened.tensor(name)).map(|view| view.bytes))
}

/// Whether a command can be found, asked before anything is leased and mapped for it.
fn check_program(run: &[String]) -> Result<(), BallastError> {
    let Some(program) = run.first() else { return Ok(()) };
    let is_program = |path: &Path| {
        path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    let found = match program.contains('/') {
        true => is_program(Path::new(program)),
        false => std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|folder| is_program(&folder.join(program)))),
    };
    match found {
        true => Ok(()),
        false => Err(BallastError::invalid(format!(
            "{program} can not be run: there is no such program; nothing was opened"
        ))),
    }
}

pub async fn open(context: &Context, args: OpenArgs) -> Result<(), BallastError> {
    check_program(&args.run)?;
    let identity = resolve(&context.store, &args.name.text).await?;
    let started = std::time::Instant::now();
    let options = GetOptions { progress: shown_progress(context.out, "open"), ..GetOptions::default() };
    // Listened to from before the lease is taken, so that no Ctrl-C leaves it to run out by itself.
    let mut interrupt = signal(SignalKind::interrupt())
        .map_err(|error| BallastError::invalid(format!("Ctrl-C can not be listened to: {error}")))?;
    let opened = tokio::select! {
        opened = OpenRevision::open(&context.store, &identity, options) => opened?,
        _ = interrupt.recv() => {
            context.gateway.settle(SETTLE_PATIENCE).await;
            std::process::exit(INTERRUPTED);
        }
    };
    let (mapped, total) = (opened.mapped_bytes(), opened.manifest().logical_bytes());
    let tensors = opened.manifest().tensors().len();
    let seconds = started.elapsed().as_secs_f64();
    let before = args.check.then(|| digest(&opened));
    let state =
        json!({"open": identity, "tensors": tensors, "mapped_bytes": mapped, "bytes": total, "seconds": seconds});
    context.out.show(&state, || {
        format!(
            "open: {identity}, {tensors} tensors, {} of {} mapped without a copy, {seconds:.3} s",
            bytes(mapped),
            bytes(total)
        )
    });
    let ended = hold(&args.run, &mut interrupt).await?;
    let lapsed = opened.lease_lapsed();
    let intact = before.map(|before| before == digest(&opened));
    let released = opened.close().await;
    let result = json!({"closed": identity, "lease_lapsed": lapsed || released.is_err(), "intact": intact});
    context.out.show(&result, || {
        let intact = match intact {
            Some(true) => ", every tensor is as it was",
            Some(false) => ", TENSORS CHANGED",
            None => "",
        };
        format!("closed: {identity}{}{intact}", if lapsed { ", the lease had lapsed" } else { "" })
    });
    if intact == Some(false) {
        return Err(BallastError::new(
            ErrorCode::ChecksumMismatch,
            format!("tensors of {identity} changed while they were open"),
        ));
    }
    released?;
    match ended.and_then(|status| status.code()) {
        Some(code) if code != 0 => std::process::exit(code),
        _ => Ok(()),
    }
}

/// Runs the command to its end, or waits for the end of standard input or Ctrl-C.
async fn hold(run: &[String], interrupt: &mut Signal) -> Result<Option<ExitStatus>, BallastError> {
    let Some((program, arguments)) = run.split_first() else {
        let mut input = tokio::io::stdin();
        let mut buffer = [0; 4096];
        loop {
            tokio::select! {
                read = input.read(&mut buffer) => if !matches!(read, Ok(count) if count > 0) { return Ok(None) },
                _ = interrupt.recv() => return Ok(None),
            }
        }
    };
    let failed = |error: std::io::Error| BallastError::invalid(format!("{program} can not be run: {error}"));
    let mut child = tokio::process::Command::new(program).args(arguments).spawn().map_err(failed)?;
    tokio::select! {
        status = child.wait() => status.map(Some).map_err(failed),
        // The child gets the terminal's Ctrl-C too and ends by itself.
        _ = interrupt.recv() => child.wait().await.map(Some).map_err(failed),
    }
}
