//! `ballast op history`: the life of one operation, read from the log.

use ballast_journal::{Decided, History, HistoryEntry};
use ballast_schemas::{
    BallastError, Command, ErrorCode, EventBody, OperationId, OperationStatus, Reply, WeightOperation,
};
use serde::Serialize;

use super::past::{self, failed};
use crate::output::{Output, bytes, percent, table, time};

/// Everything the log still says of an operation.
#[derive(Serialize)]
struct Life {
    operation_id: OperationId,
    /// Whether the log still holds its beginning.
    complete: bool,
    steps: Vec<Step>,
}

/// One change of an operation, or a command about it that was refused.
#[derive(Serialize)]
struct Step {
    seq: u64,
    index: u32,
    unix_ms: u64,
    log_clock_ms: u64,
    /// The command's kind; `time` when no command did it.
    by: String,
    command_id: Option<String>,
    change: &'static str,
    text: String,
    /// The operation afterwards.
    operation: Option<WeightOperation>,
}

pub async fn history(history: &History, id: &str, out: Output) -> Result<(), BallastError> {
    let id = super::operations::operation_id(id)?;
    let begun = id.as_str().strip_prefix("op-").and_then(|rest| rest.split('.').next()?.parse::<u64>().ok());
    let begun =
        begun.ok_or_else(|| BallastError::invalid(format!("{id} is no operation's id; it is op-<entry>.<n>")))?;
    let bounds = history.bounds().await.map_err(failed)?;
    let unknown = || {
        let message = format!("the log knows no operation {id}; `ballast op --all` shows those there are");
        BallastError::new(ErrorCode::NotFound, message)
    };
    if begun > bounds.last_seq {
        return Err(unknown());
    }
    let mut walk = history.walk(begun).await.map_err(failed)?;
    past::remarks(&walk, Some(begun), out);
    let Some(state) = walk.state() else {
        let message = format!("the history of {id} can not be known: no snapshot stands before the log's oldest entry");
        return Err(BallastError::new(ErrorCode::NotReady, message));
    };
    let mut seen = state.operation(&id).cloned();
    let mut life = Life { operation_id: id.clone(), complete: walk.from() == begun, steps: Vec::new() };
    let mut at = walk.from() - 1;
    while at < bounds.last_seq && seen.as_ref().is_none_or(|seen| !seen.status.is_terminal()) {
        let entry = walk.next().await.map_err(failed)?;
        at = entry.seq;
        life.steps.extend(steps(&entry, &id, &mut seen));
        if at == begun && seen.is_none() {
            return Err(unknown());
        }
    }
    if seen.is_none() {
        return Err(unknown());
    }
    out.show(&life, || text(&life));
    Ok(())
}

fn text(life: &Life) -> String {
    let rows: Vec<Vec<String>> = life
        .steps
        .iter()
        .map(|step| {
            let at = format!("{}.{}", step.seq, step.index);
            vec![
                time(step.unix_ms),
                format!("{} ms", step.log_clock_ms),
                at,
                step.by.clone(),
                step.change.to_owned(),
                step.text.clone(),
            ]
        })
        .collect();
    table(&["TIME", "LOG CLOCK", "ENTRY", "BY", "CHANGE", "WHAT"], &rows)
}

/// What an entry did to the operation, in order.
fn steps(entry: &HistoryEntry, id: &OperationId, seen: &mut Option<WeightOperation>) -> Vec<Step> {
    let Some(Decided { log_clock, outcomes, events }) = &entry.decided else { return Vec::new() };
    let mut steps = Vec::new();
    for ((index, record), outcome) in (0_u32..).zip(entry.envelope.commands()).zip(outcomes) {
        let step = |by: String, change, text, operation| Step {
            seq: entry.seq,
            index,
            unix_ms: entry.unix_ms,
            log_clock_ms: log_clock.0,
            command_id: (by != "time").then(|| record.id.to_string()),
            by,
            change,
            text,
            operation,
        };
        let told = events.iter().filter(|event| event.position.index == index).filter_map(|event| match &event.body {
            EventBody::OperationStarted { operation }
            | EventBody::OperationProgress { operation }
            | EventBody::OperationEnded { operation } => Some(&**operation),
            _ => None,
        });
        let answered = match &outcome {
            Ok(Reply::Operation(operation)) => Some(&**operation),
            _ => None,
        };
        for now in told.chain(answered).filter(|operation| operation.operation_id == *id) {
            if let Some((change, text)) = change(seen.as_ref(), now) {
                // What time ends is applied before the entry's first command; a tick is there for nothing else.
                let is_time = matches!(record.command, Command::Tick | Command::Barrier);
                let by = if is_time { "time".to_owned() } else { past::parts(&record.command).0 };
                steps.push(step(by, change, text, Some(now.clone())));
            }
            *seen = Some(now.clone());
        }
        if let (Err(rejection), true) = (outcome, record.command.operation() == Some(id)) {
            let text = format!("{}: {}", rejection.code, rejection.message);
            steps.push(step(past::parts(&record.command).0, "REFUSED", text, None));
        }
    }
    steps
}

/// What changed, if a person wants to know of it.
fn change(before: Option<&WeightOperation>, now: &WeightOperation) -> Option<(&'static str, String)> {
    let Some(before) = before else { return Some(("CREATED", created(now))) };
    let progress = || {
        format!(
            "cursor {} to {}, {}/{} units, {} of {}, {} hot",
            before.cursor,
            now.cursor,
            now.processed_units,
            now.total_units,
            bytes(now.processed_bytes),
            bytes(now.total_bytes),
            percent(now.observed_hot_ppm)
        )
    };
    let error =
        || now.last_error.as_ref().map_or_else(String::new, |error| format!("{}: {}", error.code, error.message));
    if now.status.is_terminal() {
        let reason = if now.status == OperationStatus::Failed { error() } else { now.note.clone().unwrap_or_default() };
        let reason = if reason.is_empty() { reason } else { format!(": {reason}") };
        let text = format!("{}, {}/{} units{reason}", now.status, now.processed_units, now.total_units);
        return (!before.status.is_terminal()).then_some(("ENDED", text));
    }
    if now.attempts > before.attempts {
        let again = now.wake_at.map_or_else(String::new, |at| format!("; again at {} ms", at.0));
        return Some(("FAILED", format!("attempt {}: {}{again}", now.attempts, error())));
    }
    if now.epoch > before.epoch {
        let worker = now.worker.as_ref().map_or_else(String::new, ToString::to_string);
        return Some(("CLAIMED", format!("worker {worker}, epoch {}", now.epoch)));
    }
    if now.status == OperationStatus::Parked && now.park_reason != before.park_reason {
        let reason = now.park_reason.map_or_else(String::new, |reason| reason.to_string());
        let until = now.wake_at.map_or_else(String::new, |at| format!(" (looks again at {} ms)", at.0));
        return Some(("PARKED", format!("waits: {reason}{until}")));
    }
    if now.release_outstanding && (!before.release_outstanding || now.fence != before.fence) {
        return Some(("AUTHORIZED", format!("may release memory, fence {}", now.fence)));
    }
    if now.cursor != before.cursor || now.processed_units != before.processed_units {
        return Some(("ADVANCED", progress()));
    }
    if now.ending != before.ending {
        return now.ending.map(|ending| ("ENDING", format!("ends as {ending} at its next step")));
    }
    match (before.status, now.status) {
        (was, is) if was == is => None,
        (_, OperationStatus::Paused) => Some(("PAUSED", String::new())),
        (OperationStatus::Claimed, OperationStatus::Runnable) => Some(("RUNNABLE", "the claim ended".to_owned())),
        (was, is) => Some(("RUNNABLE", format!("{was} to {is}"))),
    }
}

fn created(now: &WeightOperation) -> String {
    let target = now.target.map_or_else(String::new, |target| format!(" to {target}"));
    let trigger = now.trigger.map_or_else(String::new, |trigger| format!(", {trigger}"));
    let waits = now.park_reason.map_or_else(String::new, |reason| format!(", waits: {reason}"));
    format!("{} {}{target}{trigger}{waits}", now.kind, now.identity)
}
