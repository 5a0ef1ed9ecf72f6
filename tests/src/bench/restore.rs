//! A replica that starts from a snapshot in the server's store, and the memory that a revision at rest takes.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use ballast_journal::{
    JetStreamLog, JetStreamSnapshots, Log, Replica, ReplicaOptions, SnapshotName, SnapshotStore, decode_snapshot,
    encode_snapshot,
};
use ballast_schemas::MigrationMode;
use ballast_workflows::State;

use super::report::{Row, Runs, on_core, resident_bytes, shown};
use super::site::Site;
use super::world::{Entry, World};
use super::{Error, Options};

const RESTORE_SECONDS: f64 = 2.0;
const REVISION_BYTES: f64 = 2048.0;
/// States that the memory of a revision is measured with.
const STATES: usize = 3;

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

/// Resident bytes before and after a state is made from a snapshot's records, as a replica that started holds it. In a process
/// of its own: memory that was used before and is free would be used again, and seem to cost nothing.
fn memory(options: &Options, state: &State) -> Result<Row, Error> {
    let (name, bytes) = encode_snapshot(state)?;
    let file = options.folder.join(name.to_string());
    std::fs::write(&file, bytes)?;
    let output = Command::new(&options.program).arg("--resident-of").arg(&file).output()?;
    std::fs::remove_file(&file)?;
    let said = String::from_utf8_lossy(&output.stdout);
    let grown = said.lines().map(str::parse).collect::<Result<Vec<f64>, _>>();
    let grown = grown.ok().filter(|grown| output.status.success() && !grown.is_empty());
    let Some(grown) = grown else {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} measured nothing: {said}{errors}", options.program.display()).into());
    };
    let per_revision = grown.into_iter().map(|bytes| bytes / options.restore_revisions as f64).collect();
    Ok(Row::cost("memory of a revision at rest", "B", &Runs::new(per_revision), REVISION_BYTES).under(format!(
        "resident memory of {} restored revisions, with every index; in a process that does nothing else",
        options.restore_revisions
    )))
}

/// By how much the memory of this process grows with every state that it makes from the snapshot in `file` and keeps.
///
/// # Errors
/// When the file is not a snapshot.
pub fn resident_of(file: &Path) -> Result<Vec<u64>, Error> {
    let name: SnapshotName = file.file_name().and_then(|name| name.to_str()).unwrap_or_default().parse()?;
    let bytes = std::fs::read(file)?;
    // The first one leaves what decoding needed for a while, and the others find that again.
    let mut kept = vec![decode_snapshot(&name, &bytes)?];
    let mut grown = Vec::new();
    for _ in 0..STATES {
        let before = resident_bytes();
        kept.push(decode_snapshot(&name, &bytes)?);
        grown.push(resident_bytes().saturating_sub(before));
    }
    Ok(grown)
}
