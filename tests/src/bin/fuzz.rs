//! `make fuzz`: feeds every target for a share of the time, each in a process of its own with a bound on its memory, and writes
//! each input that breaks something to `target/fuzz/`. `--input FILE` feeds one file again (to the target that its name
//! begins with, or to all).

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_tests::fuzz::{Fuzzer, INPUT_SECONDS_MAX, MEMORY_BYTES_MAX, Target};
use clap::Parser;
use rustix::process::{Resource, Rlimit, setrlimit};

/// Feeds decoders and the fold with damaged and arbitrary input.
#[derive(Debug, Parser)]
struct Arguments {
    /// How long in all.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Where the stream of inputs begins.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this target.
    #[arg(long)]
    target: Option<String>,
    /// Feed this file.
    #[arg(long)]
    input: Option<PathBuf>,
    /// Where failing inputs go.
    #[arg(long, default_value = "target/fuzz")]
    folder: PathBuf,
    /// Be the process that feeds one target.
    #[arg(long, hide = true)]
    child: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let fuzzer = Fuzzer::new();
    let chosen: Vec<&Target> = fuzzer.targets.iter().filter(|target| is_chosen(target, &arguments)).collect();
    if chosen.is_empty() {
        eprintln!(
            "fuzz: no such target; there are {:?}",
            fuzzer.targets.iter().map(|target| target.name).collect::<Vec<_>>()
        );
        return ExitCode::from(2);
    }
    let done = match (&arguments.input, arguments.child) {
        (Some(path), _) => replay(&chosen, path),
        (None, true) => feed(&fuzzer, chosen[0], &arguments),
        (None, false) => supervise(&fuzzer, &chosen, &arguments),
    };
    done.unwrap_or_else(|error| {
        eprintln!("fuzz: {error}");
        ExitCode::from(2)
    })
}

fn is_chosen(target: &Target, arguments: &Arguments) -> bool {
    let file =
        arguments.input.as_ref().and_then(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned());
    match (&arguments.target, file.as_deref().and_then(|name| name.split_once('-'))) {
        (Some(name), _) => name == target.name,
        (None, Some((name, _))) => name == target.name,
        (None, None) => true,
    }
}

fn replay(targets: &[&Target], path: &Path) -> std::io::Result<ExitCode> {
    let input = std::fs::read(path)?;
    bound_memory()?;
    for target in targets {
        println!("{}: {}", target.name, if target.feed(&input) { "accepted" } else { "refused" });
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a child for each target and says which input killed it.
fn supervise(fuzzer: &Fuzzer, targets: &[&Target], arguments: &Arguments) -> std::io::Result<ExitCode> {
    std::fs::create_dir_all(&arguments.folder)?;
    let share = (arguments.seconds / targets.len() as u64).max(1);
    let mut failures = 0;
    for target in targets {
        let status = Command::new(std::env::current_exe()?)
            .args([
                "--child",
                "--target",
                target.name,
                "--seconds",
                &share.to_string(),
                "--seed",
                &arguments.seed.to_string(),
                "--folder",
            ])
            .arg(&arguments.folder)
            .status()?;
        if !status.success() {
            failures += 1;
            let number = last_number(&number_file(&arguments.folder, target))?;
            let path = arguments.folder.join(format!("{}-{}-{number}.input", target.name, arguments.seed));
            std::fs::write(&path, fuzzer.input(target, arguments.seed, number))?;
            println!(
                "{}: FAILED ({status}) at input {number} of seed {}: make fuzz INPUT={}",
                target.name,
                arguments.seed,
                path.display()
            );
        }
    }
    println!("{} targets, {failures} failed; by mutation of real encodings, not guided by coverage", targets.len());
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn number_file(folder: &Path, target: &Target) -> PathBuf {
    folder.join(format!("{}.number", target.name))
}

fn last_number(path: &Path) -> std::io::Result<u64> {
    let bytes = std::fs::read(path)?;
    let number = bytes.try_into().map_err(|_| std::io::Error::other(format!("{} is not 8 bytes", path.display())))?;
    Ok(u64::from_le_bytes(number))
}

/// Feeds one target until the time is over. Whatever breaks ends this process; the number of the input is in a file by then.
fn feed(fuzzer: &Fuzzer, target: &Target, arguments: &Arguments) -> std::io::Result<ExitCode> {
    let numbers = std::fs::File::create(number_file(&arguments.folder, target))?;
    bound_memory()?;
    let count = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&count));
    let (end, mut accepted) = (Instant::now() + Duration::from_secs(arguments.seconds), 0u64);
    while Instant::now() < end {
        let number = count.load(Ordering::Relaxed);
        numbers.write_all_at(&number.to_le_bytes(), 0)?;
        accepted += u64::from(target.feed(&fuzzer.input(target, arguments.seed, number)));
        count.fetch_add(1, Ordering::Relaxed);
    }
    println!("{}: {} inputs, {accepted} accepted", target.name, count.load(Ordering::Relaxed));
    Ok(ExitCode::SUCCESS)
}

/// Ends the process when one input takes too long.
fn watch(count: Arc<AtomicU64>) {
    std::thread::spawn(move || {
        let mut seen = u64::MAX;
        loop {
            let now = count.load(Ordering::Relaxed);
            if now == seen {
                eprintln!("fuzz: input {now} takes longer than {INPUT_SECONDS_MAX} s");
                std::process::abort();
            }
            seen = now;
            std::thread::sleep(Duration::from_secs(INPUT_SECONDS_MAX));
        }
    });
}

fn bound_memory() -> std::io::Result<()> {
    let bound = Some(MEMORY_BYTES_MAX);
    Ok(setrlimit(Resource::As, Rlimit { current: bound, maximum: bound })?)
}
