//! From deltas in the coordinates of whole tensors to patches of the base's units, where boxes lie one after the other and
//! tied tensors are one.

use std::collections::HashMap;

use ballast_schemas::BallastError;
use ballast_schemas::frame::{Number, PatchRule};
use ballast_schemas::manifest::{Fragment, Manifest, ROW_MAJOR};
use ballast_transfer::UnitPatch;
use serde_json::json;

use super::{Semantics, SparseDelta};

/// What the deltas change in each unit.
pub(super) fn lower(
    manifest: &Manifest,
    deltas: &[SparseDelta],
    semantics: Semantics,
) -> Result<HashMap<u32, UnitPatch>, BallastError> {
    let mut patches: HashMap<u32, UnitPatch> = HashMap::new();
    for delta in deltas {
        let rule = rule(manifest, delta, semantics)?;
        let fragments: Vec<&Fragment> = manifest.fragments_of(delta.tensor_id()).collect();
        let Some(unit) = fragments.first().map(|fragment| fragment.unit) else { continue };
        let elements = places(delta, &fragments)?;
        let patch = patches
            .entry(unit)
            .or_insert_with(|| UnitPatch { rule, elements: Vec::new(), values: Vec::new() });
        patch.elements.extend(elements);
        patch.values.extend_from_slice(delta.values());
    }
    for (unit, patch) in &mut patches {
        sort(patch);
        let twice = patch.elements.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        if let (Semantics::Overwrite, Some(element)) = (semantics, twice) {
            let names = manifest.affinity_groups().get(*unit as usize).map(|names| names.join(", "));
            let tensor = names.unwrap_or_default();
            let message = format!(
                "the deltas of tensor {tensor:?} overwrite element {element} of its storage twice; which is meant?"
            );
            return Err(BallastError::invalid(message).with_details(json!({ "tensor": tensor })));
        }
    }
    patches.retain(|_, patch| !patch.elements.is_empty());
    Ok(patches)
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
    if tensor.dtype != delta.dtype() {
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
        let mut rest = *element;
        for (coordinate, extent) in coordinates.iter_mut().zip(shape).rev() {
            *coordinate = rest % extent;
            rest /= extent;
        }
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
    let item = patch.rule.item_bytes() as usize;
    let mut order: Vec<usize> = (0..patch.elements.len()).collect();
    order.sort_by_key(|entry| patch.elements[*entry]);
    patch.values = order.iter().flat_map(|entry| &patch.values[entry * item..(entry + 1) * item]).copied().collect();
    patch.elements = order.into_iter().map(|entry| patch.elements[entry]).collect();
}
