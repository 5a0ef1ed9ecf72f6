//! Where the units of a replica in a bucket lie: which packs there are, which of them holds a unit, and in what pieces a range
//! of a segment is read. No requests are made here.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::bucket_index::Pack;
use crate::layout::{Extent, GroupLayout};

/// Bytes of a segment, and the object that holds them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The pack's name, and where in it. `None`: nothing holds them, and nobody asks for them.
    pub held: Option<(String, Range<u64>)>,
    pub segment: u32,
    pub range: Range<u64>,
}

/// The packs of a replica, those included that no index speaks of yet.
#[derive(Debug)]
pub(crate) struct Packs {
    /// The replica's name: another one once it was taken over.
    pub name: String,
    all: Vec<Pack>,
    /// For each unit the pack that holds it: the latest, of several.
    of_unit: Vec<Option<u32>>,
    /// How each pack looked when it was marked.
    marks: Vec<Option<String>>,
}

impl Packs {
    pub(crate) fn new(name: String, layout: &GroupLayout) -> Self {
        Self { name, all: Vec::new(), of_unit: vec![None; layout.unit_count() as usize], marks: Vec::new() }
    }

    pub(crate) fn set(&mut self, layout: &GroupLayout, packs: Vec<Pack>) {
        let before = std::mem::replace(self, Self::new(self.name.clone(), layout));
        let mut marks: BTreeMap<String, Option<String>> =
            before.all.into_iter().map(|pack| pack.name).zip(before.marks).collect();
        for pack in packs {
            let mark = marks.remove(&pack.name).flatten();
            self.add(layout, pack, mark);
        }
    }

    pub(crate) fn add(&mut self, layout: &GroupLayout, pack: Pack, mark: Option<String>) {
        let number = self.all.len() as u32;
        for (unit, extent) in extents_in(layout, pack.segment, &(pack.start..pack.start + pack.bytes)) {
            let range = extent.padded_range();
            if range.start >= pack.start && range.end <= pack.start + pack.bytes {
                self.of_unit[unit as usize] = Some(number);
            }
        }
        self.all.push(pack);
        self.marks.push(mark);
    }

    pub(crate) fn of(&self, unit: u32) -> Option<u32> {
        self.of_unit.get(unit as usize).copied().flatten()
    }

    /// The packs that hold these units, ascending and each once.
    pub(crate) fn holding(&self, units: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let mut numbers: Vec<u32> = units.into_iter().filter_map(|unit| self.of(unit)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Pack> {
        self.all.get(number as usize)
    }

    pub(crate) fn all(&self) -> &[Pack] {
        &self.all
    }

    /// How a pack looked when it was marked.
    pub(crate) fn mark_of(&self, number: u32) -> Option<&String> {
        self.marks.get(number as usize).and_then(Option::as_ref)
    }

    /// Remembers how a pack looks.
    pub(crate) fn mark(&mut self, number: u32, look: Option<String>) {
        if let Some(mark) = self.marks.get_mut(number as usize) {
            *mark = look;
        }
    }

    /// All units that these packs, ascending, hold.
    pub(crate) fn units_in(&self, numbers: &[u32]) -> Vec<u32> {
        let in_them = |held: &Option<u32>| held.is_some_and(|number| numbers.binary_search(&number).is_ok());
        (0..).zip(&self.of_unit).filter(|(_, held)| in_them(held)).map(|(unit, _)| unit).collect()
    }

    /// Where the bytes of a range lie, in pieces of at most `piece_bytes`.
    pub(crate) fn pieces(
        &self,
        layout: &GroupLayout,
        segment: u32,
        range: &Range<u64>,
        piece_bytes: u64,
    ) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for (unit, extent) in extents_in(layout, segment, range) {
            let unit_range = extent.padded_range();
            let (mut start, end) = (unit_range.start.max(range.start), unit_range.end.min(range.end));
            let pack = self.of(unit).and_then(|number| self.get(number));
            while start < end {
                let at = pack.map_or(0, |pack| start - pack.start);
                // What lies next to the last piece in the same object is read with it.
                if let Some(last) = pieces.last_mut()
                    && last.range.end == start
                    && last.range.end - last.range.start < piece_bytes
                    && last.held.as_ref().map(|(name, _)| name) == pack.map(|pack| &pack.name)
                {
                    let take = (end - start).min(piece_bytes - (last.range.end - last.range.start));
                    last.range.end += take;
                    if let Some((_, held)) = &mut last.held {
                        held.end += take;
                    }
                    start += take;
                    continue;
                }
                let take = (end - start).min(piece_bytes);
                let held = pack.map(|pack| (pack.name.clone(), at..at + take));
                pieces.push(Piece { held, segment, range: start..start + take });
                start += take;
            }
        }
        pieces
    }
}

/// The units with bytes in a range of a segment.
fn extents_in<'a>(
    layout: &'a GroupLayout,
    segment: u32,
    range: &Range<u64>,
) -> impl Iterator<Item = (u32, Extent)> + use<'a> {
    let units = layout.units_of(segment);
    let extents = &layout.extents()[units.start as usize..units.end as usize];
    let first = extents.partition_point(|extent| extent.padded_range().end <= range.start);
    let end = range.end;
    let found = (units.start + first as u32..).zip(&extents[first..]).map(|(unit, extent)| (unit, *extent));
    found.take_while(move |(_, extent)| extent.offset < end).filter(|(_, extent)| extent.bytes > 0)
}
