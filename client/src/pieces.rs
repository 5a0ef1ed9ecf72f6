//! Units whose bytes come later, box by box and in any order: which box lies where in its unit, and the unit's checksum from
//! those of its boxes (ARCHITECTURE.md, One layout, two tiers). The bytes themselves are not kept.

use std::collections::HashMap;

use ballast_schemas::BallastError;
use ballast_schemas::frame::{OfferedFragment, Offers};
use ballast_schemas::manifest::ManifestPlan;
use ballast_transfer::{checksum, of_parts};

use crate::source::{Data, UnitSource};

/// Boxes listed in one error.
const NAMES_SHOWN: usize = 3;

/// One box.
#[derive(Clone, Debug)]
struct Piece {
    tensor: String,
    offset: Vec<u64>,
    shape: Vec<u64>,
    /// First byte in its unit.
    unit_offset: u64,
    bytes: u64,
    checksum: Option<u64>,
}

/// Every box that comes later.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pieces {
    /// By unit, in the order of their bytes.
    of_unit: HashMap<u32, Vec<Piece>>,
    /// The unit of a tensor, under each of its names.
    units: HashMap<String, u32>,
}

/// Where a box goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PiecePlace {
    pub(crate) unit: u32,
    pub(crate) unit_offset: u64,
    piece: usize,
}

impl Pieces {
    pub(crate) fn new(plan: &ManifestPlan, units: &[UnitSource]) -> Self {
        let mut pieces = Self::default();
        for fragment in plan.fragments() {
            if !units.get(fragment.unit as usize).is_some_and(|unit| matches!(unit.data, Data::Later)) {
                continue;
            }
            for name in fragment.aliases.iter().chain([&fragment.tensor_id]) {
                if !pieces.units.contains_key(name) {
                    pieces.units.insert(name.clone(), fragment.unit);
                }
            }
            pieces.of_unit.entry(fragment.unit).or_default().push(Piece {
                tensor: fragment.tensor_id.clone(),
                offset: fragment.global_offset.clone(),
                shape: fragment.local_shape.clone(),
                unit_offset: fragment.object_offset,
                bytes: fragment.nbytes,
                checksum: None,
            });
        }
        for of_unit in pieces.of_unit.values_mut() {
            // Of the empty box of an uneven split there is nothing to send; an empty tensor is given like any other.
            let is_split = of_unit.len() > 1;
            for piece in of_unit.iter_mut().filter(|piece| is_split && piece.bytes == 0) {
                piece.checksum = Some(checksum(&[]));
            }
            of_unit.sort_by_key(|piece| piece.unit_offset);
        }
        pieces
    }

    /// Where the box of a tensor goes; without one: the whole tensor, which then is one box.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` naming the tensor.
    pub(crate) fn find(
        &self,
        name: &str,
        wanted: Option<(&[u64], &[u64])>,
        bytes: u64,
    ) -> Result<PiecePlace, BallastError> {
        let unknown = || BallastError::invalid(format!("the source has no tensor {name:?} whose bytes come later"));
        let unit = *self.units.get(name).ok_or_else(unknown)?;
        let all = self.of_unit.get(&unit).ok_or_else(unknown)?;
        let found = match (wanted, all.as_slice()) {
            (None, [_]) => Some(0),
            (None, _) => {
                let message = format!("tensor {name:?} was announced in {} boxes; put each by itself", all.len());
                return Err(BallastError::invalid(message));
            }
            (Some((offset, shape)), _) => all.iter().position(|piece| piece.offset == offset && piece.shape == shape),
        };
        let Some(at) = found else {
            let (offset, shape) = wanted.unwrap_or_default();
            let message = format!("tensor {name:?} was announced without a box of {shape:?} at {offset:?}");
            return Err(BallastError::invalid(message));
        };
        let piece = &all[at];
        if piece.bytes != bytes {
            let what = match wanted {
                Some((offset, _)) => format!("the box of tensor {name:?} at {offset:?}"),
                None => format!("tensor {name:?}"),
            };
            return Err(BallastError::invalid(format!("{what} has {} bytes, {bytes} were given", piece.bytes)));
        }
        Ok(PiecePlace { unit, unit_offset: piece.unit_offset, piece: at })
    }

    /// Notes that a box was sent.
    pub(crate) fn note(&mut self, place: PiecePlace, checksum: u64) {
        if let Some(piece) = self.of_unit.get_mut(&place.unit).and_then(|all| all.get_mut(place.piece)) {
            piece.checksum = Some(checksum);
        }
    }

    /// Every box that was given so far, with its checksum.
    pub(crate) fn given(&self) -> Vec<OfferedFragment> {
        let all = self.of_unit.iter().flat_map(|(unit, all)| all.iter().map(|piece| (*unit, piece)));
        let given = all.filter(|(_, piece)| piece.bytes > 0).filter_map(|(unit, piece)| {
            let crc64 = piece.checksum?;
            Some(OfferedFragment { unit, offset: piece.unit_offset, bytes: piece.bytes, crc64 })
        });
        let mut given: Vec<OfferedFragment> = given.collect();
        given.sort_unstable_by_key(|fragment| (fragment.unit, fragment.offset));
        given
    }

    /// The tensor of the box that this byte is in, and how the box is called in a sentence.
    pub(crate) fn name_at(&self, unit: u32, unit_offset: u64) -> Option<(&str, String)> {
        let all = self.of_unit.get(&unit)?;
        let holds = |piece: &&Piece| (piece.unit_offset..piece.unit_offset + piece.bytes).contains(&unit_offset);
        let piece = all.iter().find(holds)?;
        let shown = match all.len() {
            1 => format!("tensor {:?}", piece.tensor),
            _ => format!("the box of {:?} at {:?} of tensor {:?}", piece.shape, piece.offset, piece.tensor),
        };
        Some((&piece.tensor, shown))
    }

    /// Boxes without a checksum: the tensor of each, and how it is called in a sentence.
    pub(crate) fn missing(&self) -> Vec<(&str, String)> {
        let all = self.of_unit.iter().flat_map(|(unit, all)| all.iter().map(|piece| (*unit, piece)));
        let missing = all.filter(|(_, piece)| piece.checksum.is_none());
        let mut missing: Vec<_> = missing.filter_map(|(unit, piece)| self.name_at(unit, piece.unit_offset)).collect();
        missing.sort_unstable();
        missing
    }

    /// Takes note of what a node holds, whoever has brought it.
    pub(crate) fn note_held(&mut self, offers: &Offers) {
        // What nobody can bring is there.
        for piece in self.of_unit.values_mut().flatten().filter(|piece| piece.bytes == 0) {
            piece.checksum = Some(checksum(&[]));
        }
        for held in offers.fragments.iter().filter(|offer| offer.held) {
            let OfferedFragment { unit, offset, bytes, crc64 } = held.fragment;
            let all = self.of_unit.get_mut(&unit).into_iter().flatten();
            for piece in all.filter(|piece| piece.unit_offset == offset && piece.bytes == bytes) {
                piece.checksum = Some(crc64);
            }
        }
    }

    /// Fills in the checksums of the units whose boxes have all been sent.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` naming tensors that are not complete.
    pub(crate) fn complete(&self, checksums: &mut [Option<u64>]) -> Result<(), BallastError> {
        let mut missing: Vec<(&str, String)> = Vec::new();
        for (unit, all) in &self.of_unit {
            if let Some(piece) = all.iter().find(|piece| piece.checksum.is_none()) {
                let shown = match all.len() {
                    1 => piece.tensor.clone(),
                    _ => format!("{} at {:?}", piece.tensor, piece.offset),
                };
                missing.push((&piece.tensor, shown));
            } else if let Some(checksum) = checksums.get_mut(*unit as usize) {
                *checksum = Some(whole(all));
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        missing.sort_unstable();
        let shown: Vec<&str> = missing.iter().take(NAMES_SHOWN).map(|(_, shown)| shown.as_str()).collect();
        let message = format!(
            "{} of {} tensors were never given their bytes ({}{}); put them before the commit",
            missing.len(),
            checksums.len(),
            shown.join(", "),
            if missing.len() > NAMES_SHOWN { ", …" } else { "" }
        );
        let names: Vec<&str> = missing.iter().take(100).map(|(name, _)| *name).collect();
        Err(BallastError::invalid(message)
            .with_details(serde_json::json!({"missing": missing.len(), "tensors": names})))
    }
}

/// The checksum of a unit's extent: its boxes with zeros between them.
fn whole(pieces: &[Piece]) -> u64 {
    let parts = pieces.iter().filter(|piece| piece.bytes > 0);
    let parts = parts.map(|piece| (piece.unit_offset, piece.bytes, piece.checksum.unwrap_or_default()));
    // The plan packs them: they neither overlap nor lie further apart.
    of_parts(parts).map_or(0, |(sum, _)| sum)
}

#[cfg(test)]
mod tests {
    use ballast_schemas::RevisionIdentity;
    use ballast_schemas::frame::FragmentOffer;

    use super::*;
    use crate::source::{ShardedTensor, Source};

    fn two_halves() -> (ManifestPlan, Vec<UnitSource>) {
        let half = |at: u64| (vec![at, 0], vec![3, 5]);
        let tensor = ShardedTensor {
            name: "w".into(),
            dtype: "F32".into(),
            shape: vec![6, 5],
            aliases: vec!["tied".into()],
            layer_id: None,
            expert_id: None,
            parallel_axes: vec![],
            fragments: vec![half(0), half(3), (vec![6, 0], vec![0, 5])],
        };
        let identity = RevisionIdentity::new("default", "default", "m", "main", 1).unwrap();
        Source::from_shards(vec![tensor]).unwrap().plan(&identity).unwrap()
    }

    #[test]
    fn boxes_in_any_order_give_the_checksum_of_the_padded_unit() {
        let (plan, units) = two_halves();
        assert_eq!((units.len(), units[0].bytes), (1, 256 + 60));
        let mut pieces = Pieces::new(&plan, &units);
        let mut extent = vec![0_u8; 256 + 60];
        for (at, fill) in [(3_u64, 7_u8), (0, 9)] {
            let place = pieces.find("tied", Some((&[at, 0], &[3, 5])), 60).unwrap();
            extent[place.unit_offset as usize..][..60].fill(fill);
            pieces.note(place, checksum(&[fill; 60]));
        }
        let mut checksums = vec![None];
        pieces.complete(&mut checksums).unwrap();
        assert_eq!(checksums, [Some(checksum(&extent))]);
    }

    #[test]
    fn what_nobody_can_bring_is_there_and_a_byte_is_called_by_its_box() {
        let (plan, units) = {
            let tensor = |name: &str, shape: Vec<u64>, fragments| ShardedTensor {
                name: name.into(),
                dtype: "F32".into(),
                shape,
                aliases: vec![],
                layer_id: None,
                expert_id: None,
                parallel_axes: vec![],
                fragments,
            };
            let halves = vec![(vec![0, 0], vec![3, 5]), (vec![3, 0], vec![3, 5])];
            let source = [tensor("none", vec![0, 5], vec![]), tensor("w", vec![6, 5], halves)];
            let identity = RevisionIdentity::new("default", "default", "m", "main", 1).unwrap();
            Source::from_shards(source.to_vec()).unwrap().plan(&identity).unwrap()
        };
        let mut pieces = Pieces::new(&plan, &units);
        let unit = pieces.find("w", Some((&[3, 0], &[3, 5])), 60).unwrap().unit;
        assert_eq!(pieces.name_at(unit, 256 + 59).unwrap().1, "the box of [3, 5] at [3, 0] of tensor \"w\"");
        assert_eq!(pieces.name_at(unit, 60), None);
        let held = |offset| FragmentOffer {
            fragment: OfferedFragment { unit, offset, bytes: 60, crc64: 7 },
            participant: 0,
            held: true,
            differs: None,
        };
        pieces.note_held(&Offers { participants: vec![], fragments: vec![held(0), held(256)] });
        let mut checksums = vec![None; units.len()];
        pieces.complete(&mut checksums).unwrap();
        assert_eq!(checksums[1 - unit as usize], Some(checksum(&[])));
    }

    #[test]
    fn what_was_not_announced_or_never_came_is_refused_by_name() {
        let (plan, units) = two_halves();
        let pieces = Pieces::new(&plan, &units);
        let refuse = |name: &str, wanted, bytes| pieces.find(name, wanted, bytes).unwrap_err().message;
        assert!(refuse("x", None, 60).contains("no tensor \"x\""));
        assert!(refuse("w", None, 120).contains("3 boxes"));
        assert!(refuse("w", Some((&[1, 0][..], &[3, 5][..])), 60).contains("at [1, 0]"));
        assert!(refuse("w", Some((&[0, 0][..], &[3, 5][..])), 59).contains("has 60 bytes, 59"));
        let error = pieces.complete(&mut [None]).unwrap_err();
        assert!(error.message.contains("never given") && error.message.contains("at [0, 0]"), "{error}");
    }
}
