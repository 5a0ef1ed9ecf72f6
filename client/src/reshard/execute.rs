//! A plan executed on memory that is mapped: regions as strided copies, on several threads, each piece by one of them.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::copy::{check_bounds, strided, strided_rows};
use super::error::CopyError;
use super::plan::{Plan, SourceFragment};
use super::region::Region;
use super::targets::Targets;

/// Bytes that one thread copies before it looks for the next piece, reports, and lets itself be stopped.
const PIECE_BYTES: u64 = 8 << 20;

/// How to copy.
#[derive(Clone, Copy, Default)]
pub struct CopyOptions<'a> {
    /// Threads to copy with, the caller's among them; 0: as many as there are processors, at most 8.
    pub threads: usize,
    /// Called with the bytes of each piece once it is copied, from any of the threads.
    pub progress: Option<&'a (dyn Fn(u64) + Sync)>,
    /// Set by the caller to stop; what is under way is finished first, a few megabytes for each thread.
    pub stop: Option<&'a AtomicBool>,
}

impl std::fmt::Debug for CopyOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CopyOptions").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// What was copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Bytes.
    pub bytes: u64,
    /// Indexes of the plan's sources that are not mapped; their regions are still to be read.
    pub unmapped: Vec<u32>,
}

/// A stretch of work: regions as a whole, or, of one region, rows (of a contiguous one: bytes).
struct Piece {
    regions: Range<usize>,
    part: Option<Range<u64>>,
}

/// Copies everything whose source is mapped. `source` gives the bytes of a source fragment, or `None` when they are not
/// in this process's memory.
///
/// # Errors
/// When a source is not as long as its fragment (nothing is copied then), the buffers are of another plan, or the caller
/// stopped it.
pub fn copy_mapped<'s>(
    plan: &Plan,
    source: impl Fn(&SourceFragment) -> Option<&'s [u8]>,
    targets: &mut Targets<'_>,
    options: &CopyOptions<'_>,
) -> Result<Copied, CopyError> {
    targets.check(plan)?;
    let mut sources: Vec<Option<&[u8]>> = Vec::with_capacity(plan.sources.len());
    let mut copied = Copied::default();
    for (at, fragment) in plan.sources.iter().enumerate() {
        let bytes = source(fragment);
        match bytes {
            Some(bytes) if bytes.len() as u64 != fragment.nbytes => {
                let (tensor, expected) = (plan.name(fragment.tensor), fragment.nbytes);
                return Err(CopyError::Source { tensor, expected, found: bytes.len() as u64 });
            }
            Some(_) => {}
            None => copied.unmapped.push(at as u32),
        }
        sources.push(bytes);
    }
    let pieces =
        cut(plan, |region| sources[region.source as usize].is_some() && targets.address(region.target).is_some());
    let threads = match options.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from).min(8),
        threads => threads,
    };
    let (next, bytes, failed) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(None));
    let job = Job { plan, sources: &sources, targets, options, pieces: &pieces, next, bytes, failed };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(pieces.len()) {
            scope.spawn(|| job.run());
        }
        job.run();
    });
    let failed = job.failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = failed {
        return Err(error);
    }
    copied.bytes = job.bytes.into_inner();
    Ok(copied)
}

/// Cuts the wanted regions into pieces of about [`PIECE_BYTES`].
fn cut(plan: &Plan, wanted: impl Fn(&Region) -> bool) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut open: Option<(usize, u64)> = None;
    for (at, region) in plan.regions.iter().enumerate() {
        let bytes = if wanted(region) { region.bytes() } else { 0 };
        if bytes > PIECE_BYTES {
            if let Some((start, _)) = open.take() {
                pieces.push(Piece { regions: start..at, part: None });
            }
            // A contiguous region is cut by bytes, at whole cache lines; another one by rows.
            let (total, step) = match region.loops.is_empty() {
                true => (bytes, PIECE_BYTES),
                false => (region.rows(), (PIECE_BYTES / region.inner_bytes).max(1)),
            };
            let mut from = 0;
            while from < total {
                let to = (from + step).min(total);
                pieces.push(Piece { regions: at..at + 1, part: Some(from..to) });
                from = to;
            }
            continue;
        }
        let (start, sum) = open.get_or_insert((at, 0));
        *sum += bytes;
        if *sum >= PIECE_BYTES {
            pieces.push(Piece { regions: *start..at + 1, part: None });
            open = None;
        }
    }
    if let Some((start, _)) = open {
        pieces.push(Piece { regions: start..plan.regions.len(), part: None });
    }
    pieces
}

struct Job<'j> {
    plan: &'j Plan,
    sources: &'j [Option<&'j [u8]>],
    targets: &'j Targets<'j>,
    options: &'j CopyOptions<'j>,
    pieces: &'j [Piece],
    next: AtomicUsize,
    bytes: AtomicU64,
    failed: Mutex<Option<CopyError>>,
}

impl Job<'_> {
    /// Takes pieces until there are none.
    fn run(&self) {
        while let Some(piece) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.options.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                self.fail(CopyError::Interrupted { unwritten: self.targets.unwritten(self.plan) });
                return;
            }
            let mut bytes = 0;
            for region in &self.plan.regions[piece.regions.clone()] {
                match self.copy(region, piece.part.clone()) {
                    Ok(copied) => bytes += copied,
                    Err(error) => return self.fail(error),
                }
            }
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
            if let Some(progress) = self.options.progress {
                progress(bytes);
            }
        }
    }

    /// Keeps the first failure and lets nobody begin another piece.
    fn fail(&self, error: CopyError) {
        self.next.store(self.pieces.len(), Ordering::Relaxed);
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    fn copy(&self, region: &Region, part: Option<Range<u64>>) -> Result<u64, CopyError> {
        let (Some(source), Some(target)) = (self.sources[region.source as usize], self.targets.address(region.target))
        else {
            return Ok(0);
        };
        check_bounds("source", region.source_end(), source.len())?;
        let room = self.plan.targets[region.target as usize].nbytes as usize;
        check_bounds("target", region.target_end(), room)?;
        // SAFETY: all that the region reads and writes lies before the ends that were just compared with the lengths of the
        // source and of the buffer, which `Targets::check` found to be the plan's. The buffer is held exclusively, regions
        // of one target are disjoint, and each piece is taken by one thread.
        let bytes = unsafe {
            let source = source.as_ptr().add(region.source_offset as usize);
            let target = target.add(region.target_offset as usize);
            match part {
                None => {
                    strided(source, target, region.inner_bytes, &region.loops);
                    region.bytes()
                }
                Some(part) if region.loops.is_empty() => {
                    let from = part.start as usize;
                    strided(source.add(from), target.add(from), part.end - part.start, &[]);
                    part.end - part.start
                }
                Some(part) => {
                    strided_rows(source, target, region.inner_bytes, &region.loops, part.start, part.end);
                    (part.end - part.start) * region.inner_bytes
                }
            }
        };
        self.targets.add_written(region.target, bytes);
        Ok(bytes)
    }
}
