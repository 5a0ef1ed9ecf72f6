//! A replica that starts from a snapshot in the server's store, and the memory that a revision at rest takes.

use std::sync::Arc;
use std::time::Instant;

use ballast_journal::{
    JetStreamLog, JetStreamSnapshots, Log, Replica, ReplicaOptions, SnapshotStore, decode_snapshot, encode_snapshot,
};
use ballast_schemas::MigrationMode;
use ballast_workflows::State;

use super::report::{Row, Runs, on_core, resident_bytes, shown};
use super::site::Site;
use super::world::{Entry, World};
use super::{Error, Options};

const RESTORE_SECONDS: f64 = 2.0;
const REVISION_BYTES: f64 = 2048.0;

pub(super) async fn measure(options: &Options) -> Result<Vec<Row>, Error> {
    let (mut world, first) = World::new()?;
    let mut log_entries = vec![first];
    world.publish(options.restore_revisions, 4, MigrationMode::Auto, |entry| log_entries.push(entry))?;
    log_entries.extend(world.come_to_rest()?);
    let memory = memory(options, &world.state)?;
    let restore = restore(options, &world.state, log_entries).await?;
    Ok(vec![restore, memory])
}

async fn restore(options: &Options, state: &State, log_entries: Vec<Entry>) -> Result<Row, Error> {
    let site = Site::start(options).await?;
    let snapshots = Arc::new(JetStreamSnapshots::new(&site.streams));
    let log = Arc::new(JetStreamLog::new(&site.streams));
    for entry in log_entries {
        log.append(entry.envelope.id(), entry.bytes.into(), None).await?;
    }
    let (name, bytes) = encode_snapshot(state)?;
    snapshots.put(name.clone(), bytes.clone()).await?;
    let (mut seconds, mut decoding) = (Vec::new(), Vec::new());
    for _ in 0..options.runs {
        let started = Instant::now();
        let options_of_one = ReplicaOptions { create: None, ..site.replica_options() };
        let restored = Replica::start(log.clone(), Some(snapshots.clone()), options_of_one);
        let restored = restored.await?;
        seconds.push(started.elapsed().as_secs_f64());
        let same = restored.read(|state| state.revisions().count() == options.restore_revisions);
        assert!(same, "what was restored is what was written");
        drop(restored);
        let before = on_core();
        drop(decode_snapshot(&name, &bytes)?);
        decoding.push((on_core() - before).as_secs_f64());
    }
    let decoding = Runs::new(decoding).median();
    Ok(Row::cost("restore of a snapshot", "s", &Runs::new(seconds), RESTORE_SECONDS).under(format!(
        "{} revisions, {} bytes, read from the server's object store and checked; {} s of it for checksum, decoding, index, digest and every invariant",
        options.restore_revisions,
        bytes.len(),
        shown(decoding)
    )))
}

/// Resident bytes before and after a state is made from a snapshot's records, as a replica that started holds it.
fn memory(options: &Options, state: &State) -> Result<Row, Error> {
    let mut per_revision = Vec::new();
    let (name, bytes) = encode_snapshot(state)?;
    let mut kept = Vec::new();
    for _ in 0..options.runs.min(3) {
        let before = resident_bytes();
        // Kept, so that the next one does not find its memory again.
        kept.push(decode_snapshot(&name, &bytes)?);
        per_revision.push(resident_bytes().saturating_sub(before) as f64 / options.restore_revisions as f64);
    }
    drop(kept);
    Ok(Row::cost("memory of a revision at rest", "B", &Runs::new(per_revision), REVISION_BYTES)
        .under(format!("resident memory of {} restored revisions, with every index", options.restore_revisions)))
}
