//! The part of a plan whose sources are not mapped, as ranged reads, and where the bytes of their answers go. A split of
//! the innermost dimension does not become one range for each row: rows with little between them are read as one range
//! whose holes are dropped on arrival, and rows that several targets of this process share out are read together.

use ballast_schemas::frame::ReadRange;

use super::copy::{Window, check_bounds};
use super::error::{CopyError, LowerError};
use super::plan::{Limits, Plan, SourcePlace};
use super::region::{Loop, Region, rows, source_span};
use super::targets::Targets;

/// When bytes that nobody wants are read along with their neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coalescing {
    /// Gaps up to this many bytes are always read: about what one more range costs both ends.
    pub gap_bytes_max: u64,
    /// Longer gaps are read while they are at most this share of all that is read, in millionths.
    pub hole_ppm_max: u32,
}

impl Default for Coalescing {
    fn default() -> Self {
        Self { gap_bytes_max: 256, hole_ppm_max: 200_000 }
    }
}

impl Coalescing {
    fn accepts(&self, wanted: u64, span: u64) -> bool {
        let holes = u128::from(span.saturating_sub(wanted));
        holes * 1_000_000 <= u128::from(self.hole_ppm_max) * u128::from(span)
    }
}

/// Ranges this long are not joined with their neighbours: they are received straight into their buffers.
const DIRECT_BYTES_MIN: u64 = 64 << 10;

/// One read of a unit: a range, or equally spaced blocks whose bytes the answer holds one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// The unit.
    pub unit: u32,
    /// First byte inside the unit.
    pub offset: u64,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// The loops around the blocks, outermost first, as (count, bytes from one to the next); none: one range.
    pub strides: Box<[(u64, u64)]>,
    /// The regions that take bytes from the answer.
    parts: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    region: u32,
    /// Where in the answer the region's first byte stands.
    offset: u64,
}

impl Read {
    /// Ranges that the read consists of.
    #[must_use]
    pub fn segments(&self) -> u64 {
        self.strides.iter().fold(1, |segments: u64, (count, _)| segments.saturating_mul(*count))
    }

    /// Bytes of the answer.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block_bytes.saturating_mul(self.segments())
    }

    /// Where a block begins inside the unit.
    fn block_offset(&self, mut block: u64) -> u64 {
        let mut offset = self.offset;
        for (count, stride) in self.strides.iter().rev() {
            offset += block % count * stride;
            block /= count;
        }
        offset
    }

    /// The region's loops as they stand in the answer, where blocks follow each other without gaps.
    fn packed(&self, region: &Region) -> Vec<Loop> {
        let mut loops = region.loops.to_vec();
        let mut stride = self.block_bytes;
        for (at, (count, _)) in self.strides.iter().enumerate().rev() {
            loops[at].source_stride = stride;
            stride *= count;
        }
        loops
    }
}

/// The reads for the sources that are not mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WirePlan<'p> {
    plan: &'p Plan,
    reads: Vec<Read>,
    bytes: u64,
    segments: u64,
}

/// A region and how it would be read by itself.
struct Wanted {
    unit: u32,
    start: u64,
    region: u32,
    /// Bytes from its first to its last.
    span: u64,
    /// Loops that stay strides; 0: one range.
    outer: usize,
    /// Bytes of one block inside them, holes included.
    block_bytes: u64,
}

impl<'p> WirePlan<'p> {
    /// Lowers the regions whose source (by its index in the plan) is wanted.
    ///
    /// # Errors
    /// When a source is in no unit of a stored revision, or the reads would have more segments than the limits allow.
    /// Names the tensor.
    pub fn new(
        plan: &'p Plan,
        wanted: impl Fn(u32) -> bool,
        coalescing: &Coalescing,
        limits: &Limits,
    ) -> Result<Self, LowerError> {
        let mut regions = Vec::new();
        for (at, region) in plan.regions.iter().enumerate().filter(|(_, region)| wanted(region.source)) {
            let SourcePlace::Unit { unit, offset, .. } = plan.sources[region.source as usize].place else {
                return Err(LowerError::NotStored { tensor: plan.name(region.tensor) });
            };
            let (outer, block_bytes) = coalesce(region, coalescing);
            let span = source_span(region.inner_bytes, &region.loops);
            regions.push(Wanted {
                unit,
                start: offset + region.source_offset,
                region: at as u32,
                span,
                outer,
                block_bytes,
            });
        }
        regions.sort_by_key(|wanted| (wanted.unit, wanted.start, wanted.span));
        let mut lowered = Self { plan, reads: Vec::new(), bytes: 0, segments: 0 };
        let fragment = |wanted: &Wanted| plan.sources[plan.regions[wanted.region as usize].source as usize].place;
        for unit in regions.chunk_by_mut(|a, b| a.unit == b.unit) {
            // Fragments of a unit lie apart, so the regions of one of them stand together.
            for of_fragment in unit.chunk_by_mut(|a, b| fragment(a) == fragment(b)) {
                share(plan, of_fragment, coalescing);
            }
            lowered.add_unit(unit, coalescing, limits)?;
        }
        Ok(lowered)
    }

    fn add_unit(&mut self, unit: &[Wanted], coalescing: &Coalescing, limits: &Limits) -> Result<(), LowerError> {
        let plan = self.plan;
        let first = self.reads.len();
        for wanted in unit {
            let region = &plan.regions[wanted.region as usize];
            let segments = rows(&region.loops[..wanted.outer]);
            if segments > limits.segments_per_region {
                let limit = limits.segments_per_region;
                return Err(LowerError::Segments { tensor: plan.name(region.tensor), segments, limit });
            }
            let strides: Box<[(u64, u64)]> =
                region.loops[..wanted.outer].iter().map(|next| (next.count, next.source_stride)).collect();
            let block_bytes = if wanted.outer == 0 { wanted.span } else { wanted.block_bytes };
            if let Some(last) = self.reads[first..].last_mut() {
                let end = last.offset + last.block_bytes;
                let ranges = last.strides.is_empty() && strides.is_empty();
                let short = last.block_bytes.min(block_bytes) < DIRECT_BYTES_MIN;
                let near = wanted.start < end || (short && wanted.start - end <= coalescing.gap_bytes_max);
                let same = (last.offset, last.block_bytes) == (wanted.start, block_bytes) && last.strides == strides;
                if same || (ranges && near) {
                    last.parts.push(Part { region: wanted.region, offset: wanted.start - last.offset });
                    if ranges {
                        let grown = end.max(wanted.start + block_bytes) - last.offset;
                        self.bytes += grown - last.block_bytes;
                        last.block_bytes = grown;
                    }
                    continue;
                }
            }
            self.segments = self.segments.saturating_add(segments);
            if self.segments > limits.segments {
                return Err(LowerError::TotalSegments { tensor: plan.name(region.tensor), limit: limits.segments });
            }
            let parts = vec![Part { region: wanted.region, offset: 0 }];
            let read = Read { unit: wanted.unit, offset: wanted.start, block_bytes, strides, parts };
            self.bytes = self.bytes.saturating_add(read.bytes());
            self.reads.push(read);
        }
        Ok(())
    }

    /// The reads, by unit and offset.
    #[must_use]
    pub fn reads(&self) -> &[Read] {
        &self.reads
    }

    /// Bytes of all answers, those included that nobody wants.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ranges of all reads.
    #[must_use]
    pub fn segments(&self) -> u64 {
        self.segments
    }

    /// The reads as requests of at most so many ranges and bytes, made one at a time. They hold the buffers until the last
    /// of them is dropped; several may be answered at once, each by one connection.
    ///
    /// # Errors
    /// When the buffers are of another plan.
    pub fn requests<'r>(
        &'r self,
        targets: &'r mut Targets<'_>,
        ranges_max: usize,
        bytes_max: u64,
    ) -> Result<impl Iterator<Item = Request<'r>>, CopyError> {
        let plan = self.plan;
        targets.check(plan)?;
        for region in &plan.regions {
            let room = plan.targets[region.target as usize].nbytes as usize;
            check_bounds("target", region.target_end(), room)?;
        }
        let targets: &'r Targets<'r> = targets;
        let (mut read, mut from) = (0, 0);
        Ok(std::iter::from_fn(move || {
            let mut request = Request { plan, targets, ranges: Vec::new(), spans: Vec::new(), bytes: 0, counted: 0 };
            while let Some(next) = self.reads.get(read) {
                from += request.take(next, from, ranges_max.max(1), bytes_max.max(1));
                if from < next.bytes() {
                    break;
                }
                (read, from) = (read + 1, 0);
            }
            (!request.ranges.is_empty()).then_some(request)
        }))
    }
}

/// How one region is read by itself: the loops that stay strides, and the bytes of one block inside them.
fn coalesce(region: &Region, coalescing: &Coalescing) -> (usize, u64) {
    let (mut span, mut wanted, mut outer) = (region.inner_bytes, region.inner_bytes, region.loops.len());
    for next in region.loops.iter().rev() {
        let gap = next.source_stride - span;
        let (wider, more) = (span + (next.count - 1) * next.source_stride, wanted * next.count);
        if gap > coalescing.gap_bytes_max && !coalescing.accepts(more, wider) {
            break;
        }
        (span, wanted, outer) = (wider, more, outer - 1);
    }
    (outer, span)
}

/// Reads the regions of one fragment as one range when together they want nearly all of it.
fn share(plan: &Plan, of_fragment: &mut [Wanted], coalescing: &Coalescing) {
    if of_fragment.len() < 2 || of_fragment.iter().all(|wanted| wanted.outer == 0) {
        return;
    }
    type Shape<'a> = (u64, u64, Vec<(u64, u64)>);
    let shape = |wanted: &Wanted| -> Shape<'_> {
        let region = &plan.regions[wanted.region as usize];
        let loops = region.loops.iter().map(|next| (next.count, next.source_stride)).collect();
        (wanted.start, region.inner_bytes, loops)
    };
    // Copies of one shard want the same bytes, and count once.
    let mut shapes: Vec<Shape<'_>> = of_fragment.iter().map(shape).collect();
    shapes.sort_unstable();
    shapes.dedup();
    let bytes = |(_, inner, loops): &Shape<'_>| loops.iter().fold(*inner, |bytes, (count, _)| bytes * count);
    let distinct: u64 = shapes.iter().map(bytes).sum();
    let start = of_fragment.iter().map(|wanted| wanted.start).min().unwrap_or(0);
    let end = of_fragment.iter().map(|wanted| wanted.start + wanted.span).max().unwrap_or(0);
    if coalescing.accepts(distinct, end - start) {
        for wanted in of_fragment {
            wanted.outer = 0;
        }
    }
}

/// One request to a node and the way of its answer into the buffers. The answer is the concatenation of the ranges, and
/// is taken from its beginning on; it may be taken again from any point that was reached, as after a broken connection.
#[derive(Debug)]
pub struct Request<'p> {
    plan: &'p Plan,
    targets: &'p Targets<'p>,
    ranges: Vec<ReadRange>,
    spans: Vec<Span<'p>>,
    bytes: u64,
    /// Bytes of the answer that have been counted as written.
    counted: u64,
}

/// A stretch of a read's answer inside a request's.
#[derive(Clone, Copy, Debug)]
struct Span<'p> {
    read: &'p Read,
    /// Where it begins in the read's answer.
    from: u64,
    /// Where it begins in the request's answer.
    at: u64,
    bytes: u64,
}

impl<'p> Request<'p> {
    /// Adds as much of a read as fits, from that byte of its answer on; how many bytes that was.
    fn take(&mut self, read: &'p Read, from: u64, ranges_max: usize, bytes_max: u64) -> u64 {
        let (total, mut to) = (read.bytes(), from);
        while to < total && self.ranges.len() < ranges_max {
            let (block, inside) = (to / read.block_bytes, to % read.block_bytes);
            let room = bytes_max.saturating_sub(self.bytes + (to - from));
            let bytes = (read.block_bytes - inside).min(room);
            if bytes == 0 {
                break;
            }
            self.ranges.push(ReadRange { unit: read.unit, offset: read.block_offset(block) + inside, bytes });
            to += bytes;
        }
        if to > from {
            self.spans.push(Span { read, from, at: self.bytes, bytes: to - from });
            self.bytes += to - from;
        }
        to - from
    }

    /// What to ask for, in this order.
    #[must_use]
    pub fn ranges(&self) -> &[ReadRange] {
        &self.ranges
    }

    /// Bytes of the answer.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the answer that have arrived.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.counted
    }

    /// Puts bytes of the answer, which begin at its byte `at`, where they belong.
    ///
    /// # Errors
    /// When they begin beyond what has arrived, or end beyond the answer; nothing is written then.
    pub fn deliver(&mut self, at: u64, bytes: &[u8]) -> Result<(), CopyError> {
        let to = at.saturating_add(bytes.len() as u64);
        if at > self.counted || to > self.bytes {
            return Err(CopyError::Answer { from: at, to, expected: self.bytes });
        }
        // What arrives again is written again and not counted again.
        let again = (self.counted - at).min(bytes.len() as u64) as usize;
        self.place(at, &bytes[..again], false);
        self.place(at + again as u64, &bytes[again..], true);
        self.counted = self.counted.max(to);
        Ok(())
    }

    /// The memory that the answer's bytes from `at` on belong into, when they belong into one place only: what is received
    /// into it need not be delivered, only confirmed.
    pub fn landing(&mut self, at: u64) -> Option<&mut [u8]> {
        let span = self.spans.get(self.span_at(at)?)?;
        let [part] = span.read.parts[..] else { return None };
        let region = &self.plan.regions[part.region as usize];
        let address = self.targets.address(region.target)?;
        let inside = span.from + (at - span.at);
        let mut rest = inside.checked_sub(part.offset)?;
        let mut target = region.target_offset;
        let packed = span.read.packed(region);
        for next in &packed {
            let index = (rest / next.source_stride).min(next.count - 1);
            rest -= index * next.source_stride;
            target += index * next.target_stride;
        }
        let left = region.inner_bytes.checked_sub(rest).filter(|left| *left > 0)?;
        let bytes = left.min(span.bytes - (at - span.at));
        // SAFETY: the run lies in its region, which `requests` has found to lie in its buffer. The buffers are held by this
        // set of requests, each byte of them belongs to one request, and the slice borrows that request.
        Some(unsafe { std::slice::from_raw_parts_mut(address.add((target + rest) as usize), bytes as usize) })
    }

    /// Confirms bytes that were received into [`Request::landing`] of `at`.
    ///
    /// # Errors
    /// When they begin beyond what has arrived, or are more than there was memory for.
    pub fn landed(&mut self, at: u64, bytes: u64) -> Result<(), CopyError> {
        let to = at.saturating_add(bytes);
        let room = self.landing(at).map_or(0, |memory| memory.len() as u64);
        if at > self.counted || bytes > room {
            return Err(CopyError::Answer { from: at, to, expected: self.bytes });
        }
        let span = self.span_at(at).and_then(|span| self.spans.get(span));
        if let Some(part) = span.and_then(|span| span.read.parts.first()) {
            let target = self.plan.regions[part.region as usize].target;
            self.targets.add_written(target, to.saturating_sub(self.counted));
        }
        self.counted = self.counted.max(to);
        Ok(())
    }

    fn span_at(&self, at: u64) -> Option<usize> {
        let after = self.spans.partition_point(|span| span.at <= at);
        (at < self.bytes && after > 0).then(|| after - 1)
    }

    fn place(&self, at: u64, bytes: &[u8], count: bool) {
        let (mut at, mut bytes) = (at, bytes);
        while !bytes.is_empty() {
            let Some(span) = self.span_at(at).and_then(|span| self.spans.get(span)) else { return };
            let here = ((span.at + span.bytes - at) as usize).min(bytes.len());
            let inside = span.from + (at - span.at);
            for part in &span.read.parts {
                let region = &self.plan.regions[part.region as usize];
                let Some(address) = self.targets.address(region.target) else { continue };
                let skipped = part.offset.saturating_sub(inside).min(here as u64);
                let window = Window {
                    start: (inside + skipped).saturating_sub(part.offset),
                    bytes: &bytes[skipped as usize..here],
                };
                let packed = span.read.packed(region);
                // SAFETY: the region lies in its buffer (`requests`), which this set of requests holds; each byte of it
                // belongs to one request. The planner's loops reach the source in order and without overlap, in the
                // answer as in the unit.
                let written = unsafe {
                    let target = address.add(region.target_offset as usize);
                    window.copy(target, region.inner_bytes, &packed)
                };
                if count {
                    self.targets.add_written(region.target, written);
                }
            }
            at += here as u64;
            bytes = &bytes[here..];
        }
    }
}
