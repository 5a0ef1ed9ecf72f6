//! Patches, both ends: which elements of a unit differ from the base's, cut into what travels and applied to the base's
//! bytes on their way into the new unit (`Derive` in `frame.rs`). A patch is applied to the base and never to what was
//! made of it, so that a repeated request gives the same bytes, in additive patches too.

use std::ops::Range;

use ballast_schemas::Digest;
use ballast_schemas::frame::{DATA_BYTES_MAX, DERIVED_RANGES_MAX, DerivedRange, Number, Patch, PatchRule};
use bytes::Bytes;
use half::{bf16, f16};

/// Entries of one range: even the longest distances and values fit one request.
const ENTRIES_MAX: usize = 400_000;

/// What differs in a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitPatch {
    /// What is done with the values.
    pub rule: PatchRule,
    /// Which elements, counted in whole elements from the unit's first byte, ascending. One that stands there twice is added
    /// to twice; to overwrite, each must be there once.
    pub elements: Vec<u64>,
    /// The values, in the order of the elements.
    pub values: Vec<u8>,
}

/// A unit that is made out of one of the base's.
#[derive(Clone, Copy, Debug)]
pub struct DeriveUnit<'a> {
    /// Which one.
    pub unit: u32,
    /// Out of which.
    pub base_unit: u32,
    /// Bytes of both.
    pub bytes: u64,
    /// BLAKE3 that the base's must have; `None`: whatever it has.
    pub blake3: Option<Digest>,
    /// What differs.
    pub patch: Option<&'a UnitPatch>,
}

impl DeriveUnit<'_> {
    /// Whether the patch lies in the unit and has a value for each of its elements, which ascend.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Some(patch) = self.patch else { return Ok(()) };
        let item = u64::from(patch.rule.item_bytes());
        let end = patch.elements.last().map_or(Some(0), |last| last.checked_add(1)?.checked_mul(item));
        let whole = patch.values.len() as u64 == patch.elements.len() as u64 * item;
        if let Some(run) = patch.elements.chunk_by(|a, b| a == b).find(|run| run.len() > ENTRIES_MAX) {
            return Err(format!(
                "element {} of unit {} is added to {} times, which fit no request: sum them up before",
                run[0],
                self.unit,
                run.len()
            ));
        }
        if whole && patch.elements.is_sorted() && end.is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        Err(format!("the patch of unit {} does not fit its {} bytes", self.unit, self.bytes))
    }
}

/// One `Derive` request.
#[derive(Debug, Default)]
pub(crate) struct DeriveRequest {
    pub ranges: Vec<DerivedRange>,
    pub payload: Vec<u8>,
    pub bytes: u64,
}

/// Cuts units into requests that make at most `bytes_max` bytes each, in order.
pub(crate) fn requests(units: &[DeriveUnit<'_>], bytes_max: u64) -> Vec<DeriveRequest> {
    let mut requests: Vec<DeriveRequest> = Vec::new();
    for unit in units {
        let mut entries = 0;
        let mut start = 0;
        loop {
            let mut end = unit.bytes.min(start + bytes_max);
            let mut payload = Vec::new();
            let mut patch = None;
            if let Some(whole) = unit.patch {
                let item = u64::from(whole.rule.item_bytes());
                let first = entries;
                let rest = whole.elements.get(first..).unwrap_or_default();
                let within = rest.partition_point(|element| element * item < end);
                entries = first + within;
                if within > ENTRIES_MAX {
                    // The entries of one element stay together.
                    end = (rest[ENTRIES_MAX] * item).max(start + item);
                    entries = first + rest.partition_point(|element| element * item < end);
                }
                if entries > first {
                    encode_distances(&whole.elements[first..entries], start / item, &mut payload);
                    let index_bytes = payload.len() as u32;
                    let values = first * item as usize..entries * item as usize;
                    payload.extend_from_slice(whole.values.get(values).unwrap_or_default());
                    patch = Some(Patch { rule: whole.rule, entries: (entries - first) as u32, index_bytes });
                }
            }
            let DeriveUnit { unit: number, base_unit, blake3, .. } = *unit;
            let bytes = end - start;
            let range = DerivedRange { unit: number, base_unit, offset: start, bytes, blake3, patch };
            let fits = |request: &&mut DeriveRequest| {
                request.bytes + bytes <= bytes_max
                    && request.ranges.len() < DERIVED_RANGES_MAX
                    && (request.payload.len() + payload.len()) as u64 <= DATA_BYTES_MAX
            };
            match requests.last_mut().filter(fits) {
                Some(request) => {
                    request.ranges.push(range);
                    request.payload.append(&mut payload);
                    request.bytes += bytes;
                }
                None => requests.push(DeriveRequest { ranges: vec![range], payload, bytes }),
            }
            start = end;
            if start == unit.bytes {
                break;
            }
        }
    }
    requests
}

fn encode_distances(elements: &[u64], mut before: u64, into: &mut Vec<u8>) {
    for element in elements {
        let mut distance = element - before;
        before = *element;
        while distance >= 0x80 {
            into.push(distance as u8 | 0x80);
            distance >>= 7;
        }
        into.push(distance as u8);
    }
}

/// The patch of one range, as it came, checked.
#[derive(Debug)]
pub(crate) struct RangePatch {
    rule: PatchRule,
    /// First byte of each element in its unit.
    places: Vec<u64>,
    values: Bytes,
}

impl RangePatch {
    /// Takes the patch of a range off the front of a payload.
    ///
    /// # Errors
    /// Naming what does not fit the range.
    pub(crate) fn take(range: &DerivedRange, payload: &mut Bytes) -> Result<Option<Self>, String> {
        let Some(Patch { rule, entries, index_bytes }) = range.patch else { return Ok(None) };
        let item = u64::from(rule.item_bytes());
        if !matches!(item, 1 | 2 | 4 | 8) {
            return Err(format!("a patch of elements of {item} bytes; 1, 2, 4 and 8 are known"));
        }
        if !range.offset.is_multiple_of(item) {
            return Err(format!("a patch from byte {} on, inside an element of {item} bytes", range.offset));
        }
        let cut = |payload: &mut Bytes, bytes: u64| match usize::try_from(bytes) {
            Ok(bytes) if bytes <= payload.len() => Ok(payload.split_to(bytes)),
            _ => Err(format!("a patch of {entries} elements whose payload ends too early")),
        };
        let distances = cut(payload, index_bytes.into())?;
        let mut distances = &*distances;
        let values = cut(payload, u64::from(entries) * item)?;
        // Every element has a value in the payload, so that there are no more of them than bytes that came.
        let mut places = Vec::with_capacity(entries as usize);
        let mut element = range.offset / item;
        let end = range.offset.saturating_add(range.bytes);
        for entry in 0..entries {
            let distance = decode_distance(&mut distances).ok_or("a patch with a distance that is no number")?;
            if entry > 0 && distance == 0 && matches!(rule, PatchRule::Overwrite { .. }) {
                return Err(format!("a patch that names element {element} twice"));
            }
            element = element.saturating_add(distance);
            let place = element.saturating_mul(item);
            if place.saturating_add(item) > end {
                return Err(format!("a patch of element {element}, which ends behind byte {end}"));
            }
            places.push(place);
        }
        if !distances.is_empty() {
            return Err(format!("a patch with {} bytes of distances too many", distances.len()));
        }
        Ok(Some(Self { rule, places, values }))
    }

    /// The entries of a piece of the unit, given those of all pieces before it.
    pub(crate) fn within(&self, done: usize, piece: &Range<u64>) -> Range<usize> {
        let rest = self.places.get(done..).unwrap_or_default();
        done..done + rest.partition_point(|place| *place < piece.end)
    }

    /// Changes a piece of the unit, whose first byte is `start`.
    pub(crate) fn apply(&self, entries: Range<usize>, start: u64, piece: &mut [u8]) {
        let item = self.rule.item_bytes() as usize;
        let values = self.values.get(entries.start * item..entries.end * item).unwrap_or_default();
        let places = self.places.get(entries).unwrap_or_default();
        macro_rules! add {
            ($number:ty, $sum:expr) => {
                each(places, values, start, piece, |before, value| {
                    $sum(<$number>::from_le_bytes(before), <$number>::from_le_bytes(value)).to_le_bytes()
                })
            };
        }
        // What a NaN made by an addition carries differs from processor to processor, and copies are compared byte by byte.
        macro_rules! add_floats {
            ($number:ty, $sum:expr) => {
                add!($number, |before: $number, value: $number| {
                    let sum: $number = $sum(before, value);
                    if sum.is_nan() { <$number>::NAN } else { sum }
                })
            };
        }
        match self.rule {
            PatchRule::Overwrite { item_bytes: 1 } => each::<1>(places, values, start, piece, |_, value| value),
            PatchRule::Overwrite { item_bytes: 2 } => each::<2>(places, values, start, piece, |_, value| value),
            PatchRule::Overwrite { item_bytes: 4 } => each::<4>(places, values, start, piece, |_, value| value),
            PatchRule::Overwrite { .. } => each::<8>(places, values, start, piece, |_, value| value),
            PatchRule::Add { number } => match number {
                Number::F64 => add_floats!(f64, |a: f64, b: f64| a + b),
                Number::F32 => add_floats!(f32, |a: f32, b: f32| a + b),
                Number::F16 => add_floats!(f16, |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32())),
                Number::BF16 => add_floats!(bf16, |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32())),
                Number::I64 => add!(i64, i64::wrapping_add),
                Number::I32 => add!(i32, i32::wrapping_add),
                Number::I16 => add!(i16, i16::wrapping_add),
                Number::I8 => add!(i8, i8::wrapping_add),
                Number::U64 => add!(u64, u64::wrapping_add),
                Number::U32 => add!(u32, u32::wrapping_add),
                Number::U16 => add!(u16, u16::wrapping_add),
                Number::U8 => add!(u8, u8::wrapping_add),
            },
        }
    }
}

fn each<const N: usize>(
    places: &[u64],
    values: &[u8],
    start: u64,
    piece: &mut [u8],
    change: impl Fn([u8; N], [u8; N]) -> [u8; N],
) {
    for (place, value) in places.iter().zip(values.as_chunks::<N>().0) {
        let at = (place - start) as usize;
        if let Some(element) = piece.get_mut(at..).and_then(<[u8]>::first_chunk_mut::<N>) {
            *element = change(*element, *value);
        }
    }
}

fn decode_distance(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            return None;
        }
        value |= part << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use ballast_schemas::frame::DERIVE_BYTES_MAX;
    use proptest::prelude::*;

    use super::*;

    /// What the node makes of requests.
    fn made(base: &[u8], requests: &[DeriveRequest]) -> Vec<u8> {
        let mut unit = Vec::new();
        for request in requests {
            let mut payload = Bytes::from(request.payload.clone());
            for range in &request.ranges {
                assert_eq!(range.offset, unit.len() as u64, "ranges follow each other");
                let patch = RangePatch::take(range, &mut payload).unwrap();
                let mut done = 0;
                let end = range.offset + range.bytes;
                for start in (range.offset..end).step_by(64) {
                    let piece = start..end.min(start + 64);
                    let mut bytes = base[piece.start as usize..piece.end as usize].to_vec();
                    if let Some(patch) = &patch {
                        let entries = patch.within(done, &piece);
                        done = entries.end;
                        patch.apply(entries, start, &mut bytes);
                    }
                    unit.extend(bytes);
                }
            }
            assert!(payload.is_empty(), "nothing is left over");
        }
        unit
    }

    fn derive(base: &[u8], patch: &UnitPatch) -> Vec<u8> {
        let unit = DeriveUnit { unit: 3, base_unit: 5, bytes: base.len() as u64, blake3: None, patch: Some(patch) };
        made(base, &requests(&[unit], DERIVE_BYTES_MAX))
    }

    proptest! {
        #[test]
        fn a_patch_overwrites_exactly_its_elements(
            base in prop::collection::vec(any::<u8>(), 0..4000),
            width in prop::sample::select(vec![1_u32, 2, 4, 8]),
            chosen in prop::collection::btree_set(0_u64..4000, 0..200),
        ) {
            let item = width as usize;
            let elements: Vec<u64> =
                chosen.into_iter().filter(|element| (*element as usize + 1) * item <= base.len()).collect();
            let values: Vec<u8> = (0..elements.len() * item).map(|at| (at * 31 + 7) as u8).collect();
            let mut expected = base.clone();
            for (element, value) in elements.iter().zip(values.chunks(item)) {
                expected[*element as usize * item..][..item].copy_from_slice(value);
            }
            let patch = UnitPatch { rule: PatchRule::Overwrite { item_bytes: width }, elements, values };
            prop_assert_eq!(derive(&base, &patch), expected);
        }

        #[test]
        fn whatever_a_payload_holds_a_patch_is_read_or_refused(
            payload in prop::collection::vec(any::<u8>(), 0..100),
            entries in 0_u32..40,
            index_bytes in 0_u32..60,
            offset in 0_u64..32,
            bytes in 0_u64..1000,
            item_bytes in 0_u32..10,
        ) {
            let patch = Patch { rule: PatchRule::Overwrite { item_bytes }, entries, index_bytes };
            let range = DerivedRange { unit: 0, base_unit: 0, offset, bytes, blake3: None, patch: Some(patch) };
            if let Ok(Some(patch)) = RangePatch::take(&range, &mut payload.into()) {
                let mut piece = vec![0; bytes as usize];
                patch.apply(patch.within(0, &(offset..offset + bytes)), offset, &mut piece);
            }
        }
    }

    fn add(number: Number, base: &[u8], elements: Vec<u64>, values: Vec<u8>) -> Vec<u8> {
        derive(base, &UnitPatch { rule: PatchRule::Add { number }, elements, values })
    }

    #[test]
    fn sums_are_rounded_once_to_nearest_even_and_whole_numbers_wrap() {
        let bytes = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(
            add(Number::F32, &bytes(&[1.0, 2.0, 3.0]), vec![0, 2], bytes(&[0.5, -3.0])),
            bytes(&[1.5, 2.0, 0.0])
        );
        let halves =
            |numbers: &[f32]| numbers.iter().flat_map(|n| bf16::from_f32(*n).to_le_bytes()).collect::<Vec<u8>>();
        // 256 has steps of 2 in BF16: 257 lies between 256 and 258 and goes to the even one, 259 to 260.
        assert_eq!(
            add(Number::BF16, &halves(&[256.0, 258.0]), vec![0, 1], halves(&[1.0, 1.0])),
            halves(&[256.0, 260.0])
        );
        let halves =
            |numbers: &[f32]| numbers.iter().flat_map(|n| f16::from_f32(*n).to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(
            add(Number::F16, &halves(&[65504.0, 0.1]), vec![0, 1], halves(&[65504.0, 0.2])),
            halves(&[f32::INFINITY, f16::from_f32(0.1).to_f32() + f16::from_f32(0.2).to_f32()])
        );
        let infinite = bytes(&[f32::INFINITY]);
        assert_eq!(add(Number::F32, &infinite, vec![0], bytes(&[f32::NEG_INFINITY])), bytes(&[f32::NAN]));
        let odd = f32::from_bits(0xffc1_2345);
        assert_eq!(add(Number::F32, &bytes(&[odd, odd]), vec![0], bytes(&[1.0])), bytes(&[f32::NAN, odd]));
        assert_eq!(add(Number::I8, &[127, 1], vec![0], vec![1]), [128, 1]);
        assert_eq!(add(Number::I8, &[1, 1], vec![1, 1, 1], vec![1, 2, 3]), [1, 7], "named three times");
        assert_eq!(
            add(Number::U64, &u64::MAX.to_le_bytes(), vec![0], 2_u64.to_le_bytes().to_vec()),
            1_u64.to_le_bytes()
        );
    }

    #[test]
    fn an_element_that_is_added_to_more_often_than_fits_a_request_is_refused() {
        let check = |times: usize| {
            let rule = PatchRule::Add { number: Number::U8 };
            let patch = UnitPatch { rule, elements: vec![3; times], values: vec![1; times] };
            DeriveUnit { unit: 0, base_unit: 0, bytes: 4, blake3: None, patch: Some(&patch) }.check()
        };
        check(ENTRIES_MAX).unwrap();
        assert!(check(ENTRIES_MAX + 1).unwrap_err().contains("element 3 of unit 0"));
    }

    #[test]
    fn many_entries_and_many_units_are_cut_into_requests_that_fit() {
        let count = ENTRIES_MAX as u64 * 3 + 10;
        let patch = UnitPatch {
            rule: PatchRule::Overwrite { item_bytes: 8 },
            elements: (0..count).collect(),
            values: vec![9; count as usize * 8],
        };
        let base = vec![1; count as usize * 8 + 100];
        let unit = DeriveUnit { unit: 0, base_unit: 0, bytes: base.len() as u64, blake3: None, patch: Some(&patch) };
        let cut = requests(&[unit], DERIVE_BYTES_MAX);
        assert!(cut.len() > 1 && cut.iter().all(|request| request.payload.len() as u64 <= DATA_BYTES_MAX));
        let whole = made(&base, &cut);
        assert!(whole[..count as usize * 8].iter().all(|byte| *byte == 9) && whole[count as usize * 8..] == [1; 100]);

        let small = |unit| DeriveUnit { unit, base_unit: unit, bytes: 0, blake3: None, patch: None };
        let units: Vec<_> = (0..DERIVED_RANGES_MAX as u32 + 1).map(small).collect();
        let sizes: Vec<usize> = requests(&units, DERIVE_BYTES_MAX).iter().map(|request| request.ranges.len()).collect();
        assert_eq!(sizes, [DERIVED_RANGES_MAX, 1]);
        let large = DeriveUnit { bytes: 201, ..small(7) };
        let ends =
            requests(&[large], 100).iter().flat_map(|r| &r.ranges).map(|r| r.offset + r.bytes).collect::<Vec<_>>();
        assert_eq!(ends, [100, 200, 201]);
    }
}
