//! Sparse deltas: a few changed elements of a few tensors become the next complete generation of a model (RFC, Relationship
//! to Existing RFCs). Unchanged units are copied inside the node, and of the others only the changed elements travel.
//!
//! A delta belongs between two generations. It is applied to its base and never to what was made of it before, and its
//! target can be published once: a delta that has been applied is refused, which additive deltas depend on.

mod lower;
mod object;

use std::collections::HashMap;
use std::sync::Arc;

use ballast_schemas::manifest::{Manifest, PlannedTensor};
use ballast_schemas::{BallastError, ErrorCode, RevisionIdentity, RevisionView, UpsertMode};
use ballast_transfer::UnitPatch;
use serde_json::json;

pub use object::{Members, SparseDelta};

use crate::base::BaseUse;
use crate::get::GetOptions;
use crate::names::newest_ready;
use crate::nodes::lanes;
use crate::progress::Progress;
use crate::put::PutReport;
use crate::reading::Reading;
use crate::source::{Data, Source};
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
    let before = store.weight_get_metadata(replacing).await?;
    let reading = Reading::open(store.gateway(), replacing, &GetOptions::default()).await?;
    let planned = plan(&reading, &before, deltas, semantics, expected_metadata_generation, &target);
    let manifest = reading.manifest().sha256();
    // While room is made for the target the base is not held: it may be what gives way.
    let released = reading.release().await;
    let (source, mut generation) = planned?;
    released?;
    let mut tries = if expected_metadata_generation.is_none() { STALE_TRIES } else { 0 };
    let writer = loop {
        let base = Some(BaseUse::Derive(replacing.clone(), manifest));
        let (source, options, progress) = (source.clone(), options.clone(), progress.clone());
        let begun = store.begin_upsert(source, replacing, target_generation, generation, options, base, progress).await;
        match begun {
            Err(error) if error.code == ErrorCode::StaleGeneration && tries > 0 => {
                tries -= 1;
                generation = store.weight_get_metadata(replacing).await?.metadata.metadata_generation;
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
    // The lease itself may have begun to bring an AUTO base into memory, which is no change that the caller has to look at.
    let warms_up = before.metadata.operation_id.is_none() && leased.operation_id.is_some();
    if let Some(expected) = expected
        && current != expected
        && !(warms_up && before.metadata.metadata_generation == expected && current == expected + 1)
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
    let (_, units) = source.clone().plan(target)?;
    for unit in &units {
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
    Ok((source, current))
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
