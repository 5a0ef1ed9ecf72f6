//! `make bench`: measures every speed line, prints the table, and leaves `target/bench/summary.json`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ballast_tests::bench::{Options, Report, resident_of, run};
use clap::Parser;

/// As in the `ballast` program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures the engine's speed, each figure beside a limit or a rival of the same run.
#[derive(Debug, Parser)]
struct Arguments {
    /// How many runs the medians are of.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// How long a run takes of the lines that count what is done in a while.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Only the lines with this in their name: fold, lone, many, operations, restore, scale, reshard, delta.
    #[arg(long)]
    only: Option<String>,
    /// A Python that has DBOS; without it DBOS is left out.
    #[arg(long)]
    dbos: Option<PathBuf>,
    /// The script that measures DBOS.
    #[arg(long, default_value = "ops/bench_dbos.py")]
    dbos_script: PathBuf,
    /// Where the servers keep their files and the summary goes.
    #[arg(long, default_value = "target/bench")]
    folder: PathBuf,
    /// Sizes at which the figures mean nothing.
    #[arg(long)]
    short: bool,
    /// Only says by how many bytes this process grows with each state that it makes from this snapshot.
    #[arg(long, hide = true)]
    resident_of: Option<PathBuf>,
}

fn main() -> ExitCode {
    // The cluster that is measured is this program too: of the same build.
    if std::env::args().nth(1).is_some_and(|word| word == "ballast") {
        let code = ballast_cli::main(std::env::args_os().skip(1));
        return u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from);
    }
    measure(Arguments::parse())
}

#[tokio::main]
async fn measure(arguments: Arguments) -> ExitCode {
    if let Some(snapshot) = arguments.resident_of {
        return match resident_of(&snapshot) {
            Ok(grown) => {
                grown.iter().for_each(|bytes| println!("{bytes}"));
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("bench: {}: {error}", snapshot.display());
                ExitCode::FAILURE
            }
        };
    }
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => {
            eprintln!("bench: where this program is can not be found out: {error}");
            return ExitCode::FAILURE;
        }
    };
    let folder = arguments.folder.clone();
    let sized = match arguments.short {
        true => Options::short(program, folder),
        false => Options {
            runs: arguments.runs.max(1),
            run_time: Duration::from_secs_f64(arguments.seconds.clamp(0.1, 600.0)),
            ..Options::full(program, folder)
        },
    };
    let options =
        Options { dbos: arguments.dbos.map(|python| (python, arguments.dbos_script)), only: arguments.only, ..sized };
    println!("{}", Report::head());
    let report = match run(&options, |row| println!("{}", row.line())).await {
        Ok(report) => report,
        Err(error) => {
            eprintln!("bench: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("\n{}", report.conditions());
    let path = arguments.folder.join("summary.json");
    let written = serde_json::to_vec_pretty(&report).map_err(std::io::Error::other);
    match written.and_then(|bytes| std::fs::write(&path, bytes)) {
        Ok(()) => println!(
            "bench: {} of {} met; {}",
            report.rows.iter().filter(|row| row.met == Some(true)).count(),
            report.rows.iter().filter(|row| row.met.is_some()).count(),
            path.display()
        ),
        Err(error) => {
            eprintln!("bench: the summary {} was not written: {error}", path.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
