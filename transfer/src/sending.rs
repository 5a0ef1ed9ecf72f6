//! Ranges on their way to a remote reader: from memory under a guard, from disk a few reads ahead of the socket, in
//! batches of bounded size. Whole units from disk are checked before their last byte is sent.

use std::collections::VecDeque;
use std::sync::Arc;

use ballast_schemas::InstanceId;
use ballast_schemas::frame::ReadRange;
use tokio::sync::mpsc::Sender;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use crate::checksum::RunningChecksum;
use crate::error::StoreError;
use crate::node_store::{ColdPiece, HotPiece, InstanceReader, NodeStore};

/// Bytes of one batch.
const BATCH_BYTES: u64 = 1 << 20;
/// Pieces of one batch: what one vectored write takes.
const BATCH_PIECES: usize = 1000;
/// Reads from disk under way for one connection, when the node has room for them.
const READS_MAX: usize = 4;

enum Piece {
    Hot(Arc<HotPiece>, std::ops::Range<usize>),
    Cold(ColdPiece),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Hot(piece, range) => piece.bytes().get(range.clone()).unwrap_or_default(),
            Self::Cold(piece) => piece.bytes(),
        }
    }
}

/// Payload of one response.
#[derive(Default)]
pub(crate) struct Batch {
    pieces: Vec<Piece>,
    bytes: u64,
}

impl Batch {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn slices(&self) -> Vec<&[u8]> {
        self.pieces.iter().map(Piece::bytes).collect()
    }
}

/// Makes the batches for `ranges`, in order. Ends early when nobody takes them any more.
pub(crate) async fn produce(
    store: Arc<NodeStore>,
    instance: InstanceId,
    reader: InstanceReader,
    ranges: Vec<ReadRange>,
    ahead: Arc<Semaphore>,
    batches: Sender<Result<Batch, StoreError>>,
) {
    let plan = Plan { reader: Arc::new(reader), ranges: ranges.into(), read: None };
    let mut producer =
        Producer { store, instance, plan, ahead, next: VecDeque::new(), sum: None, batch: Batch::default(), batches };
    // What went wrong is told through the channel; `Err` without it means that nobody listens.
    if let Err(Some(error)) = producer.run().await {
        // The listener may be gone.
        let _ = producer.batches.send(Err(error)).await;
    }
}

/// A part of a range from disk, and whether its unit is checked.
#[derive(Clone, Copy)]
struct Part {
    range: ReadRange,
    check: Option<Check>,
}

/// What a part is to the check of its unit.
#[derive(Clone, Copy)]
struct Check {
    first: bool,
    last: bool,
}

/// What comes next.
enum Next {
    Hot(HotPiece, u64),
    Cold(Vec<Part>),
}

/// The ranges that are still to be fetched.
struct Plan {
    reader: Arc<InstanceReader>,
    ranges: VecDeque<ReadRange>,
    /// The first range is being read from disk; this much of it has been planned.
    read: Option<u64>,
}

impl Plan {
    fn next(&mut self) -> Result<Option<Next>, StoreError> {
        let Some(range) = self.ranges.front().copied() else { return Ok(None) };
        // A range stays with the tier that it began with, so that a unit is checked as a whole.
        if self.read.is_none()
            && let Some(hot) = self.reader.hot(&range)?
        {
            self.ranges.pop_front();
            return Ok(Some(Next::Hot(hot, range.bytes)));
        }
        let mut parts: Vec<Part> = Vec::new();
        let mut ranges = self.ranges.iter();
        let mut done = self.read.unwrap_or(0);
        // Large ranges are read part by part; small ones together with what lies close behind them.
        if range.bytes > BATCH_BYTES {
            let bytes = (range.bytes - done).min(BATCH_BYTES);
            let part = ReadRange { unit: range.unit, offset: range.offset + done, bytes };
            let check = Check { first: done == 0, last: done + bytes == range.bytes };
            done += bytes;
            self.read = Some(done);
            if done == range.bytes {
                self.ranges.pop_front();
                self.read = None;
            }
            let check = self.reader.is_whole(&range).then_some(check);
            return Ok(Some(Next::Cold(vec![Part { range: part, check }])));
        }
        while let Some(range) = ranges.next().filter(|range| range.bytes <= BATCH_BYTES && parts.len() < BATCH_PIECES) {
            let check = self.reader.is_whole(range).then_some(Check { first: true, last: true });
            parts.push(Part { range: *range, check });
        }
        let wanted: Vec<ReadRange> = parts.iter().map(|part| part.range).collect();
        let count = self.reader.one_read(&wanted);
        parts.truncate(count);
        self.ranges.drain(..count);
        Ok(Some(Next::Cold(parts)))
    }
}

/// What has been planned and is under way.
enum Fetched {
    Hot(HotPiece, u64),
    Cold(Vec<Part>, JoinHandle<Result<Vec<ColdPiece>, StoreError>>, Option<OwnedSemaphorePermit>),
}

struct Producer {
    store: Arc<NodeStore>,
    instance: InstanceId,
    plan: Plan,
    ahead: Arc<Semaphore>,
    next: VecDeque<Fetched>,
    /// The checksum of the unit that is being read.
    sum: Option<RunningChecksum>,
    batch: Batch,
    batches: Sender<Result<Batch, StoreError>>,
}

impl Producer {
    async fn run(&mut self) -> Result<(), Option<StoreError>> {
        loop {
            self.look_ahead()?;
            match self.next.pop_front() {
                None => return self.flush().await,
                Some(Fetched::Hot(hot, bytes)) => {
                    let hot = Arc::new(hot);
                    let mut done = 0;
                    while done < bytes {
                        let take = (bytes - done).min(BATCH_BYTES);
                        self.push(Piece::Hot(hot.clone(), done as usize..(done + take) as usize), take).await?;
                        done += take;
                    }
                }
                Some(Fetched::Cold(parts, read, permit)) => {
                    let lost = |error| StoreError::Invalid(format!("a read from disk was lost: {error}"));
                    let pieces = match read.await.map_err(lost)? {
                        Ok(pieces) => pieces,
                        Err(error) => {
                            self.report_unreadable(&parts, &error).await;
                            return Err(Some(error));
                        }
                    };
                    drop(permit);
                    for (part, piece) in parts.into_iter().zip(pieces) {
                        self.check(&part, &piece).await?;
                        self.push(Piece::Cold(piece), part.range.bytes).await?;
                    }
                }
            }
        }
    }

    /// Plans what comes next: one thing in any case, and more reads from disk while the node has room for them.
    fn look_ahead(&mut self) -> Result<(), StoreError> {
        while self.next.len() < READS_MAX {
            let permit = match self.next.is_empty() {
                true => None,
                false => match self.ahead.clone().try_acquire_owned() {
                    Ok(permit) => Some(permit),
                    Err(_) => return Ok(()),
                },
            };
            match self.plan.next()? {
                None => return Ok(()),
                Some(Next::Hot(hot, bytes)) => self.next.push_back(Fetched::Hot(hot, bytes)),
                Some(Next::Cold(parts)) => {
                    let reader = self.plan.reader.clone();
                    let ranges: Vec<ReadRange> = parts.iter().map(|part| part.range).collect();
                    let read = tokio::task::spawn_blocking(move || reader.cold(&ranges));
                    self.next.push_back(Fetched::Cold(parts, read, permit));
                }
            }
        }
        Ok(())
    }

    /// A read from disk failed: has its segment gone?
    async fn report_unreadable(&self, parts: &[Part], error: &StoreError) {
        tracing::warn!(%error, instance = %self.instance, "a read from disk failed");
        let Some(unit) = parts.first().map(|part| part.range.unit) else { return };
        let (store, instance) = (self.store.clone(), self.instance.clone());
        let _ = tokio::task::spawn_blocking(move || store.report_unreadable_cold(&instance, unit)).await;
    }

    /// Takes a part into its unit's checksum, and compares it after the last one.
    async fn check(&mut self, part: &Part, piece: &ColdPiece) -> Result<(), Option<StoreError>> {
        let Some(check) = part.check else { return Ok(()) };
        if check.first {
            self.sum = Some(RunningChecksum::default());
        }
        let Some(sum) = &mut self.sum else { return Ok(()) };
        sum.update(piece.bytes());
        let wrong = check.last.then(|| self.plan.reader.compare(part.range.unit, sum.value())).flatten();
        let Some(mismatch) = wrong else { return Ok(()) };
        let (store, instance) = (self.store.clone(), self.instance.clone());
        let told = tokio::task::spawn_blocking(move || store.report_bad_cold(&instance, mismatch)).await;
        let lost = |error| StoreError::Invalid(format!("a report was lost: {error}"));
        Err(Some(told.unwrap_or_else(lost)))
    }

    async fn push(&mut self, piece: Piece, bytes: u64) -> Result<(), Option<StoreError>> {
        if self.batch.bytes + bytes > BATCH_BYTES || self.batch.pieces.len() >= BATCH_PIECES {
            self.flush().await?;
        }
        self.batch.pieces.push(piece);
        self.batch.bytes += bytes;
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), Option<StoreError>> {
        let batch = std::mem::take(&mut self.batch);
        if batch.bytes == 0 {
            return Ok(());
        }
        self.batches.send(Ok(batch)).await.map_err(|_| None)
    }
}
