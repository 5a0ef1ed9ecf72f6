//! A plan executed on memory that is mapped: regions as strided copies, on several threads, each piece by one of them.
//!
//! Regions of one tensor that interleave on either side (a split of one dimension becomes a split of another) are copied
//! band by band of the tensor and not one after the other: the pages that all of them touch are then touched once.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ballast_schemas::manifest::Tensor;

use super::copy::{LONG_RUN_BYTES, LONG_RUNS, Rows, Stores, check_bounds, finish_stores, strided};
use super::error::CopyError;
use super::plan::{Plan, SourceFragment};
use super::region::Region;
use super::targets::Targets;

/// How work is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cuts {
    /// Bytes that one thread copies before it looks for the next piece, reports, and lets itself be stopped.
    pub(super) piece_bytes: u64,
    /// Bytes of a tensor that its regions copy before any of them goes on: what the nearer caches hold.
    pub(super) band_bytes: u64,
    /// Runs this long gain nothing from bands.
    pub(super) long_run_bytes: u64,
}

const CUTS: Cuts = Cuts { piece_bytes: 8 << 20, band_bytes: 512 << 10, long_run_bytes: LONG_RUN_BYTES };
/// What a region without rows is cut at multiples of.
const LINE_BYTES: u64 = 64;
/// Steps of regions through bands that one tensor may take.
const STEPS_MAX: u64 = 4_000_000;

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

/// A stretch of work: regions as a whole, or some of the bands of one tensor's regions.
struct Piece {
    regions: Range<usize>,
    bands: Option<Bands>,
}

/// Some of the equal bands that a tensor is cut into.
#[derive(Clone, Copy)]
struct Bands {
    from: u64,
    to: u64,
    /// How many there are.
    of: u64,
    /// Bytes of the regions in these, about.
    bytes: u64,
    /// Whether all runs are long: nothing is gained then from copying band by band.
    long: bool,
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
    copy_in_cuts(plan, source, targets, options, CUTS)
}

/// [`copy_mapped`] with other cuts.
pub(super) fn copy_in_cuts<'s>(
    plan: &Plan,
    source: impl Fn(&SourceFragment) -> Option<&'s [u8]>,
    targets: &mut Targets<'_>,
    options: &CopyOptions<'_>,
    cuts: Cuts,
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
    let wanted =
        |region: &Region| sources[region.source as usize].is_some() && targets.address(region.target).is_some();
    let pieces = cut(plan, wanted, cuts);
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

/// Cuts the wanted regions into pieces: small tensors together, large ones by bands.
fn cut(plan: &Plan, wanted: impl Fn(&Region) -> bool, cuts: Cuts) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut at, mut open, mut sum) = (0, 0, 0);
    for regions in plan.regions.chunk_by(|a, b| a.tensor == b.tensor) {
        let (start, end) = (at, at + regions.len());
        at = end;
        let bytes: u64 = regions.iter().filter(|region| wanted(region)).map(Region::bytes).sum();
        if bytes <= cuts.piece_bytes {
            sum += bytes;
            if sum >= cuts.piece_bytes {
                pieces.push(Piece { regions: open..end, bands: None });
                (open, sum) = (end, 0);
            }
            continue;
        }
        pieces.push(Piece { regions: open..start, bands: None });
        (open, sum) = (end, 0);
        let whole = plan.tensors[regions[0].tensor as usize].nbytes().unwrap_or(bytes);
        let of = whole.div_ceil(cuts.band_bytes).min(STEPS_MAX / regions.len() as u64).max(1);
        let each = (of.saturating_mul(cuts.piece_bytes) / bytes).max(1);
        let long = regions.iter().all(|region| region.inner_bytes >= cuts.long_run_bytes);
        let mut from = 0;
        while from < of {
            let to = (from + each).min(of);
            let share = (u128::from(bytes) * u128::from(to - from) / u128::from(of)) as u64;
            pieces.push(Piece { regions: start..end, bands: Some(Bands { from, to, of, bytes: share, long }) });
            from = to;
        }
    }
    pieces.push(Piece { regions: open..at, bands: None });
    pieces.retain(|piece| !piece.regions.is_empty());
    pieces
}

/// How many rows a region has; one of a single run is cut into cache lines instead.
fn rows_of(region: &Region) -> u64 {
    if region.loops.is_empty() { region.inner_bytes.div_ceil(LINE_BYTES) } else { region.rows() }
}

/// Where a region's first row and the end of its last lie among the bytes of its tensor.
fn span_in_tensor(region: &Region, tensor: &Tensor) -> Range<u64> {
    let (mut first, mut last, mut stride) = (0, 0, tensor.itemsize);
    for dim in (0..tensor.global_shape.len()).rev() {
        let (offset, extent) = (region.overlap_offset()[dim], region.overlap_shape()[dim]);
        first += offset * stride;
        last += (offset + extent - 1) * stride;
        stride *= tensor.global_shape[dim];
    }
    first..last + tensor.itemsize
}

/// How many of `rows` equally spaced rows over `span` lie before `place`: an estimate, but the same one for the end of a
/// band as for the beginning of the next, so every row is copied once.
fn rows_before(rows: u64, span: &Range<u64>, place: u64) -> u64 {
    let reached = place.clamp(span.start, span.end) - span.start;
    let length = (span.end - span.start).max(1);
    (u128::from(rows) * u128::from(reached) / u128::from(length)) as u64
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
            let bytes = match self.copy_piece(piece) {
                Ok(bytes) => bytes,
                Err(error) => return self.fail(error),
            };
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

    fn copy_piece(&self, piece: &Piece) -> Result<u64, CopyError> {
        let regions = &self.plan.regions[piece.regions.clone()];
        let Some(bands) = piece.bands else {
            let mut bytes = 0;
            for region in regions {
                bytes += self.copy(region, 0..rows_of(region), Stores::Cached)?;
            }
            return Ok(bytes);
        };
        match bands.long {
            true => LONG_RUNS.copy(bands.bytes, |stores| self.copy_bands(regions, bands, stores)),
            false => self.copy_bands(regions, bands, Stores::Streamed),
        }
    }

    /// Copies some bands of one tensor's regions.
    fn copy_bands(&self, regions: &[Region], bands: Bands, stores: Stores) -> Result<u64, CopyError> {
        let mut bytes = 0;
        let tensor = &self.plan.tensors[regions[0].tensor as usize];
        let whole = tensor.nbytes().unwrap_or(0);
        let spans: Vec<Range<u64>> = regions.iter().map(|region| span_in_tensor(region, tensor)).collect();
        let place = |band: u64| (u128::from(whole) * u128::from(band) / u128::from(bands.of)) as u64;
        let step = if bands.long { bands.to - bands.from } else { 1 };
        let mut from = bands.from;
        while from < bands.to {
            let to = (from + step).min(bands.to);
            for (region, span) in regions.iter().zip(&spans) {
                let rows = rows_of(region);
                let rows = rows_before(rows, span, place(from))..rows_before(rows, span, place(to));
                bytes += self.copy(region, rows, stores)?;
            }
            from = to;
        }
        Ok(bytes)
    }

    /// Copies some rows of a region, as [`rows_of`] counts them.
    fn copy(&self, region: &Region, rows: Range<u64>, stores: Stores) -> Result<u64, CopyError> {
        let (Some(source), Some(target)) = (self.sources[region.source as usize], self.targets.address(region.target))
        else {
            return Ok(0);
        };
        if rows.is_empty() {
            return Ok(0);
        }
        check_bounds("source", region.source_end(), source.len())?;
        let room = self.plan.targets[region.target as usize].nbytes as usize;
        check_bounds("target", region.target_end(), room)?;
        // SAFETY: all that the region reads and writes lies before the ends that were just compared with the lengths of the
        // source and of the buffer, which `Targets::check` found to be the plan's. The buffer is held exclusively, regions
        // of one target are disjoint, and each of their rows is taken by one thread.
        let bytes = unsafe {
            let source = source.as_ptr().add(region.source_offset as usize);
            let target = target.add(region.target_offset as usize);
            if region.loops.is_empty() {
                let (from, to) = (rows.start * LINE_BYTES, (rows.end * LINE_BYTES).min(region.inner_bytes));
                strided(source.add(from as usize), target.add(from as usize), to - from, &[], stores);
                to - from
            } else {
                let all = Rows { inner_bytes: region.inner_bytes, loops: &region.loops, stores };
                all.copy(source, target, rows.start, rows.end);
                (rows.end - rows.start) * region.inner_bytes
            }
        };
        if stores == Stores::Streamed {
            finish_stores();
        }
        self.targets.add_written(region.target, bytes);
        Ok(bytes)
    }
}
