//! How fast the engine is, each figure beside a limit or a rival that was measured in the same run (`make bench`,
//! BENCHMARKS.md). A file per line; `world.rs` makes what they fold and send, `site.rs` a real server with a gateway.
//!
//! Nothing here asserts on time: the figures say whether a line is met.

mod cluster;
mod dbos;
mod delta;
mod fold;
mod lone;
mod many;
mod operations;
mod report;
mod reshard;
mod restore;
mod scale;
mod site;
mod world;

use std::path::PathBuf;
use std::time::Duration;

pub use report::{Report, Row};
pub use restore::resident_of;

/// Why a line has no figure.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Options {
    /// Each figure is the median of so many runs.
    pub runs: usize,
    /// How long a run of a line that counts what is done in a while takes.
    pub run_time: Duration,
    /// Commands of the log that is folded.
    pub fold_commands: usize,
    /// Mutations of one run that are measured one by one.
    pub lone_mutations: usize,
    /// Revisions of the snapshot that is restored.
    pub restore_revisions: usize,
    /// Revisions that a list page, a lease and a tick are measured among.
    pub few_revisions: usize,
    /// And again among so many.
    pub many_revisions: usize,
    /// The `bench` program, which measures its own memory and runs the cluster.
    pub program: PathBuf,
    /// Bytes of the model that is read in other shapes.
    pub model_bytes: u64,
    /// Tensors of the model that is planned for.
    pub planned_tensors: usize,
    /// Bytes of the model that a delta changes.
    pub delta_bytes: u64,
    /// Where the server keeps its log; it must be a disk for a sync to mean anything.
    pub folder: PathBuf,
    /// A Python with DBOS, and the script that measures it.
    pub dbos: Option<(PathBuf, PathBuf)>,
    /// Only the lines whose name contains this.
    pub only: Option<String>,
}

impl Options {
    /// What `make bench` measures.
    pub fn full(program: PathBuf, folder: PathBuf) -> Self {
        Self {
            runs: 5,
            run_time: Duration::from_secs(3),
            fold_commands: 500_000,
            lone_mutations: 300,
            restore_revisions: 100_000,
            few_revisions: 1_000,
            many_revisions: 1_000_000,
            model_bytes: 1 << 30,
            planned_tensors: 100_000,
            delta_bytes: 1 << 30,
            program,
            folder,
            dbos: None,
            only: None,
        }
    }

    /// Sizes at which the figures mean nothing: that there are figures is all that this shows.
    pub fn short(program: PathBuf, folder: PathBuf) -> Self {
        Self {
            runs: 1,
            run_time: Duration::from_millis(200),
            fold_commands: 4_000,
            lone_mutations: 5,
            restore_revisions: 100,
            few_revisions: 100,
            many_revisions: 400,
            model_bytes: 64 << 20,
            planned_tensors: 200,
            delta_bytes: 4 << 20,
            ..Self::full(program, folder)
        }
    }
}

/// Lines, in the order they are measured; each gives one or more rows.
pub const LINES: [&str; 8] = ["fold", "lone", "many", "operations", "restore", "scale", "reshard", "delta"];

/// Measures every line that the options ask for; `tell` hears of each row at once.
///
/// # Errors
/// When a line could not be measured at all. That a goal is not met is no error.
pub async fn run(options: &Options, mut tell: impl FnMut(&Row)) -> Result<Report, Error> {
    std::fs::create_dir_all(&options.folder)?;
    let mut report = Report::new();
    for line in LINES {
        if options.only.as_deref().is_some_and(|only| !line.contains(only)) {
            continue;
        }
        let rows = match line {
            "delta" => delta::measure(options).await?,
            "fold" => fold::measure(options)?,
            "lone" => lone::measure(options).await?,
            "many" => many::measure(options).await?,
            "operations" => operations::measure(options, &mut report.notes).await?,
            "restore" => restore::measure(options).await?,
            "scale" => scale::measure(options)?,
            _ => reshard::measure(options).await?,
        };
        rows.iter().for_each(&mut tell);
        report.rows.extend(rows);
    }
    Ok(report)
}
