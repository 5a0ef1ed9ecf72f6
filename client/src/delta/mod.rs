//! Sparse deltas: a few changed elements of a few tensors become the next complete generation of a model (RFC, Relationship
//! to Existing RFCs). Unchanged units are copied inside the node, and of the others only the changed elements travel.
//!
//! A delta belongs between two generations. It is applied to its base and never to what was made of it before, and its
//! target can be published once: a delta that has been applied is refused, which additive deltas depend on.

mod lower;
mod object;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ballast_schemas::manifest::{Fragment, Manifest, ManifestPlan, PlannedTensor};
use ballast_schemas::{BallastError, ErrorCode, RevisionIdentity, RevisionView, UpsertMode, WeightRevisionMetadata};
use ballast_transfer::UnitPatch;
use serde_json::json;

pub use object::{Members, SparseDelta};

use crate::admin::Admin;
use crate::base::BaseUse;
use crate::get::GetOptions;
use crate::names::newest_ready;
use crate::nodes::lanes;
use crate::progress::Progress;
use crate::put::PutReport;
use crate::reading::Reading;
use crate::source::{Data, Source, UnitSource};
use crate::store::{UpsertOptions, WeightStore};

/// How often the base's metadata generation is read again when the caller did not say which it expects.
const STALE_TRIES: u32 = 10;

/// What a delta's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Semantics {
    /// The new elements.
    Overwrite,
    /// What is added to the base's elements. Halves (F16, BF16) are added as 32-bit floats and rounded once, to nearest
    /// even; whole numbers wrap; F8, BOOL and C64 can only be overwritten. An element that is named more than once is added
    /// to in the order of the entries.
    Additive,
}

/// Applies deltas to a base and publishes the complete generation that results, in the base's place (PUT_FIRST). All of
/// them lead from the base's generation to the same one. The base is held under a lease while the target is made.
///
/// `expected_metadata_generation` is the base's, as for an upsert; `None` takes it as it is now.
///
/// # Errors
/// `INVALID_ARGUMENT` naming the tensor: it is not in the base, has another dtype or shape, or an element is overwritten
/// twice. `STALE_GENERATION` when the delta is for another base, or its base is no longer the current generation: the delta
/// was applied before, or something else took the base's place. `CONFLICT` when its target has been published before all the
/// same. What a lease and an upsert say. The import is given up then, and the lease released: nothing of the target stays.
pub async fn upsert(
    store: &WeightStore,
    deltas: &[SparseDelta],
    semantics: Semantics,
    replacing: &RevisionIdentity,
    expected_metadata_generation: Option<u64>,
    options: UpsertOptions,
    progress: Progress,
) -> Result<PutReport, BallastError> {
    match apply(store, deltas, semantics, replacing, expected_metadata_generation, options, progress).await {
        Err(error) => Err(stale_or(store, deltas, replacing, error).await),
        applied => applied,
    }
}

async fn apply(
    store: &WeightStore,
    deltas: &[SparseDelta],
    semantics: Semantics,
    replacing: &RevisionIdentity,
    expected_metadata_generation: Option<u64>,
    options: UpsertOptions,
    progress: Progress,
) -> Result<PutReport, BallastError> {
    let target_generation = check_generations(deltas, replacing, semantics)?;
    if options.mode != UpsertMode::PutFirst {
        return Err(BallastError::invalid("a delta needs its base until the target is READY: use PUT_FIRST"));
    }
    let target = replacing.with_generation(target_generation);
    expect_unpublished(store, &target).await?;
    // A claim that is still open goes on under the generation that it was begun with, wherever its base stands by now.
    let begun = match &options.request_id {
        Some(request_id) => claim_of(store, replacing, &target, request_id).await?,
        None => None,
    };
    let begun = begun.filter(|begun| expected_metadata_generation.is_none_or(|expected| expected <= *begun));
    let expected = expected_metadata_generation.filter(|_| begun.is_none());
    let before = store.weight_get_metadata(replacing).await?;
    let reading = Reading::open(store.gateway(), replacing, &GetOptions::default()).await?;
    let planned = plan(&reading, &before, deltas, semantics, expected, &target);
    let manifest = reading.manifest().sha256();
    // While room is made for the target the base is not held: it may be what gives way.
    let released = reading.release().await;
    let (source, current) = planned?;
    released?;
    let mut generation = begun.unwrap_or(current);
    let mut tries = STALE_TRIES;
    let writer = loop {
        let base = Some(BaseUse::Derive(replacing.clone(), manifest));
        let (source, options, progress) = (source.clone(), options.clone(), progress.clone());
        let begun = store.begin_upsert(source, replacing, target_generation, generation, options, base, progress).await;
        match begun {
            Err(error) if error.code == ErrorCode::StaleGeneration && tries > 0 => {
                tries -= 1;
                let now = store.weight_get_metadata(replacing).await?.metadata;
                if expected.is_some() && !has_only_moved(&before.metadata, &now) {
                    return Err(error);
                }
                generation = now.metadata_generation;
            }
            begun => break begun?,
        }
    };
    writer.commit().await
}

/// The generation that every delta leads to.
fn check_generations(
    deltas: &[SparseDelta],
    replacing: &RevisionIdentity,
    semantics: Semantics,
) -> Result<u64, BallastError> {
    let first = deltas.first().ok_or_else(|| BallastError::invalid("there is no delta to apply"))?;
    for delta in deltas {
        let tensor = delta.tensor_id();
        if delta.base_generation() != replacing.weight_generation {
            let message = format!(
                "the delta of tensor {tensor:?} is for generation {}, not for {replacing}; name the base that it was made on",
                delta.base_generation()
            );
            return Err(BallastError::new(ErrorCode::StaleGeneration, message).with_details(json!({
                "tensor": tensor,
                "base_generation": delta.base_generation(),
                "found_generation": replacing.weight_generation,
            })));
        }
        if delta.delta_generation() != first.delta_generation() {
            let (leads, other) = (delta.delta_generation(), first.delta_generation());
            return Err(delta
                .refuse(format!("it leads to generation {leads}, that of tensor {:?} to {other}", first.tensor_id())));
        }
        if let Some(apply) = delta.semantics().filter(|apply| *apply != semantics) {
            return Err(delta.refuse(format!("it says of itself that it is {apply:?}, and was to be {semantics:?}")));
        }
    }
    Ok(first.delta_generation())
}

/// What a delta failed of, or that it came too late: the moment at which its base stops to be current may be any.
async fn stale_or(
    store: &WeightStore,
    deltas: &[SparseDelta],
    base: &RevisionIdentity,
    error: BallastError,
) -> BallastError {
    let may_be_late = matches!(error.code, ErrorCode::NotFound | ErrorCode::NotReady | ErrorCode::Conflict);
    let (true, Some(delta)) = (may_be_late, deltas.first()) else { return error };
    let Ok(current) = newest_ready(store, &base.lineage()).await else { return error };
    let (wanted, current) = (base.weight_generation, current.identity.weight_generation);
    // Below a base that can not be read just now an older generation may be READY.
    if current == wanted || (current < wanted && error.code != ErrorCode::NotFound) {
        return error;
    }
    let tensor = delta.tensor_id();
    let message = format!(
        "the delta of tensor {tensor:?} is for {base}, and generation {current} is current: a delta is applied once, and to \
         what it was made on; make one on generation {current}"
    );
    BallastError::new(ErrorCode::StaleGeneration, message).with_details(json!({
        "tensor": tensor,
        "base_generation": wanted,
        "current_generation": current,
    }))
}

async fn expect_unpublished(store: &WeightStore, target: &RevisionIdentity) -> Result<(), BallastError> {
    match store.weight_get_metadata(target).await {
        Ok(view) if view.metadata.manifest.is_some() => {
            let message = format!(
                "{target} was published before ({}); make a delta that leads to a higher generation",
                view.metadata.availability
            );
            Err(BallastError::new(ErrorCode::Conflict, message)
                .with_details(json!({ "published": target.to_string() })))
        }
        Err(error) if error.code != ErrorCode::NotFound => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// The base's generation that an open replacement of this name was begun with.
async fn claim_of(
    store: &WeightStore,
    base: &RevisionIdentity,
    target: &RevisionIdentity,
    request_id: &str,
) -> Result<Option<u64>, BallastError> {
    match Admin::new(store.gateway().clone()).get_upsert(target, Some(request_id.to_owned())).await {
        Ok(claim) if claim.base == *base && claim.target == *target && !claim.phase.is_terminal() => {
            Ok(Some(claim.expected_base_generation))
        }
        Err(error) if error.code != ErrorCode::NotFound => Err(error),
        Ok(_) | Err(_) => Ok(None),
    }
}

/// Whether nothing has changed between two looks at a base but where its bytes are: the lease itself may bring an AUTO base into
/// memory, which begins and ends at any time and is no change that the caller has to look at.
fn has_only_moved(before: &WeightRevisionMetadata, now: &WeightRevisionMetadata) -> bool {
    (&before.instance, &before.manifest, before.availability, before.policy, before.retired)
        == (&now.instance, &now.manifest, now.availability, now.policy, now.retired)
}

/// What is sent, and the metadata generation that the base has.
fn plan(
    reading: &Reading,
    before: &RevisionView,
    deltas: &[SparseDelta],
    semantics: Semantics,
    expected: Option<u64>,
    target: &RevisionIdentity,
) -> Result<(Source, u64), BallastError> {
    let leased = reading.revision();
    let current = leased.metadata_generation;
    if let Some(expected) = expected
        && current != expected
        && !(before.metadata.metadata_generation == expected && has_only_moved(&before.metadata, leased))
    {
        let message = format!(
            "base {} is at metadata generation {current}, expected {expected}; read it again and decide anew",
            leased.identity
        );
        return Err(BallastError::new(ErrorCode::StaleGeneration, message)
            .with_details(json!({ "expected": expected, "current": current })));
    }
    let manifest = reading.manifest();
    let source = source(manifest, lower::lower(manifest, deltas, semantics)?);
    let (planned, units) = source.clone().plan(target)?;
    expect_same_places(manifest, &planned, &units)?;
    Ok((source, current))
}

/// Units are copied as they are and patched where their elements lie in the base: in the target they must lie there as well,
/// which of units that others have laid out is not certain.
fn expect_same_places(manifest: &Manifest, plan: &ManifestPlan, units: &[UnitSource]) -> Result<(), BallastError> {
    let place = |fragment: &Fragment| {
        let Fragment { tensor_id, global_offset, local_shape, object_offset, nbytes, .. } = fragment;
        (tensor_id.clone(), global_offset.clone(), local_shape.clone(), *object_offset, *nbytes)
    };
    let base_unit = |fragment: &Fragment| match units.get(fragment.unit as usize).map(|unit| &unit.data) {
        Some(Data::Base { unit, .. }) => Some(*unit),
        _ => None,
    };
    let in_base: HashSet<_> = manifest.fragments().iter().map(|found| (place(found), found.unit)).collect();
    let same = |planned: &&Fragment| base_unit(planned).is_some_and(|unit| in_base.contains(&(place(planned), unit)));
    if let Some(other) = plan.fragments().iter().find(|planned| !same(planned)) {
        let message = format!(
            "the parts of tensor {:?} lie in another order or at other places in the base than a put of ours lays them out: publish it in full once",
            other.tensor_id
        );
        return Err(BallastError::invalid(message).with_details(json!({ "tensor": other.tensor_id })));
    }
    for unit in units {
        let Data::Base { unit: base_unit, .. } = unit.data else { continue };
        let found = manifest.units().get(base_unit as usize).map_or(0, |unit| unit.extent_bytes);
        if unit.bytes != found {
            let message = format!(
                "tensor {:?} has {found} bytes in the base, the next generation needs {}: publish it in full once",
                unit.name, unit.bytes
            );
            return Err(BallastError::invalid(message).with_details(json!({ "tensor": unit.name })));
        }
    }
    Ok(())
}

/// The base once more, with what differs.
fn source(manifest: &Manifest, mut patches: HashMap<u32, UnitPatch>) -> Source {
    let mut source = Source::empty();
    for fragments in manifest.fragments().chunk_by(|a, b| a.unit == b.unit) {
        let first = &fragments[0];
        let Some(tensor) = manifest.tensor(&first.tensor_id) else { continue };
        let aliases = first.aliases.iter().filter(|name| **name != first.tensor_id).cloned().collect();
        let boxes = fragments.iter().map(|fragment| (fragment.global_offset.clone(), fragment.local_shape.clone()));
        let planned = PlannedTensor { tensor: tensor.clone(), aliases, fragments: boxes.collect() };
        let patch = patches.remove(&first.unit).map(Arc::new);
        source.push_planned(planned, Data::Base { unit: first.unit, patch });
    }
    for file in manifest.files() {
        source.push_file(file.path.clone(), file.nbytes, Data::Base { unit: file.unit, patch: None });
    }
    source
}

/// Does `work` for every item, on a few threads; the results are in the order of the items.
fn side_by_side<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let share = items.len().div_ceil(lanes()).max(1);
    let work = &work;
    std::thread::scope(|scope| {
        let started: Vec<_> =
            items.chunks(share).map(|own| scope.spawn(move || own.iter().map(work).collect::<Vec<R>>())).collect();
        let ended = started.into_iter().map(|thread| thread.join());
        ended.flat_map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
mod tests {
    use ballast_schemas::manifest::Tensor;
    use proptest::prelude::*;

    use super::*;

    const ROWS: u64 = 512;

    fn identity(generation: u64) -> RevisionIdentity {
        RevisionIdentity::new("default", "default", "m", "main", generation).unwrap()
    }

    /// A tensor of bytes in two boxes of the same size.
    fn manifest() -> Manifest {
        let fragments = vec![(vec![0], vec![ROWS / 2]), (vec![ROWS / 2], vec![ROWS / 2])];
        let tensor = Tensor::plain("w", "U8", 1, vec![ROWS]);
        let planned = PlannedTensor { tensor, aliases: Vec::new(), fragments };
        ManifestPlan::new(&identity(1), vec![planned], Vec::new()).unwrap().seal(&[0]).unwrap()
    }

    #[test]
    fn a_base_whose_parts_lie_in_another_order_is_refused_by_name() {
        let ours = manifest();
        let text = String::from_utf8(ours.to_canonical_bytes()).unwrap();
        let swapped = text.replace("\"object_offset\":0,", "\"object_offset\":x,");
        let swapped = swapped.replace("\"object_offset\":256,", "\"object_offset\":0,").replace(":x,", ":256,");
        let theirs = Manifest::parse(swapped.as_bytes()).unwrap();
        assert_ne!(theirs, ours, "each of them is a manifest");
        let places = |manifest: &Manifest| {
            let (plan, units) = source(manifest, HashMap::new()).plan(&identity(2)).unwrap();
            expect_same_places(manifest, &plan, &units)
        };
        places(&ours).unwrap();
        let error = places(&theirs).unwrap_err();
        assert!(error.code == ErrorCode::InvalidArgument && error.details["tensor"] == "w", "{error}");
        assert!(error.message.contains("publish it in full once"), "{error}");
    }

    proptest! {
        #[test]
        fn whatever_the_members_of_an_object_hold_it_is_refused_or_lies_in_its_tensor(
            indices in prop::collection::vec(0_u16..600, 0..20),
            pointers in prop::collection::vec(0_u8..20, 0..6),
            tiles in prop::collection::vec(0_u8..9, 0..6),
            values in prop::collection::vec(any::<u8>(), 0..20),
            // Mostly what the metadata says fits what there is.
            nnz in prop::option::of(0_usize..20),
            in_order in any::<bool>(),
        ) {
            let (mut indices, mut pointers, mut tiles) = (indices, pointers, tiles);
            if in_order {
                pointers.sort_unstable();
                indices.sort_unstable();
                indices.truncate(values.len());
                tiles = indices.iter().map(|at| (at / 64) as u8).collect();
                tiles.dedup();
                let first_of = |tile: &u8| indices.partition_point(|at| at / 64 < u16::from(*tile)) as u8;
                pointers = tiles.iter().map(first_of).chain([indices.len() as u8]).collect();
            }
            let nnz = nnz.unwrap_or(indices.len());
            let metadata = json!({
                "schema": "mooncake.sparse_object", "version": 1, "coordinate_space": "global", "tensor_id": "w",
                "global_shape": [ROWS], "global_offset": [0], "local_shape": [ROWS], "tile_shape": [64],
                "base_generation": 1, "delta_generation": 2, "index_dtype": "uint16", "value_dtype": "uint8",
                "members": {
                    "indices": {"dtype": "uint16", "shape": [nnz, 1]}, "values": {"dtype": "uint8", "shape": [nnz]},
                    "tile_coords": {"dtype": "uint8", "shape": [tiles.len(), 1]},
                    "tile_ptr": {"dtype": "uint8", "shape": [pointers.len()]},
                },
            });
            let indices: Vec<u8> = indices.iter().flat_map(|at| at.to_le_bytes()).collect();
            let values = if in_order { &values[..indices.len() / 2] } else { &values };
            let members = Members { indices: &indices, values, tile_coords: &tiles, tile_ptr: &pointers };
            if let Ok(delta) = SparseDelta::new(&metadata.to_string(), &members) {
                for (_, patch) in lower::lower(&manifest(), &[delta], Semantics::Additive).unwrap() {
                    prop_assert!(patch.elements.is_sorted() && patch.elements.last() < Some(&ROWS));
                    prop_assert_eq!(patch.elements.len(), patch.values.len());
                }
            }
        }
    }
}
