//! `make sim`: runs seeds of the simulation, prints what each violation says, and leaves `target/sim/summary.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use ballast_tests::sim::{Bug, Options, run};
use clap::Parser;
use serde_json::json;

/// Simulates whole clusters under faults, one per seed.
#[derive(Debug, Parser)]
struct Arguments {
    /// How many seeds.
    #[arg(long, default_value_t = 200)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Run this seed alone and print every line of it.
    #[arg(long)]
    seed: Option<u64>,
    /// Make this mistake on purpose (`list` names them all).
    #[arg(long)]
    bug: Option<String>,
    /// Go on after a violation.
    #[arg(long)]
    keep_going: bool,
    /// Where the summary goes.
    #[arg(long, default_value = "target/sim/summary.json")]
    summary: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.bug.as_deref() == Some("list") {
        Bug::ALL.iter().for_each(|bug| println!("{bug}"));
        return ExitCode::SUCCESS;
    }
    let bug = match arguments.bug.as_deref().map(|name| Bug::from_name(name).ok_or(name)) {
        None => None,
        Some(Ok(bug)) => Some(bug),
        Some(Err(name)) => {
            eprintln!("sim: there is no planted bug {name:?}; --bug list names them");
            return ExitCode::from(2);
        }
    };
    let options = Options { bug, echo: arguments.seed.is_some() };
    let seeds = match arguments.seed {
        Some(seed) => seed..seed + 1,
        None => arguments.from..arguments.from.saturating_add(arguments.seeds),
    };
    let started = Instant::now();
    let (mut count, mut entries, mut simulated_ms) = (0_u64, 0_u64, 0_u64);
    let mut faults: BTreeMap<&str, u64> = BTreeMap::new();
    let mut violations = Vec::new();
    for seed in seeds {
        let result = run(seed, options);
        count += 1;
        entries += result.entries;
        simulated_ms += result.simulated_ms;
        result.faults.iter().for_each(|(kind, n)| *faults.entry(kind).or_default() += n);
        for violation in &result.violations {
            if !options.echo {
                println!("---- seed {seed}: the last lines");
                violation.last.iter().for_each(|line| println!("{line}"));
            }
            println!("seed {seed}: {}: {}", violation.invariant, violation.message);
            println!("again: cargo run --profile sim -p ballast-tests --bin sim -- --seed {seed}");
            violations.push(json!({
                "seed": violation.seed,
                "invariant": violation.invariant,
                "message": violation.message,
                "entries": violation.entries,
                "last": violation.last,
            }));
        }
        if !result.violations.is_empty() && !arguments.keep_going {
            break;
        }
        if options.echo {
            println!(
                "at rest after {} s; trace {} state {}",
                result.rested_after_ms / 1_000,
                result.trace,
                result.state
            );
        }
    }
    let summary = json!({ "seeds": count, "entries": entries, "faults": faults, "violations": violations });
    if let Err(error) = write(&arguments.summary, &summary) {
        eprintln!("sim: the summary {} was not written: {error}", arguments.summary.display());
        return ExitCode::FAILURE;
    }
    let struck: u64 = faults.values().sum();
    println!(
        "sim: {count} seeds, {entries} entries, {struck} faults of {} kinds, {} crashes, {} s simulated in {:.1} s: {}",
        faults.len(),
        ["crash", "death at a step"].iter().filter_map(|kind| faults.get(kind)).sum::<u64>(),
        simulated_ms / 1_000,
        started.elapsed().as_secs_f64(),
        if violations.is_empty() { "no violation".to_owned() } else { format!("{} VIOLATIONS", violations.len()) }
    );
    if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn write(path: &PathBuf, summary: &serde_json::Value) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, format!("{summary:#}\n"))
}
