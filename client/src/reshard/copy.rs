//! Strided copies between memory: the whole of a region, a stretch of its rows, or what falls into a window of its source
//! (an answer that arrives piece by piece). Short runs have loops of their own, whose copy is a few moves and no call;
//! longer ones can go past the caches, which spares memory the reading of what is about to be overwritten.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use super::error::CopyError;
use super::region::{Loop, Region, rows, source_span};

/// Copies one region from its source fragment's bytes into its target fragment's.
///
/// # Errors
/// When the region reaches outside one of them; nothing is copied then.
pub fn copy_region(source: &[u8], target: &mut [u8], region: &Region) -> Result<(), CopyError> {
    check_bounds("source", region.source_end(), source.len())?;
    check_bounds("target", region.target_end(), target.len())?;
    // SAFETY: every byte that the region reads and writes lies before the ends that were just compared, and a shared and
    // a mutable slice do not overlap.
    unsafe {
        strided(
            source.as_ptr().add(region.source_offset as usize),
            target.as_mut_ptr().add(region.target_offset as usize),
            region.inner_bytes,
            &region.loops,
            Stores::Cached,
        );
    }
    Ok(())
}

pub(super) fn check_bounds(side: &'static str, needed: u64, found: usize) -> Result<(), CopyError> {
    if needed <= found as u64 { Ok(()) } else { Err(CopyError::Bounds { side, needed, found: found as u64 }) }
}

/// How bytes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stores {
    /// Into the caches: right for what fits there.
    Cached,
    /// Past them, where runs are long enough: right for far more than they hold. [`finish_stores`] ends it.
    Streamed,
}

/// Shorter runs are not streamed: their ends, which share cache lines with others, would weigh too much.
const STREAMED_BYTES_MIN: u64 = 256;
/// From here on the system's own copy may do better than streaming: [`LongRuns`] says.
pub(super) const LONG_RUN_BYTES: u64 = 64 << 10;

/// How long runs are copied. On one kind of processor streaming them is half as fast again as the system's copy of a few
/// megabytes, on another it is the other way round. So the first pieces of a process try both, and the rest goes the faster way.
pub(super) struct LongRuns {
    /// Pieces that have begun to try.
    tried: AtomicU32,
    /// The least picoseconds that a byte has taken, by way: cached, streamed.
    least: [AtomicU64; 2],
}

/// Of this process.
pub(super) static LONG_RUNS: LongRuns =
    LongRuns { tried: AtomicU32::new(0), least: [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)] };

/// Pieces that try, in turns.
const TRIES: u32 = 8;
/// Shorter pieces tell nothing.
const TRY_BYTES_MIN: u64 = 4 << 20;

impl LongRuns {
    /// Copies a piece of long runs of `bytes` altogether with `work`.
    pub(super) fn copy<T>(&self, bytes: u64, work: impl FnOnce(Stores) -> T) -> T {
        if bytes < TRY_BYTES_MIN || self.tried.load(Ordering::Relaxed) >= TRIES {
            return work(self.faster());
        }
        let streams = self.tried.fetch_add(1, Ordering::Relaxed) % 2;
        let started = Instant::now();
        let done = work(if streams == 0 { Stores::Cached } else { Stores::Streamed });
        let each = started.elapsed().as_nanos() * 1_000 / u128::from(bytes);
        self.least[streams as usize].fetch_min(u64::try_from(each).unwrap_or(u64::MAX), Ordering::Relaxed);
        done
    }

    fn faster(&self) -> Stores {
        let [cached, streamed] = [0, 1].map(|way| self.least[way].load(Ordering::Relaxed));
        if streamed < cached { Stores::Streamed } else { Stores::Cached }
    }
}

/// Makes streamed stores visible in the order of other stores, before anyone is told of them.
pub(super) fn finish_stores() {
    // SAFETY: every processor of this architecture has the instruction, which touches no memory by itself.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// How one contiguous run is copied.
trait Run: Copy {
    /// # Safety
    /// The run's bytes are readable at `source`, writable at `target`, and the two do not overlap.
    unsafe fn copy(self, source: *const u8, target: *mut u8);

    /// The run at `source` is copied soon. It need not be there.
    #[inline(always)]
    fn expect(self, _source: *const u8) {}
}

/// How many runs ahead a run is expected.
const RUNS_AHEAD: usize = 8;
/// Longer runs are fetched ahead by the processor itself.
#[cfg(target_arch = "x86_64")]
const EXPECTED_BYTES_MAX: usize = 1024;

/// Exactly N bytes.
#[derive(Clone, Copy)]
struct Fixed<const N: usize>;

impl<const N: usize> Run for Fixed<N> {
    #[inline(always)]
    unsafe fn copy(self, source: *const u8, target: *mut u8) {
        // SAFETY: as the caller promises; arrays of bytes have no alignment.
        unsafe { target.cast::<[u8; N]>().write(source.cast::<[u8; N]>().read()) }
    }
}

/// N to 2 N bytes: the first N and the last N, which may overlap.
#[derive(Clone, Copy)]
struct Ends<const N: usize> {
    last: usize,
}

impl<const N: usize> Run for Ends<N> {
    #[inline(always)]
    unsafe fn copy(self, source: *const u8, target: *mut u8) {
        // SAFETY: as the caller promises; both ends lie inside the run. Both are read before either is written.
        unsafe {
            let first = source.cast::<[u8; N]>().read();
            let last = source.add(self.last).cast::<[u8; N]>().read();
            target.cast::<[u8; N]>().write(first);
            target.add(self.last).cast::<[u8; N]>().write(last);
        }
    }
}

/// Any number of bytes.
#[derive(Clone, Copy)]
struct Any {
    bytes: usize,
}

impl Run for Any {
    #[inline(always)]
    unsafe fn copy(self, source: *const u8, target: *mut u8) {
        // SAFETY: as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(source, target, self.bytes) }
    }
}

#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Any number of bytes, whole cache lines of the target past the caches.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Streamed {
    bytes: usize,
}

#[cfg(target_arch = "x86_64")]
impl Run for Streamed {
    #[inline(always)]
    unsafe fn copy(self, source: *const u8, target: *mut u8) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let head = target.align_offset(LINE).min(self.bytes);
        let lines = (self.bytes - head) / LINE;
        // SAFETY: as the caller promises; head, lines and tail make up the run, and the lines are aligned in the target.
        unsafe {
            if head > 0 {
                std::ptr::copy_nonoverlapping(source, target, head);
            }
            for line in 0..lines {
                let (from, to) =
                    (source.add(head + line * LINE).cast::<__m128i>(), target.add(head + line * LINE).cast());
                let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
                _mm_stream_si128(to, parts[0]);
                _mm_stream_si128(to.add(1), parts[1]);
                _mm_stream_si128(to.add(2), parts[2]);
                _mm_stream_si128(to.add(3), parts[3]);
            }
            let done = head + lines * LINE;
            if done < self.bytes {
                std::ptr::copy_nonoverlapping(source.add(done), target.add(done), self.bytes - done);
            }
        }
    }

    #[inline(always)]
    fn expect(self, source: *const u8) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        if self.bytes <= EXPECTED_BYTES_MAX {
            for line in (0..self.bytes).step_by(LINE) {
                // SAFETY: a hint, which may name any address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(line).cast()) };
            }
        }
    }
}

/// All iterations of all loops.
///
/// # Safety
/// Every run that the loops reach is readable from `source` on and writable from `target` on, and the two do not overlap.
pub(super) unsafe fn strided(source: *const u8, target: *mut u8, inner_bytes: u64, loops: &[Loop], stores: Stores) {
    let one = Loop { count: 1, source_stride: 0, target_stride: 0 };
    // SAFETY: as the caller promises.
    unsafe {
        match loops {
            [] => blocks(source, target, inner_bytes, one, &[], stores),
            [outer, rest @ ..] => blocks(source, target, inner_bytes, *outer, rest, stores),
        }
    }
}

/// All iterations of `outer` around `rest`. Chooses how runs are copied, once for all of them.
///
/// # Safety
/// As [`strided`].
unsafe fn blocks(source: *const u8, target: *mut u8, inner_bytes: u64, outer: Loop, rest: &[Loop], stores: Stores) {
    let bytes = inner_bytes as usize;
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streamed && inner_bytes >= STREAMED_BYTES_MIN {
        // SAFETY: as the caller promises, each run has `bytes` bytes.
        return unsafe { nest(Streamed { bytes }, source, target, outer, rest) };
    }
    // SAFETY: as the caller promises, each run has `bytes` bytes.
    unsafe {
        match bytes {
            0 => {}
            1 => nest(Fixed::<1>, source, target, outer, rest),
            2 => nest(Fixed::<2>, source, target, outer, rest),
            3 => nest(Ends::<2> { last: 1 }, source, target, outer, rest),
            4 => nest(Fixed::<4>, source, target, outer, rest),
            5..8 => nest(Ends::<4> { last: bytes - 4 }, source, target, outer, rest),
            8 => nest(Fixed::<8>, source, target, outer, rest),
            9..16 => nest(Ends::<8> { last: bytes - 8 }, source, target, outer, rest),
            16 => nest(Fixed::<16>, source, target, outer, rest),
            17..32 => nest(Ends::<16> { last: bytes - 16 }, source, target, outer, rest),
            32 => nest(Fixed::<32>, source, target, outer, rest),
            33..64 => nest(Ends::<32> { last: bytes - 32 }, source, target, outer, rest),
            64 => nest(Fixed::<64>, source, target, outer, rest),
            65..128 => nest(Ends::<64> { last: bytes - 64 }, source, target, outer, rest),
            128 => nest(Fixed::<128>, source, target, outer, rest),
            _ => nest(Any { bytes }, source, target, outer, rest),
        }
    }
}

/// # Safety
/// As [`strided`], for runs that `run` copies.
unsafe fn nest<R: Run>(run: R, source: *const u8, target: *mut u8, outer: Loop, rest: &[Loop]) {
    let (source_stride, target_stride) = (outer.source_stride as usize, outer.target_stride as usize);
    // SAFETY: every iteration is one that the caller promises for.
    unsafe {
        match rest {
            [] => {
                for at in 0..outer.count as usize {
                    run.expect(source.wrapping_add((at + RUNS_AHEAD) * source_stride));
                    run.copy(source.add(at * source_stride), target.add(at * target_stride));
                }
            }
            [next, inner @ ..] => {
                for at in 0..outer.count as usize {
                    nest(run, source.add(at * source_stride), target.add(at * target_stride), *next, inner);
                }
            }
        }
    }
}

/// Some rows of a region, counted through all of its loops.
pub(super) struct Rows<'a> {
    pub(super) inner_bytes: u64,
    pub(super) loops: &'a [Loop],
    pub(super) stores: Stores,
}

impl Rows<'_> {
    /// Copies the rows from `from` to `to`.
    ///
    /// # Safety
    /// As [`strided`]; `to` is at most the number of rows.
    pub(super) unsafe fn copy(&self, source: *const u8, target: *mut u8, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let Self { inner_bytes, stores, .. } = *self;
        // SAFETY: every iteration is one that the caller promises for.
        unsafe {
            let [outer, rest @ ..] = self.loops else { return strided(source, target, inner_bytes, &[], stores) };
            let at = |index: u64| {
                (source.add((index * outer.source_stride) as usize), target.add((index * outer.target_stride) as usize))
            };
            let inside = Rows { loops: rest, ..*self };
            let width = rows(rest);
            let (mut first, skipped) = (from / width, from % width);
            let (last, left) = (to / width, to % width);
            if first == last {
                let (source, target) = at(first);
                return inside.copy(source, target, skipped, left);
            }
            if skipped > 0 {
                let (source, target) = at(first);
                inside.copy(source, target, skipped, width);
                first += 1;
            }
            if first < last {
                let (source, target) = at(first);
                blocks(source, target, inner_bytes, Loop { count: last - first, ..*outer }, rest, stores);
            }
            if left > 0 {
                let (source, target) = at(last);
                inside.copy(source, target, 0, left);
            }
        }
    }
}

/// A stretch of the bytes that a region reads from, counted from where its first run begins.
pub(super) struct Window<'a> {
    /// Where the stretch begins.
    pub(super) start: u64,
    /// Its bytes.
    pub(super) bytes: &'a [u8],
}

impl Window<'_> {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes.len() as u64)
    }

    /// Copies what the loops read from this stretch; how many bytes that was.
    ///
    /// # Safety
    /// Every run that the loops reach is writable from `target` on, and runs lie in the source in the order in which the
    /// loops reach them, without overlap.
    pub(super) unsafe fn copy(&self, target: *mut u8, inner_bytes: u64, loops: &[Loop]) -> u64 {
        // SAFETY: as the caller promises.
        unsafe { self.clip(0, target, inner_bytes, loops) }
    }

    /// `base`: where the first run of these loops begins.
    ///
    /// # Safety
    /// As [`Window::copy`].
    unsafe fn clip(&self, base: u64, target: *mut u8, inner_bytes: u64, loops: &[Loop]) -> u64 {
        let (from, to) = (self.start, self.end());
        let [outer, rest @ ..] = loops else {
            let (first, last) = (base.max(from), (base + inner_bytes).min(to));
            if first >= last {
                return 0;
            }
            // SAFETY: the bytes lie in the window and in the run that the caller promises for.
            unsafe {
                let source = self.bytes.as_ptr().add((first - from) as usize);
                std::ptr::copy_nonoverlapping(source, target.add((first - base) as usize), (last - first) as usize);
            }
            return last - first;
        };
        let (span, stride) = (source_span(inner_bytes, rest), outer.source_stride);
        // Iterations that reach into the window, and those that lie in it whole.
        let first = if from < base + span { 0 } else { (from - base - span) / stride + 1 };
        let last = if to <= base { 0 } else { ((to - base - 1) / stride + 1).min(outer.count) };
        let whole_first = from.saturating_sub(base).div_ceil(stride).max(first);
        let whole_last = if to < base + span { 0 } else { ((to - base - span) / stride + 1).min(outer.count) };
        let mut copied = 0;
        let mut edge = |range: std::ops::Range<u64>| {
            for index in range {
                // SAFETY: an iteration that the caller promises for.
                unsafe {
                    let target = target.add((index * outer.target_stride) as usize);
                    copied += self.clip(base + index * stride, target, inner_bytes, rest);
                }
            }
        };
        if whole_first >= whole_last {
            edge(first..last);
            return copied;
        }
        edge(first..whole_first);
        edge(whole_last..last);
        let middle = Loop { count: whole_last - whole_first, ..*outer };
        // SAFETY: these iterations read from inside the window and write where the caller promises.
        unsafe {
            let source = self.bytes.as_ptr().add((base + whole_first * stride - from) as usize);
            blocks(
                source,
                target.add((whole_first * outer.target_stride) as usize),
                inner_bytes,
                middle,
                rest,
                Stores::Cached,
            );
        }
        copied + middle.count * rows(rest) * inner_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length around every special case, unaligned, and nothing written beside it.
    #[test]
    fn runs_of_every_length_are_copied_and_nothing_else() {
        let source: Vec<u8> = (0..4096_u32).map(|at| (at * 37 % 251) as u8 + 1).collect();
        for stores in [Stores::Cached, Stores::Streamed] {
            for inner in (0..140).chain(250..330) {
                for shift in [0, 1, 13] {
                    let (source_stride, target_stride) = (inner + 7, inner + 3);
                    let loops = [Loop { count: 4, source_stride, target_stride }];
                    let mut target = vec![0_u8; 2048];
                    // SAFETY: four runs of at most 330 bytes and their gaps lie in both.
                    unsafe {
                        let to = target.as_mut_ptr().add(shift as usize);
                        strided(source.as_ptr().add(shift as usize), to, inner, &loops, stores);
                    }
                    finish_stores();
                    let mut expected = vec![0_u8; 2048];
                    for (run, at) in (0..4).flat_map(|run| (0..inner).map(move |at| (run, at))) {
                        let from = (shift + run * source_stride + at) as usize;
                        expected[(shift + run * target_stride + at) as usize] = source[from];
                    }
                    assert!(target == expected, "{stores:?}, {inner} bytes from {shift}");
                }
            }
        }
    }

    #[test]
    fn long_runs_go_the_way_that_was_faster() {
        for faster in [Stores::Cached, Stores::Streamed] {
            let runs = LongRuns { tried: 0.into(), least: [u64::MAX.into(), u64::MAX.into()] };
            assert_eq!(runs.copy(TRY_BYTES_MIN - 1, |stores| stores), Stores::Cached, "nothing is known yet");
            let mut ways = Vec::new();
            for _ in 0..TRIES {
                runs.copy(TRY_BYTES_MIN, |stores| {
                    ways.push(stores);
                    // Said to be slower, far beyond what anything here takes.
                    std::thread::sleep(std::time::Duration::from_millis(if stores == faster { 0 } else { 40 }));
                });
            }
            assert!(ways.chunks(2).all(|pair| pair == [Stores::Cached, Stores::Streamed]));
            assert_eq!(runs.copy(TRY_BYTES_MIN, |stores| stores), faster);
            assert_eq!(runs.copy(1, |stores| stores), faster);
        }
    }

    #[test]
    fn rows_that_are_not_asked_for_are_not_written() {
        let source: Vec<u8> = (1..=120).collect();
        let loop_of = |count, source_stride, target_stride| Loop { count, source_stride, target_stride };
        let loops = [loop_of(3, 40, 24), loop_of(2, 20, 12), loop_of(4, 5, 3)];
        let row = |row: u64| {
            ((row / 8) * 40 + (row / 4 % 2) * 20 + row % 4 * 5, (row / 8) * 24 + (row / 4 % 2) * 12 + row % 4 * 3)
        };
        for from in 0..=24 {
            for to in from..=24 {
                let (mut target, mut expected) = ([0_u8; 72], [0_u8; 72]);
                let all = Rows { inner_bytes: 2, loops: &loops, stores: Stores::Cached };
                // SAFETY: the loops reach 117 bytes of the source and 71 of the target.
                unsafe { all.copy(source.as_ptr(), target.as_mut_ptr(), from, to) };
                for (read, write) in (from..to).map(row) {
                    expected[write as usize..][..2].copy_from_slice(&source[read as usize..][..2]);
                }
                assert_eq!(target, expected, "rows {from}..{to}");
            }
        }
    }
}
