//! From deltas in the coordinates of whole tensors to patches of the base's units, where boxes lie one after the other and
//! tied tensors are one.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use ballast_schemas::BallastError;
use ballast_schemas::frame::{Number, PatchRule};
use ballast_schemas::manifest::{Fragment, Manifest, ROW_MAJOR};
use ballast_transfer::UnitPatch;
use serde_json::json;

use super::{Semantics, SparseDelta, side_by_side};

/// What the deltas change in each unit.
pub(super) fn lower(
    manifest: &Manifest,
    deltas: &[SparseDelta],
    semantics: Semantics,
) -> Result<HashMap<u32, UnitPatch>, BallastError> {
    let mut patches: HashMap<u32, UnitPatch> = HashMap::new();
    let mut sort_again = HashSet::new();
    for lowered in side_by_side(deltas, |delta| lower_one(manifest, delta, semantics)) {
        let Some((unit, patch)) = lowered? else { continue };
        match patches.entry(unit) {
            Entry::Vacant(place) => drop(place.insert(patch)),
            Entry::Occupied(mut before) => {
                before.get_mut().elements.extend(patch.elements);
                before.get_mut().values.extend(patch.values);
                sort_again.insert(unit);
            }
        }
    }
    for (unit, patch) in &mut patches {
        if sort_again.contains(unit) {
            sort(patch);
        }
        let twice = patch.elements.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        if let (Semantics::Overwrite, Some(element)) = (semantics, twice) {
            return Err(overwritten_twice(manifest, deltas, *unit, element));
        }
    }
    patches.retain(|_, patch| !patch.elements.is_empty());
    Ok(patches)
}

/// Says which element it is, in the coordinates of the tensor.
fn overwritten_twice(manifest: &Manifest, deltas: &[SparseDelta], unit: u32, element: u64) -> BallastError {
    let names = manifest.affinity_groups().get(unit as usize).map(|names| names.join(", ")).unwrap_or_default();
    let found = deltas.iter().find_map(|delta| {
        let fragments: Vec<&Fragment> = manifest.fragments_of(delta.tensor_id()).collect();
        fragments.first().filter(|fragment| fragment.unit == unit)?;
        let entry = places(delta, &fragments).ok()?.iter().position(|place| *place == element)?;
        let mut at = vec![0; delta.global_shape().len()];
        locate(delta.elements()[entry], delta.global_shape(), &mut at);
        Some((delta.tensor_id(), at))
    });
    let (tensor, at) = found.unwrap_or_default();
    BallastError::invalid(format!(
        "the deltas of tensor {names:?} overwrite the element at {at:?} twice; which is meant?"
    ))
    .with_details(json!({ "tensor": tensor, "coordinates": at }))
}

/// What one delta changes, sorted; `None` where that is nothing, or its tensor has no bytes.
fn lower_one(
    manifest: &Manifest,
    delta: &SparseDelta,
    semantics: Semantics,
) -> Result<Option<(u32, UnitPatch)>, BallastError> {
    let rule = rule(manifest, delta, semantics)?;
    let fragments: Vec<&Fragment> = manifest.fragments_of(delta.tensor_id()).collect();
    let Some(unit) = fragments.first().map(|fragment| fragment.unit) else { return Ok(None) };
    if delta.nnz() == 0 {
        return Ok(None);
    }
    let mut patch = UnitPatch { rule, elements: places(delta, &fragments)?, values: delta.values().to_vec() };
    sort(&mut patch);
    Ok(Some((unit, patch)))
}

/// Whether the delta fits the base's tensor, and what is done with its values.
fn rule(manifest: &Manifest, delta: &SparseDelta, semantics: Semantics) -> Result<PatchRule, BallastError> {
    let Some(tensor) = manifest.tensor(delta.tensor_id()) else {
        let (resource, generation) = (manifest.resource_id(), manifest.weight_generation());
        return Err(delta.refuse(format!("generation {generation} of {resource} has no such tensor")));
    };
    if tensor.layout_fingerprint != ROW_MAJOR {
        return Err(delta.refuse(format!("{} has no elements that could be addressed", tensor.dtype)));
    }
    // No values are of no type: an empty list has none.
    if tensor.dtype != delta.dtype() && delta.nnz() > 0 {
        return Err(delta.refuse(format!("its values are {}, the tensor is {}", delta.dtype(), tensor.dtype)));
    }
    if tensor.global_shape != delta.global_shape() {
        let (found, expected) = (delta.global_shape(), &tensor.global_shape);
        return Err(delta.refuse(format!("its global_shape is {found:?}, the tensor is {expected:?}")));
    }
    match semantics {
        Semantics::Overwrite => Ok(PatchRule::Overwrite { item_bytes: delta.item_bytes() }),
        Semantics::Additive => match Number::from_dtype(&tensor.dtype) {
            Some(number) => Ok(PatchRule::Add { number }),
            None => Err(delta.refuse(format!("{} can not be added to, only overwritten", tensor.dtype))),
        },
    }
}

/// The coordinates of a row-major place in a tensor of this shape.
fn locate(mut element: u64, shape: &[u64], coordinates: &mut [u64]) {
    for (coordinate, extent) in coordinates.iter_mut().zip(shape).rev() {
        *coordinate = element % extent;
        element /= extent;
    }
}

/// The place of each entry in the unit, in whole elements.
fn places(delta: &SparseDelta, fragments: &[&Fragment]) -> Result<Vec<u64>, BallastError> {
    let item = u64::from(delta.item_bytes());
    let shape = delta.global_shape();
    if let [whole] = fragments {
        let first = whole.object_offset / item;
        return Ok(delta.elements().iter().map(|element| first + element).collect());
    }
    let mut coordinates = vec![0; shape.len()];
    let place = |element: &u64| {
        locate(*element, shape, &mut coordinates);
        // The fragments cover the tensor, so that there is one.
        fragments.iter().find_map(|fragment| {
            let mut within = 0;
            for ((coordinate, offset), extent) in
                coordinates.iter().zip(&fragment.global_offset).zip(&fragment.local_shape)
            {
                let local = coordinate.checked_sub(*offset).filter(|local| local < extent)?;
                within = within * extent + local;
            }
            Some(fragment.object_offset / item + within)
        })
    };
    let places: Option<Vec<u64>> = delta.elements().iter().map(place).collect();
    places.ok_or_else(|| delta.refuse("an entry lies in none of the tensor's boxes"))
}

/// Sorts entries by their place; those of one place stay in their order.
fn sort(patch: &mut UnitPatch) {
    if patch.elements.is_sorted() {
        return;
    }
    let highest = patch.elements.iter().copied().max().unwrap_or(0);
    let entries = (0..).zip(&patch.elements);
    if u32::try_from(highest).is_ok() && u32::try_from(patch.elements.len()).is_ok() {
        // Place and entry in one word: half the memory to move.
        let words: Vec<u64> = entries.map(|(entry, element): (u64, _)| element << 32 | entry).collect();
        let sorted = radix_sort(words, highest, |word| word >> 32);
        put_in_order(patch, sorted.into_iter().map(|word| word as u32 as usize));
    } else {
        let pairs: Vec<(u64, u64)> = entries.map(|(entry, element)| (*element, entry)).collect();
        let sorted = radix_sort(pairs, highest, |pair| pair.0);
        put_in_order(patch, sorted.into_iter().map(|(_, entry)| entry as usize));
    }
}

fn put_in_order(patch: &mut UnitPatch, order: impl ExactSizeIterator<Item = usize>) {
    let item = patch.rule.item_bytes() as usize;
    let mut elements = Vec::with_capacity(order.len());
    let mut values = Vec::with_capacity(patch.values.len());
    for entry in order {
        elements.push(patch.elements[entry]);
        values.extend_from_slice(&patch.values[entry * item..(entry + 1) * item]);
    }
    patch.elements = elements;
    patch.values = values;
}

/// Sorts by keys up to `highest`, a few bits at a time from the lowest ones: entries that are sorted by tile are far from
/// this order, and comparing them would take longer than sending them.
fn radix_sort<T: Copy + Default>(mut entries: Vec<T>, highest: u64, key: impl Fn(&T) -> u64) -> Vec<T> {
    const BITS: u32 = 11;
    let mut sorted = vec![T::default(); entries.len()];
    for shift in (0..u64::BITS).step_by(BITS as usize).take_while(|shift| highest >> shift > 0) {
        let digit = |entry: &T| (key(entry) >> shift) as usize & ((1 << BITS) - 1);
        let mut next = [0; 1 << BITS];
        entries.iter().for_each(|entry| next[digit(entry)] += 1);
        let mut start = 0;
        for count in &mut next {
            start += std::mem::replace(count, start);
        }
        for entry in &entries {
            let place = &mut next[digit(entry)];
            sorted[*place] = *entry;
            *place += 1;
        }
        std::mem::swap(&mut entries, &mut sorted);
    }
    entries
}

#[cfg(test)]
mod tests {
    use ballast_schemas::RevisionIdentity;
    use ballast_schemas::manifest::{ManifestPlan, PlannedTensor, Tensor};
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::Members;
    use super::*;

    /// A tensor of I16, cut at these rows and columns.
    fn manifest(rows: u64, columns: u64, row: u64, column: u64) -> Manifest {
        let mut fragments = Vec::new();
        for (top, height) in [(0, row), (row, rows - row)] {
            for (left, width) in [(0, column), (column, columns - column)] {
                if height > 0 && width > 0 {
                    fragments.push((vec![top, left], vec![height, width]));
                }
            }
        }
        let tensor = Tensor::plain("w", "I16", 2, vec![rows, columns]);
        let planned = PlannedTensor { tensor, aliases: vec!["tied".into()], fragments };
        let identity = RevisionIdentity::new("default", "default", "m", "main", 1).unwrap();
        ManifestPlan::new(&identity, vec![planned], Vec::new()).unwrap().seal(&[0]).unwrap()
    }

    /// Entries sorted by (tile, element), as an object.
    fn object(shape: [u64; 2], tile: [u64; 2], entries: &[([u64; 2], i16)]) -> SparseDelta {
        let tile_of = |at: &[u64; 2]| [at[0] / tile[0], at[1] / tile[1]];
        let mut entries = entries.to_vec();
        entries.sort_by_key(|(at, _)| (tile_of(at), *at));
        let (mut coords, mut pointers): (Vec<[u64; 2]>, Vec<u64>) = (Vec::new(), Vec::new());
        for (number, (at, _)) in entries.iter().enumerate() {
            if coords.last() != Some(&tile_of(at)) {
                coords.push(tile_of(at));
                pointers.push(number as u64);
            }
        }
        pointers.push(entries.len() as u64);
        let words = |numbers: &[u64]| numbers.iter().flat_map(|n| (*n as u32).to_le_bytes()).collect::<Vec<u8>>();
        let (nnz, tiles) = (entries.len(), coords.len());
        let metadata = json!({
            "schema": "mooncake.sparse_object", "version": 1, "coordinate_space": "global", "tensor_id": "w",
            "global_shape": shape, "global_offset": [0, 0], "local_shape": shape, "tile_shape": tile,
            "base_generation": 1, "delta_generation": 2, "index_dtype": "uint32", "value_dtype": "int16",
            "source_placement": [], "placement_policy": "replicate", "duplicate_semantics": "additive",
            "members": {
                "indices": {"dtype": "uint32", "shape": [nnz, 2]}, "values": {"dtype": "int16", "shape": [nnz]},
                "tile_coords": {"dtype": "uint32", "shape": [tiles, 2]}, "tile_ptr": {"dtype": "uint64", "shape": [tiles + 1]},
            },
        });
        let members = Members {
            indices: &words(&entries.iter().flat_map(|(at, _)| *at).collect::<Vec<_>>()),
            values: &entries.iter().flat_map(|(_, value)| value.to_le_bytes()).collect::<Vec<u8>>(),
            tile_coords: &words(&coords.concat()),
            tile_ptr: &pointers.iter().flat_map(|pointer| pointer.to_le_bytes()).collect::<Vec<u8>>(),
        };
        SparseDelta::new(&metadata.to_string(), &members).unwrap()
    }

    proptest! {
        #[test]
        fn every_entry_finds_its_element_in_whichever_box_it_lies(
            rows in 1_u64..12, columns in 1_u64..12, row in 0_u64..12, column in 0_u64..12,
            tile in [1_u64..8, 1_u64..8],
            entries in prop::collection::vec(([0_u64..12, 0_u64..12], any::<i16>()), 0..40),
            additive in any::<bool>(),
        ) {
            let manifest = manifest(rows, columns, row.min(rows), column.min(columns));
            let mut entries: Vec<([u64; 2], i16)> =
                entries.into_iter().map(|(at, value)| ([at[0] % rows, at[1] % columns], value)).collect();
            if !additive {
                let mut seen = std::collections::HashSet::new();
                entries.retain(|(at, _)| seen.insert(*at));
            }
            // Brute force, element by element in the whole tensor.
            let mut whole = vec![0_i16; (rows * columns) as usize];
            for (at, value) in &entries {
                let element = &mut whole[(at[0] * columns + at[1]) as usize];
                *element = if additive { element.wrapping_add(*value) } else { *value };
            }
            let semantics = if additive { Semantics::Additive } else { Semantics::Overwrite };
            let delta = object([rows, columns], tile, &entries);
            prop_assert_eq!(delta.nnz(), entries.len());
            let patches = lower(&manifest, &[delta], semantics).unwrap();
            let mut unit = vec![0_i16; (manifest.units()[0].extent_bytes / 2) as usize];
            if let Some(patch) = patches.get(&0) {
                prop_assert!(patch.elements.is_sorted());
                for (element, value) in patch.elements.iter().zip(patch.values.as_chunks::<2>().0) {
                    let (element, value) = (&mut unit[*element as usize], i16::from_le_bytes(*value));
                    *element = if additive { element.wrapping_add(value) } else { value };
                }
            }
            for fragment in manifest.fragments() {
                let [top, left] = fragment.global_offset[..] else { unreachable!() };
                let width = fragment.local_shape[1];
                for at in 0..fragment.nbytes / 2 {
                    let expected = whole[((top + at / width) * columns + left + at % width) as usize];
                    prop_assert_eq!(unit[(fragment.object_offset / 2 + at) as usize], expected);
                }
            }
        }
    }

    #[test]
    fn an_element_is_overwritten_by_one_delta_only() {
        let manifest = manifest(4, 4, 2, 2);
        let one = object([4, 4], [4, 4], &[([3, 3], 1)]);
        let error = lower(&manifest, &[one.clone(), one.clone()], Semantics::Overwrite).unwrap_err();
        assert!(error.message.contains("[3, 3] twice") && error.message.contains("tied, w"), "{error}");
        assert_eq!(lower(&manifest, &[one.clone(), one], Semantics::Additive).unwrap()[&0].elements.len(), 2);
    }

    proptest! {
        #[test]
        fn entries_are_sorted_by_place_and_those_of_one_place_keep_their_order(
            places in prop::collection::vec(0_u64..40, 0..200), scale in prop::sample::select(vec![1_u64, 1 << 9, 1 << 30, 1 << 50]),
        ) {
            let elements: Vec<u64> = places.iter().map(|place| place * scale).collect();
            let values: Vec<u8> = (0_u16..).take(elements.len()).flat_map(u16::to_le_bytes).collect();
            let mut patch = UnitPatch { rule: PatchRule::Overwrite { item_bytes: 2 }, elements: elements.clone(), values };
            sort(&mut patch);
            let mut expected: Vec<(u64, u16)> = elements.into_iter().zip(0..).collect();
            expected.sort_by_key(|(element, _)| *element);
            let found = patch.elements.iter().copied().zip(patch.values.as_chunks::<2>().0.iter().map(|value| u16::from_le_bytes(*value)));
            prop_assert_eq!(found.collect::<Vec<_>>(), expected);
        }
    }
}
