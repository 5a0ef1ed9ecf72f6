//! How results reach people and programs: tables, JSON documents, sizes, errors with exit codes, progress bars.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

pub use ballast_schemas::human_bytes as bytes;
use ballast_schemas::{
    BallastError, ImportView, PartState, PartView, RevisionView, WeightOperation, WeightRevisionMetadata, human_ms,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::args::Format;

/// Where results go and how.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// Table or JSON.
    pub format: Format,
    /// Show progress even without a terminal.
    pub progress: bool,
}

/// Prints one line. A reader that has gone away (`| head`) ends the program quietly, as a signal would.
pub fn print_line(text: &str) {
    let mut stdout = std::io::stdout().lock();
    if writeln!(stdout, "{text}").and_then(|()| stdout.flush()).is_err() {
        std::process::exit(141);
    }
}

/// Work shorter than this shows no progress bar.
const PROGRESS_AFTER: Duration = Duration::from_millis(500);

impl Output {
    /// Prints a result: `value` as JSON, or the text that `table` makes.
    pub fn show<T: Serialize>(&self, value: &T, table: impl FnOnce() -> String) {
        match self.format {
            Format::Json => print_line(&serde_json::to_string(value).unwrap_or_else(|error| error.to_string())),
            Format::Table => print_line(table().trim_end()),
        }
    }

    /// A remark for people that is no result.
    pub fn note(&self, text: &str) {
        if self.format == Format::Table {
            eprintln!("{text}");
        }
    }

    /// A bar over `total` bytes that appears once the work has taken half a second.
    #[must_use]
    pub fn bytes_bar(&self, what: &str) -> Bar {
        let visible = self.progress || (self.format == Format::Table && std::io::stderr().is_terminal());
        Bar { what: what.to_owned(), visible, started: Instant::now(), bar: None }
    }
}

/// A progress bar with bytes and GB/s.
#[derive(Debug)]
pub struct Bar {
    what: String,
    visible: bool,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl Bar {
    /// Where the work stands, in bytes.
    pub fn set(&mut self, done: u64, total: u64) {
        if !self.visible || self.started.elapsed() < PROGRESS_AFTER {
            return;
        }
        let what = &self.what;
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let style =
                ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes}  {binary_bytes_per_sec}  {eta}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message(what.clone());
            bar
        });
        bar.set_length(total);
        bar.set_position(done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// `1.25 GB/s`.
#[must_use]
pub fn speed(count: u64, elapsed: Duration) -> String {
    #[expect(clippy::cast_precision_loss, reason = "shown with two decimals")]
    let per_second = count as f64 / elapsed.as_secs_f64().max(1e-9);
    format!("{:.2} GB/s", per_second / 1e9)
}

/// `49.8 %`.
#[must_use]
pub fn percent(ppm: u32) -> String {
    format!("{:.1} %", f64::from(ppm) / 1e4)
}

/// Aligned columns under a header.
#[must_use]
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut row = String::new();
        for (cell, width) in cells.zip(&widths) {
            let _ = write!(row, "{cell:width$}  ");
        }
        text.push_str(row.trim_end());
        text.push('\n');
    };
    line(&mut header.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    text
}

/// The rows of `ballast ls`.
#[must_use]
pub fn revision_row(revision: &WeightRevisionMetadata) -> Vec<String> {
    vec![
        revision.identity.to_string(),
        revision.availability.to_string(),
        revision.residency.to_string(),
        percent(revision.observed_hot_ppm),
        revision.manifest.as_ref().map_or_else(|| "-".into(), |manifest| bytes(manifest.logical_bytes)),
        policy_text(revision),
        revision.operation_id.as_ref().map_or_else(|| "-".into(), ToString::to_string),
    ]
}

/// The header of [`revision_row`].
pub const REVISION_HEADER: &[&str] = &["REVISION", "AVAILABILITY", "RESIDENCY", "HOT", "SIZE", "POLICY", "OPERATION"];

fn policy_text(revision: &WeightRevisionMetadata) -> String {
    let policy = &revision.policy;
    match policy.preferred_residency {
        ballast_schemas::Residency::Mixed => {
            format!(
                "{} {} {}",
                policy.preferred_residency,
                percent(policy.mixed_hot_ratio.ppm()),
                policy.migration_mode
            )
        }
        preferred => format!("{preferred} {}", policy.migration_mode),
    }
}

/// `ballast show`.
#[must_use]
pub fn revision_text(view: &RevisionView) -> String {
    let revision = &view.metadata;
    let mut rows: Vec<(&str, String)> = vec![
        ("revision", revision.identity.to_string()),
        ("availability", format!("{}{}", revision.availability, if revision.retired { " (retired)" } else { "" })),
        ("residency", format!("{}, {} hot", revision.residency, percent(revision.observed_hot_ppm))),
        ("policy", policy_text(revision)),
        ("metadata generation", revision.metadata_generation.to_string()),
        ("watermark", view.watermark.to_string()),
    ];
    if let Some(manifest) = &revision.manifest {
        rows.push(("size", format!("{} in {} units", bytes(manifest.logical_bytes), manifest.affinity_count)));
        rows.push(("manifest", manifest.sha256.to_string()));
    }
    if let Some(operation) = &revision.operation_id {
        rows.push(("operation", operation.to_string()));
    }
    rows.push((
        "leases",
        match view.nearest_lease_expiry_ms {
            Some(ms) => format!("{}, the first ends in {}", view.active_lease_count, human_ms(ms)),
            None => view.active_lease_count.to_string(),
        },
    ));
    let nodes: Vec<&str> = revision.placement.iter().map(ballast_schemas::NodeId::as_str).collect();
    rows.push(("placed on", nodes.join(", ")));
    rows.push(("created", time(revision.created_unix_ms)));
    rows.push(("updated", time(revision.updated_unix_ms)));
    rows.extend(view.import.iter().flat_map(import_rows));
    rows.iter().map(|(name, value)| format!("{name:20}{value}\n")).collect()
}

/// Of an import by several writers: who is done, and of each one that is not, how far it is. Those that never came stand first.
fn import_rows(import: &ImportView) -> Vec<(&'static str, String)> {
    let (done, mut left): (Vec<&PartView>, Vec<&PartView>) =
        import.participants.iter().partition(|part| part.state == PartState::Done);
    left.sort_by_key(|part| (part.state, std::cmp::Reverse(part.silent_ms)));
    let count = import.participants.len();
    let mut rows = vec![
        ("session", format!("{}, ends in {} unless renewed", import.session_id, human_ms(import.ends_in_ms))),
        (
            "finished",
            format!("{} of {count}{}", done.len(), if left.is_empty() { ", the commit is to come" } else { "" }),
        ),
    ];
    if !done.is_empty() {
        let names: Vec<&str> = done.iter().map(|part| part.participant.as_str()).collect();
        rows.push(("", names.join(", ")));
    }
    let describe = |part: &&PartView| match part.state {
        PartState::Declared => format!("{} has not joined", part.participant),
        _ => format!("{} is writing, last heard of {} ago", part.participant, human_ms(part.silent_ms)),
    };
    rows.extend(left.iter().enumerate().map(|(at, part)| (if at == 0 { "missing" } else { "" }, describe(part))));
    rows
}

/// The rows of `ballast op`.
#[must_use]
pub fn operation_row(operation: &WeightOperation) -> Vec<String> {
    let target = operation.target.map_or_else(|| "-".into(), |target| target.to_string());
    vec![
        operation.operation_id.to_string(),
        operation.kind.to_string(),
        target,
        status_text(operation),
        format!("{}/{}", operation.processed_units, operation.total_units),
        bytes(operation.processed_bytes),
        operation.identity.to_string(),
    ]
}

/// The header of [`operation_row`].
pub const OPERATION_HEADER: &[&str] = &["OPERATION", "KIND", "TARGET", "STATUS", "UNITS", "BYTES", "REVISION"];

fn status_text(operation: &WeightOperation) -> String {
    match operation.park_reason {
        Some(reason) if operation.status == ballast_schemas::OperationStatus::Parked => format!("PARKED ({reason})"),
        _ => operation.status.to_string(),
    }
}

/// `ballast op ID`.
#[must_use]
pub fn operation_text(operation: &WeightOperation) -> String {
    let mut rows: Vec<(&str, String)> = vec![
        ("operation", operation.operation_id.to_string()),
        ("kind", operation.kind.to_string()),
        ("revision", operation.identity.to_string()),
        ("status", status_text(operation)),
    ];
    if let Some(target) = operation.target {
        let ratio =
            operation.target_hot_ratio.map_or_else(String::new, |ratio| format!(", {} hot", percent(ratio.ppm())));
        rows.push(("target", format!("{target}{ratio}")));
    }
    if let Some(trigger) = operation.trigger {
        rows.push(("started by", trigger.to_string()));
    }
    rows.push(("units", format!("{} of {}", operation.processed_units, operation.total_units)));
    rows.push(("bytes", format!("{} of {}", bytes(operation.processed_bytes), bytes(operation.total_bytes))));
    rows.push(("hot", percent(operation.observed_hot_ppm)));
    rows.push(("epoch", operation.epoch.to_string()));
    if let Some(worker) = &operation.worker {
        rows.push(("worker", worker.to_string()));
    }
    rows.push(("failed attempts", operation.attempts.to_string()));
    if let Some(error) = &operation.last_error {
        rows.push(("last error", format!("{}: {}", error.code, error.message)));
    }
    rows.push(("started", time(operation.started_unix_ms)));
    rows.push(("updated", time(operation.updated_unix_ms)));
    rows.iter().map(|(name, value)| format!("{name:20}{value}\n")).collect()
}

/// A wall-clock time in UTC.
#[must_use]
pub fn time(unix_ms: u64) -> String {
    let when = std::time::UNIX_EPOCH + Duration::from_millis(unix_ms);
    humantime::format_rfc3339_millis(when).to_string()
}

/// Prints an error where its reader looks for it and gives the exit code.
#[must_use]
pub fn fail(format: Format, error: &BallastError) -> i32 {
    if format == Format::Json {
        print_line(&error.to_body().to_string());
    }
    eprintln!("error: {}: {}", error.code, error.message);
    10 + i32::from(error.code.number())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        assert_eq!(bytes(12), "12 B");
        assert_eq!(bytes(90_868_376), "90.9 MB");
        assert_eq!(percent(498_123), "49.8 %");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let text = table(&["A", "B"], &[vec!["longer".into(), "x".into()]]);
        assert_eq!(text, "A       B\nlonger  x\n");
    }

    #[test]
    fn an_import_of_several_writers_names_who_is_done_and_each_one_that_is_missing() {
        let part = |name: &str, state, silent_ms| PartView {
            participant: ballast_schemas::ParticipantId::new(name).unwrap(),
            state,
            epoch: u64::from(state != PartState::Declared),
            silent_ms,
        };
        let mut import = ImportView {
            session_id: ballast_schemas::SessionId::new("step-7").unwrap(),
            epoch: 1,
            ends_in_ms: 30_000,
            participants: vec![
                part("rank0", PartState::Done, 9_000),
                part("rank1", PartState::Writing, 1_000),
                part("rank2", PartState::Declared, 9_000),
                part("rank3", PartState::Writing, 20_000),
            ],
        };
        let rows = |import: &ImportView| -> Vec<String> {
            import_rows(import).into_iter().map(|(name, value)| format!("{name}: {value}")).collect()
        };
        let expected = [
            "session: step-7, ends in 30.0 s unless renewed",
            "finished: 1 of 4",
            ": rank0",
            "missing: rank2 has not joined",
            ": rank3 is writing, last heard of 20.0 s ago",
            ": rank1 is writing, last heard of 1.0 s ago",
        ];
        assert_eq!(rows(&import), expected);
        import.participants.truncate(1);
        assert_eq!(rows(&import)[1], "finished: 1 of 1, the commit is to come");
    }
}
