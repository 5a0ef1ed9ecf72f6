//! Reading units into a sink that takes pieces: files being exported, or buffers of our own. Several threads on the same
//! host, several connections over TCP; memory in use does not grow with the model.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ballast_schemas::frame::ReadRange;
use ballast_schemas::manifest::Manifest;
use ballast_schemas::{BallastError, ErrorCode};
use ballast_transfer::{MappedInstance, NodeConnection, RunningChecksum, checksum};

use crate::checksums::StopOnDrop;
use crate::get::Verify;
use crate::nodes::lanes;
use crate::progress::Meter;
use crate::reading::{Attempt, Failure, Holder, Reading, Rounds};

/// Bytes of one piece.
const PIECE_BYTES: u64 = 4 << 20;

/// Takes the bytes of units, in pieces; those of one unit in order. A unit that is begun again begins at 0.
pub(crate) trait UnitSink: Send + Sync + 'static {
    /// Takes a piece of a unit.
    fn put(&self, unit: u32, offset: u64, bytes: &[u8]) -> Result<(), BallastError>;
}

/// Keeps units in memory.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<HashMap<u32, Vec<u8>>>);

impl Kept {
    pub(crate) fn into_units(self) -> HashMap<u32, Vec<u8>> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnitSink for Kept {
    fn put(&self, unit: u32, offset: u64, bytes: &[u8]) -> Result<(), BallastError> {
        let mut units = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = units.entry(unit).or_default();
        kept.truncate(usize::try_from(offset).unwrap_or(usize::MAX));
        kept.extend_from_slice(bytes);
        Ok(())
    }
}

/// What every thread and connection of one fetch shares.
struct Job {
    manifest: Arc<Manifest>,
    sink: Arc<dyn UnitSink>,
    verify: Verify,
    meter: Meter,
}

impl Job {
    fn bytes_of(&self, unit: u32) -> u64 {
        self.manifest.units().get(unit as usize).map_or(0, |unit| unit.extent_bytes)
    }

    fn compare(&self, unit: u32, found: u64) -> Result<(), Failure> {
        compare(&self.manifest, unit, found).map_err(Failure::Unit)
    }

    fn put(&self, unit: u32, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.sink.put(unit, offset, bytes).map_err(Failure::Fatal)?;
        self.meter.add(bytes.len() as u64);
        Ok(())
    }
}

/// Compares a unit's checksum with the manifest's.
pub(crate) fn compare(manifest: &Manifest, unit: u32, found: u64) -> Result<(), BallastError> {
    let expected = manifest.units().get(unit as usize).map(|unit| unit.crc64);
    if expected == Some(found) {
        return Ok(());
    }
    let expected = expected.unwrap_or_default();
    let message = format!("unit {unit} arrived with checksum {found:016x}, expected {expected:016x}");
    Err(BallastError::new(ErrorCode::ChecksumMismatch, message))
}

/// Reads `units` into `sink`, from whichever replicas have them.
pub(crate) async fn fetch(
    reading: &mut Reading,
    units: &[u32],
    sink: Arc<dyn UnitSink>,
    verify: Verify,
    meter: &Meter,
) -> Result<Rounds, BallastError> {
    let mut rounds = Rounds::new(units.iter().copied());
    while !rounds.is_done() {
        for (holder, units) in rounds.shares(reading).await {
            let job = Arc::new(Job {
                manifest: reading.manifest().clone(),
                sink: sink.clone(),
                verify,
                meter: meter.clone(),
            });
            let (holdings, way) = (holder.holdings.clone(), holder.way());
            let attempt = match &holder.mapped {
                Some(mapped) => read_mapped(mapped, units, &job).await,
                None => read_remote(holder, units, &job).await,
            };
            rounds.note(reading, &holdings, way, attempt)?;
        }
        rounds.next(reading).await?;
    }
    Ok(rounds)
}

/// Copies units from mapped segments, on several threads.
async fn read_mapped(mapped: &Arc<MappedInstance>, units: Vec<u32>, job: &Arc<Job>) -> Attempt {
    let stop = StopOnDrop::default();
    let next = Arc::new(AtomicUsize::new(0));
    let lane_count = lanes().min(units.len());
    let units: Arc<[u32]> = units.into();
    let threads: Vec<_> = (0..lane_count)
        .map(|_| {
            let (mapped, units, job) = (mapped.clone(), units.clone(), job.clone());
            let (next, stop) = (next.clone(), stop.0.clone());
            tokio::task::spawn_blocking(move || {
                let mut attempt = Attempt::default();
                while let Some(&unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match copy_mapped(&mapped, unit, &job, &stop) {
                        Ok(()) => attempt.done.push(unit),
                        Err(failure) => {
                            let fatal = matches!(failure, Failure::Fatal(_));
                            attempt.failed.push((unit, failure));
                            if fatal {
                                stop.store(true, Ordering::Relaxed);
                                break;
                            }
                        }
                    }
                }
                attempt
            })
        })
        .collect();
    let mut all = Attempt::default();
    for thread in threads {
        match thread.await {
            Ok(attempt) => all.absorb(attempt),
            Err(error) => {
                let error = BallastError::new(ErrorCode::Unavailable, format!("a reading thread failed: {error}"));
                all.failed.push((0, Failure::Fatal(error)));
            }
        }
    }
    all
}

fn copy_mapped(mapped: &MappedInstance, unit: u32, job: &Job, stop: &AtomicBool) -> Result<(), Failure> {
    let wrong = |error: ballast_transfer::MapError| Failure::Unit(BallastError::new(error.code(), error.to_string()));
    let given_up = || Failure::Fatal(BallastError::new(ErrorCode::Unavailable, "given up"));
    let bytes = job.bytes_of(unit);
    if let Some(view) = mapped.view(unit) {
        if job.verify == Verify::Always {
            job.compare(unit, checksum(view))?;
        }
        if view.is_empty() {
            return job.put(unit, 0, view);
        }
        for (index, piece) in view.chunks(PIECE_BYTES as usize).enumerate() {
            if stop.load(Ordering::Relaxed) {
                return Err(given_up());
            }
            job.put(unit, index as u64 * PIECE_BYTES, piece)?;
        }
        return Ok(());
    }
    let mut running = RunningChecksum::default();
    let mut buffer = vec![0; bytes.min(PIECE_BYTES) as usize];
    let mut done = 0;
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(given_up());
        }
        let piece = &mut buffer[..(bytes - done).min(PIECE_BYTES) as usize];
        mapped.read_into(unit, done, piece).map_err(wrong).inspect_err(|_| job.meter.take_back(done))?;
        if job.verify != Verify::Never {
            running.update(piece);
        }
        job.put(unit, done, piece)?;
        done += piece.len() as u64;
        if done == bytes {
            break;
        }
    }
    if job.verify == Verify::Never {
        return Ok(());
    }
    job.compare(unit, running.value()).inspect_err(|_| job.meter.take_back(bytes))
}

/// Units that one connection reads in one go: several small ones, or a single one that may be large.
fn batches(units: Vec<u32>, job: &Job) -> VecDeque<Vec<u32>> {
    let mut batches: VecDeque<Vec<u32>> = VecDeque::new();
    let mut bytes = PIECE_BYTES;
    for unit in units {
        let size = job.bytes_of(unit);
        match batches.back_mut() {
            Some(batch) if bytes + size <= PIECE_BYTES => {
                batch.push(unit);
                bytes += size;
            }
            _ => {
                batches.push_back(vec![unit]);
                bytes = size;
            }
        }
    }
    batches
}

/// Reads units over several connections.
async fn read_remote(holder: Holder, units: Vec<u32>, job: &Arc<Job>) -> Attempt {
    let queue = Mutex::new(batches(units.clone(), job));
    let pop = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let lane_count = lanes().min(queue.lock().unwrap_or_else(PoisonError::into_inner).len());
    let mut connections = Vec::with_capacity(lane_count);
    while connections.len() + 1 < lane_count {
        match holder.again().await {
            Ok(connection) => connections.push(connection),
            // Fewer will do.
            Err(error) => {
                tracing::debug!(%error, "no further connection");
                break;
            }
        }
    }
    connections.push(holder.connection);
    let lanes = connections.into_iter().map(|mut connection| async move {
        let mut attempt = Attempt::default();
        while let Some(batch) = pop() {
            let sum: u64 = batch.iter().map(|unit| job.bytes_of(*unit)).sum();
            let read = match batch.as_slice() {
                [unit] if sum > PIECE_BYTES => {
                    read_large(&mut connection, *unit, job).await.map_err(|failure| vec![(*unit, failure)])
                }
                _ => read_small(&mut connection, &batch, job).await,
            };
            match read {
                Ok(()) => attempt.done.extend(batch),
                Err(failures) => {
                    let failed: Vec<u32> = failures.iter().map(|(unit, _)| *unit).collect();
                    attempt.done.extend(batch.into_iter().filter(|unit| !failed.contains(unit)));
                    // A connection that broke can not be used further, one on which a unit was wrong can.
                    let broken = failures.iter().any(|(_, failure)| !is_wrong_bytes(failure));
                    attempt.failed.extend(failures);
                    if broken {
                        break;
                    }
                }
            }
        }
        attempt.came_over(&connection);
        attempt
    });
    let mut all = Attempt::default();
    for attempt in futures::future::join_all(lanes).await {
        all.absorb(attempt);
    }
    all
}

fn is_wrong_bytes(failure: &Failure) -> bool {
    matches!(failure, Failure::Unit(error) if error.code == ErrorCode::ChecksumMismatch)
}

/// Several units that fit into one piece.
async fn read_small(connection: &mut NodeConnection, batch: &[u32], job: &Arc<Job>) -> Result<(), Vec<(u32, Failure)>> {
    let all = |failure: &dyn Fn() -> Failure| batch.iter().map(|unit| (*unit, failure())).collect::<Vec<_>>();
    let ranges: Vec<ReadRange> =
        batch.iter().map(|unit| ReadRange { unit: *unit, offset: 0, bytes: job.bytes_of(*unit) }).collect();
    let mut buffers: Vec<Vec<u8>> = ranges.iter().map(|range| vec![0; range.bytes as usize]).collect();
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    if let Err(error) = connection.read_ranges(&ranges, &mut slices).await {
        let error = BallastError::from(error);
        return Err(all(&|| Failure::Unit(error.clone())));
    }
    let (job, units) = (job.clone(), batch.to_vec());
    let written = tokio::task::spawn_blocking(move || {
        let mut failures = Vec::new();
        for (unit, bytes) in units.into_iter().zip(&buffers) {
            let right = if job.verify == Verify::Never { Ok(()) } else { job.compare(unit, checksum(bytes)) };
            if let Err(failure) = right.and_then(|()| job.put(unit, 0, bytes)) {
                failures.push((unit, failure));
            }
        }
        failures
    });
    match written.await {
        Ok(failures) if failures.is_empty() => Ok(()),
        Ok(failures) => Err(failures),
        Err(error) => Err(all(&|| Failure::Fatal(thread_failed(&error)))),
    }
}

fn thread_failed(error: &tokio::task::JoinError) -> BallastError {
    BallastError::new(ErrorCode::Unavailable, format!("a writing thread failed: {error}"))
}

/// One unit in pieces: while one is written, the next comes in.
async fn read_large(connection: &mut NodeConnection, unit: u32, job: &Arc<Job>) -> Result<(), Failure> {
    let bytes = job.bytes_of(unit);
    let mut running = RunningChecksum::default();
    let mut writing: Option<tokio::task::JoinHandle<Result<(), Failure>>> = None;
    let mut done = 0;
    let mut failure = None;
    while done < bytes && failure.is_none() {
        let mut buffer = vec![0; (bytes - done).min(PIECE_BYTES) as usize];
        let range = ReadRange { unit, offset: done, bytes: buffer.len() as u64 };
        let read = connection.read_ranges(&[range], &mut [buffer.as_mut_slice()]).await;
        failure = read.err().map(|error| Failure::Unit(error.into()));
        if let Some(before) = writing.take() {
            let written = before.await.unwrap_or_else(|error| Err(Failure::Fatal(thread_failed(&error))));
            failure = written.err().or(failure);
        }
        if failure.is_none() {
            if job.verify != Verify::Never {
                running.update(&buffer);
            }
            let (job, offset) = (job.clone(), done);
            done += buffer.len() as u64;
            writing = Some(tokio::task::spawn_blocking(move || job.put(unit, offset, &buffer)));
        }
    }
    if let Some(last) = writing {
        let written = last.await.unwrap_or_else(|error| Err(Failure::Fatal(thread_failed(&error))));
        failure = written.err().or(failure);
    }
    if failure.is_none() && job.verify != Verify::Never {
        failure = job.compare(unit, running.value()).err();
    }
    match failure {
        None => Ok(()),
        Some(failure) => {
            job.meter.take_back(done);
            Err(failure)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_that_is_begun_again_replaces_what_was_kept_of_it() {
        let kept = Kept::default();
        kept.put(3, 0, b"abcd").unwrap();
        kept.put(3, 4, b"ef").unwrap();
        kept.put(3, 0, b"12").unwrap();
        kept.put(3, 2, b"34").unwrap();
        kept.put(9, 0, b"").unwrap();
        let units = kept.into_units();
        assert_eq!((units[&3].as_slice(), units[&9].as_slice()), (&b"1234"[..], &b""[..]));
    }
}
