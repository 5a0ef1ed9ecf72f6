//! Reading tensors straight into buffers that belong to the caller: one copy on the same host, none of our own over TCP.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use ballast_schemas::BallastError;
use ballast_schemas::frame::ReadRange;
use ballast_schemas::manifest::Manifest;
use ballast_transfer::{MappedInstance, RunningChecksum, read_ranges_side_by_side};

use crate::fetch::compare;
use crate::get::Verify;
use crate::nodes::lanes;
use crate::progress::Meter;
use crate::reading::{Attempt, Failure, Holder, Reading, Rounds};

/// Bytes copied before other tasks of the thread get their turn.
const PIECE_BYTES: usize = 4 << 20;
/// Bytes asked for in one go over TCP.
const BATCH_BYTES: u64 = 64 << 20;

/// The buffers for one unit: the same bytes go into each.
pub(crate) type Buffers<'a> = BTreeMap<u32, Vec<&'a mut [u8]>>;

/// Finds the unit of every named tensor, and makes sure that its buffer fits.
///
/// # Errors
/// `INVALID_ARGUMENT` naming the tensor.
pub(crate) fn by_unit<'a>(
    manifest: &Manifest,
    named: BTreeMap<String, &'a mut [u8]>,
) -> Result<Buffers<'a>, BallastError> {
    let mut buffers = Buffers::new();
    for (name, buffer) in named {
        let mut fragments = manifest.fragments_of(&name);
        let Some(fragment) = fragments.next() else {
            return Err(BallastError::invalid(format!("the revision has no tensor {name:?}")));
        };
        if fragments.next().is_some() || fragment.object_offset != 0 {
            return Err(BallastError::invalid(format!(
                "tensor {name:?} is stored in several fragments and can not be read as one"
            )));
        }
        if fragment.nbytes != buffer.len() as u64 {
            let message = format!("tensor {name:?} has {} bytes, its buffer {}", fragment.nbytes, buffer.len());
            return Err(BallastError::invalid(message));
        }
        buffers.entry(fragment.unit).or_default().push(buffer);
    }
    Ok(buffers)
}

/// Fills every buffer, from whichever replicas have its unit.
pub(crate) async fn fill(
    reading: &mut Reading,
    buffers: &mut Buffers<'_>,
    verify: Verify,
    meter: &Meter,
) -> Result<Rounds, BallastError> {
    let mut rounds = Rounds::new(buffers.keys().copied());
    while !rounds.is_done() {
        for (holder, units) in rounds.shares(reading).await {
            let (holdings, way) = (holder.holdings.clone(), holder.way());
            let filling = Filling { manifest: reading.manifest().clone(), verify, meter };
            let attempt = match holder.mapped.clone() {
                Some(mapped) => filling.copy_all(&mapped, &units, buffers).await,
                None => filling.receive_all(holder, &units, buffers).await,
            };
            rounds.note(reading, &holdings, way, attempt)?;
        }
        rounds.next(reading).await?;
    }
    Ok(rounds)
}

struct Filling<'a> {
    manifest: Arc<Manifest>,
    verify: Verify,
    meter: &'a Meter,
}

impl Filling<'_> {
    async fn copy_all(&self, mapped: &Arc<MappedInstance>, units: &[u32], buffers: &mut Buffers<'_>) -> Attempt {
        let mut attempt = Attempt::default();
        for unit in units {
            let Some((first, others)) = buffers.get_mut(unit).and_then(|all| all.split_first_mut()) else { continue };
            match self.copy(mapped, *unit, first).await {
                Ok(()) => {
                    copy_to_all(first, others).await;
                    attempt.done.push(*unit);
                }
                Err(error) => attempt.failed.push((*unit, Failure::Unit(error))),
            }
        }
        attempt
    }

    async fn copy(&self, mapped: &Arc<MappedInstance>, unit: u32, buffer: &mut [u8]) -> Result<(), BallastError> {
        let mut running = RunningChecksum::default();
        let view = mapped.view(unit);
        // What is mapped hot was checked at the seal and never moved.
        let is_checked = self.verify == Verify::Always || (self.verify == Verify::Auto && view.is_none());
        let mut done = 0;
        for piece in buffer.chunks_mut(PIECE_BYTES) {
            match view {
                Some(view) => piece.copy_from_slice(&view[done..done + piece.len()]),
                // The disk may take its time, so another thread waits for it.
                None => {
                    let (mapped, offset, mut bytes) = (mapped.clone(), done as u64, vec![0; piece.len()]);
                    let read =
                        tokio::task::spawn_blocking(move || mapped.read_into(unit, offset, &mut bytes).map(|()| bytes))
                            .await;
                    let read = read.map_err(|error| unavailable(format!("a reading thread failed: {error}")))?;
                    piece.copy_from_slice(&read.map_err(|error| BallastError::new(error.code(), error.to_string()))?);
                }
            }
            if is_checked {
                running.update(piece);
            }
            done += piece.len();
            self.meter.add(piece.len() as u64);
            tokio::task::yield_now().await;
        }
        if is_checked {
            compare(&self.manifest, unit, running.value()).inspect_err(|_| self.meter.take_back(done as u64))?;
        }
        Ok(())
    }

    async fn receive_all(&self, holder: Holder, units: &[u32], buffers: &mut Buffers<'_>) -> Attempt {
        let mut connections = Vec::new();
        while connections.len() + 1 < lanes() {
            match holder.again().await {
                Ok(connection) => connections.push(connection),
                // Fewer will do.
                Err(_) => break,
            }
        }
        connections.push(holder.connection);
        let mut attempt = Attempt::default();
        let mut wanted = units.iter().copied().peekable();
        while wanted.peek().is_some() {
            let mut batch = Vec::new();
            let mut bytes = 0;
            while let Some(&unit) = wanted.peek() {
                let size = buffers.get(&unit).and_then(|all| all.first()).map_or(0, |buffer| buffer.len() as u64);
                if !batch.is_empty() && bytes + size > BATCH_BYTES {
                    break;
                }
                batch.push(ReadRange { unit, offset: 0, bytes: size });
                bytes += size;
                wanted.next();
            }
            // The units ascend, as the buffers do, so that the batch is a stretch of both.
            let stretch = batch.first().map_or(0, |range| range.unit)..=batch.last().map_or(0, |range| range.unit);
            let wanted_now: HashSet<u32> = batch.iter().map(|range| range.unit).collect();
            let of_batch = buffers.range_mut(stretch).filter(|(unit, _)| wanted_now.contains(unit));
            let mut slices: Vec<&mut [u8]> =
                of_batch.filter_map(|(_, all)| all.first_mut().map(|buffer| &mut **buffer)).collect();
            if let Err(error) = read_ranges_side_by_side(&mut connections, &batch, &mut slices).await {
                let error = BallastError::from(error);
                let left = batch.iter().map(|range| range.unit).chain(wanted);
                attempt.failed.extend(left.map(|unit| (unit, Failure::Unit(error.clone()))));
                return attempt;
            }
            self.meter.add(bytes);
            connections.iter().for_each(|connection| attempt.came_over(connection));
            for range in &batch {
                let Some((first, others)) = buffers.get_mut(&range.unit).and_then(|all| all.split_first_mut()) else {
                    continue;
                };
                match self.check(range.unit, first).await {
                    Ok(()) => {
                        copy_to_all(first, others).await;
                        attempt.done.push(range.unit);
                    }
                    Err(error) => {
                        self.meter.take_back(range.bytes);
                        attempt.failed.push((range.unit, Failure::Unit(error)));
                    }
                }
            }
        }
        attempt
    }

    async fn check(&self, unit: u32, buffer: &[u8]) -> Result<(), BallastError> {
        if self.verify == Verify::Never {
            return Ok(());
        }
        let mut running = RunningChecksum::default();
        for piece in buffer.chunks(PIECE_BYTES) {
            running.update(piece);
            tokio::task::yield_now().await;
        }
        compare(&self.manifest, unit, running.value())
    }
}

async fn copy_to_all(first: &[u8], others: &mut [&mut [u8]]) {
    for other in others {
        for (to, from) in other.chunks_mut(PIECE_BYTES).zip(first.chunks(PIECE_BYTES)) {
            to.copy_from_slice(from);
            tokio::task::yield_now().await;
        }
    }
}

fn unavailable(message: String) -> BallastError {
    BallastError::new(ballast_schemas::ErrorCode::Unavailable, message)
}

#[cfg(test)]
mod tests {
    use ballast_schemas::RevisionIdentity;
    use ballast_schemas::manifest::{ManifestPlan, PlannedTensor, Tensor};

    use super::*;

    #[test]
    fn a_buffer_that_does_not_fit_its_tensor_is_refused_by_name() {
        let identity = RevisionIdentity::new("default", "default", "m", "main", 1).unwrap();
        let mut tied = PlannedTensor::from(Tensor::plain("w", "F32", 4, vec![2]));
        tied.aliases = vec!["tied".into()];
        let manifest = ManifestPlan::new(&identity, vec![tied], vec![]).unwrap().seal(&[0]).unwrap();
        let refuse = |name: &str, bytes: usize| {
            let mut buffer = vec![0; bytes];
            by_unit(&manifest, BTreeMap::from([(name.to_owned(), buffer.as_mut_slice())])).unwrap_err().message
        };
        assert!(refuse("w", 7).contains("\"w\" has 8 bytes, its buffer 7"));
        assert!(refuse("nobody", 8).contains("no tensor \"nobody\""));
        let (mut one, mut two) = ([0; 8], [0; 8]);
        let both = BTreeMap::from([("w".to_owned(), one.as_mut_slice()), ("tied".to_owned(), two.as_mut_slice())]);
        assert_eq!(by_unit(&manifest, both).unwrap()[&0].len(), 2);
    }
}
