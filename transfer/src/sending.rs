//! Ranges on their way to a remote reader: from memory under a guard, from disk a little ahead of the socket, in
//! batches of bounded size. Whole units from disk are checked before their last byte is sent.

use std::sync::Arc;

use ballast_schemas::InstanceId;
use ballast_schemas::frame::ReadRange;
use tokio::sync::mpsc::Sender;

use crate::checksum::RunningChecksum;
use crate::error::StoreError;
use crate::node_store::{ColdPiece, HotPiece, InstanceReader, NodeStore};

/// Bytes of one batch.
const BATCH_BYTES: u64 = 1 << 20;
/// Pieces of one batch: what one vectored write takes.
const BATCH_PIECES: usize = 1000;

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
    batches: Sender<Result<Batch, StoreError>>,
) {
    let mut producer = Producer { store, instance, reader: Arc::new(reader), batch: Batch::default(), batches };
    // What went wrong is told through the channel; `Err` without it means that nobody listens.
    if let Err(Some(error)) = producer.run(&ranges).await {
        let _ = producer.batches.send(Err(error)).await;
    }
}

struct Producer {
    store: Arc<NodeStore>,
    instance: InstanceId,
    reader: Arc<InstanceReader>,
    batch: Batch,
    batches: Sender<Result<Batch, StoreError>>,
}

impl Producer {
    async fn run(&mut self, ranges: &[ReadRange]) -> Result<(), Option<StoreError>> {
        let mut at = 0;
        while let Some(range) = ranges.get(at) {
            if let Some(hot) = self.reader.hot(range)? {
                let hot = Arc::new(hot);
                let mut done = 0;
                while done < range.bytes {
                    let take = (range.bytes - done).min(BATCH_BYTES);
                    let piece = Piece::Hot(hot.clone(), done as usize..(done + take) as usize);
                    self.push(piece, take).await?;
                    done += take;
                }
                at += 1;
            } else if range.bytes <= BATCH_BYTES {
                at += self.small_from_disk(&ranges[at..]).await?;
            } else {
                self.large_from_disk(*range).await?;
                at += 1;
            }
        }
        self.flush().await
    }

    /// Ranges that one disk read covers. Answers how many.
    async fn small_from_disk(&mut self, ranges: &[ReadRange]) -> Result<usize, Option<StoreError>> {
        // Those that are hot by now come from memory, in their turn.
        let ahead = ranges.iter().take(BATCH_PIECES).take_while(|range| range.bytes <= BATCH_BYTES);
        let ranges: Vec<ReadRange> = ahead.copied().collect();
        let pieces = self.read(ranges.clone()).await?;
        let count = pieces.len();
        for (range, piece) in ranges.iter().zip(pieces) {
            if self.reader.is_whole(range) {
                let mut sum = RunningChecksum::default();
                sum.update(piece.bytes());
                self.compare(range.unit, &sum).await?;
            }
            self.push(Piece::Cold(piece), range.bytes).await?;
        }
        Ok(count)
    }

    async fn large_from_disk(&mut self, range: ReadRange) -> Result<(), Option<StoreError>> {
        let whole = self.reader.is_whole(&range);
        let mut sum = RunningChecksum::default();
        let mut done = 0;
        while done < range.bytes {
            let bytes = (range.bytes - done).min(BATCH_BYTES);
            let part = ReadRange { unit: range.unit, offset: range.offset + done, bytes };
            let Some(piece) = self.read(vec![part]).await?.into_iter().next() else { return Ok(()) };
            done += bytes;
            if whole {
                sum.update(piece.bytes());
                if done == range.bytes {
                    self.compare(range.unit, &sum).await?;
                }
            }
            self.push(Piece::Cold(piece), bytes).await?;
        }
        Ok(())
    }

    async fn read(&self, ranges: Vec<ReadRange>) -> Result<Vec<ColdPiece>, Option<StoreError>> {
        let reader = self.reader.clone();
        let read = tokio::task::spawn_blocking(move || reader.cold(&ranges)).await;
        let lost = |error: tokio::task::JoinError| StoreError::Invalid(format!("a read from disk was lost: {error}"));
        Ok(read.map_err(lost)??)
    }

    async fn compare(&self, unit: u32, sum: &RunningChecksum) -> Result<(), Option<StoreError>> {
        let Some(mismatch) = self.reader.compare(unit, sum.value()) else { return Ok(()) };
        let (store, instance) = (self.store.clone(), self.instance.clone());
        let told = tokio::task::spawn_blocking(move || store.report_bad_cold(&instance, mismatch)).await;
        let lost = |error: tokio::task::JoinError| StoreError::Invalid(format!("a report was lost: {error}"));
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
