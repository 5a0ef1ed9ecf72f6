//! The fold alone, on one core: what bounds a replica's restart and every other speed of the engine.

use std::time::{Duration, Instant};

use ballast_schemas::{Envelope, MigrationMode};
use ballast_workflows::{State, fold};

use super::report::{Row, Runs, on_core, shown};
use super::world::{
    Entry, LEASE_LIFE, OPERATION_LIFE, World, identity, next_target, node, of_a_lease, of_an_operation, start, uuid_of,
};
use super::{Error, Options};

const REVISIONS: usize = 1_000;
/// Readers and operations under way at once: each has one command in every envelope.
const READERS: usize = 300;
const OPERATIONS: usize = 200;
/// The log of a site that is busy for hours: 500 commands a second.
const BETWEEN_ENVELOPES_MS: u64 = 1_000;
const GOAL: f64 = 1_000_000.0;

pub(super) fn measure(options: &Options) -> Result<Vec<Row>, Error> {
    let mut world = World::with(REVISIONS, 4, MigrationMode::Manual)?;
    let before = world.state.clone();
    let entries = (0..options.fold_commands.div_ceil(READERS + OPERATIONS))
        .map(|round| world.append(BETWEEN_ENVELOPES_MS, commands(&world.state, round)).map(|(entry, _)| entry));
    let entries = entries.collect::<Result<Vec<Entry>, Error>>()?;
    let count: usize = entries.iter().map(|entry| entry.envelope.commands().len()).sum();
    let bytes: usize = entries.iter().map(|entry| entry.bytes.len()).sum();
    let (mut alone, mut decoding, mut wall) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.runs {
        let mut state = before.clone();
        let clock = Instant::now();
        alone.push(count as f64 / timed(|| fold_all(&mut state, &entries))?.as_secs_f64());
        wall.push(count as f64 / clock.elapsed().as_secs_f64());
        let mut state = before.clone();
        decoding.push(count as f64 / timed(|| decode_and_fold_all(&mut state, &entries))?.as_secs_f64());
        assert!(state.chain() == world.state.chain(), "every replica folds the same log into the same state");
    }
    let conditions = format!(
        "one thread, time on its core; {count} commands in envelopes of {}, {} bytes each, {READERS} readers and {OPERATIONS} operations at a time on {REVISIONS} revisions",
        READERS + OPERATIONS,
        bytes / count,
    );
    let by_the_wall = format!("by the wall clock {}/s", shown(Runs::new(wall).median()));
    let alone = Runs::new(alone);
    Ok(vec![
        Row::rate("fold of decoded envelopes", "/s", &alone, GOAL).under(format!("{conditions}; {by_the_wall}")),
        Row::rate("fold with checksum and decoding", "/s", &Runs::new(decoding), alone.median())
            .against("the fold alone")
            .explaining()
            .under(conditions),
    ])
}

/// One command of each reader and each operation. They began one after the other, so every envelope is a mix of all.
fn commands(state: &State, round: usize) -> Vec<ballast_schemas::Command> {
    let leases = (0..READERS).map(|reader| {
        let step = round + reader % LEASE_LIFE;
        let read = step / LEASE_LIFE;
        // A reader that is amid a lease when the log begins starts with its next one.
        let n = if round < LEASE_LIFE - reader % LEASE_LIFE { 0 } else { step };
        let revision = identity(OPERATIONS + (reader + read * 37) % (REVISIONS - OPERATIONS));
        of_a_lease(&revision, &uuid_of((reader * 1_000_000 + read) as u64), n)
    });
    let operations = (0..OPERATIONS).filter(|n| round >= n % OPERATION_LIFE).filter_map(|n| {
        let revision = identity(n);
        let metadata = state.revision(&revision)?;
        let operation = metadata.operation_id.as_ref().and_then(|id| state.operation(id));
        Some(match operation {
            Some(operation) => of_an_operation(operation, &node(n % 4)),
            None => start(&revision, next_target(metadata), metadata.metadata_generation),
        })
    });
    leases.chain(operations).collect()
}

fn timed(work: impl FnOnce() -> Result<(), Error>) -> Result<Duration, Error> {
    let before = on_core();
    work()?;
    Ok(on_core() - before)
}

fn fold_all(state: &mut State, entries: &[Entry]) -> Result<(), Error> {
    for Entry { seq, unix_ns, envelope, .. } in entries {
        fold(state, *seq, *unix_ns, envelope)?;
    }
    Ok(())
}

fn decode_and_fold_all(state: &mut State, entries: &[Entry]) -> Result<(), Error> {
    for Entry { seq, unix_ns, bytes, .. } in entries {
        fold(state, *seq, *unix_ns, &Envelope::decode(bytes)?)?;
    }
    Ok(())
}
