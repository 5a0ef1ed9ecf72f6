//! Short names (`minilm`, `ns/resource@revision#generation`) and what they stand for just now: the newest READY
//! generation, the next free one, and the replacement that leads from one to the other.

use std::time::{Duration, Instant};

use ballast_schemas::{
    Availability, BallastError, ClaimPhase, ErrorCode, IdentityError, LineageKey, ListRequest, ReplacementClaim,
    RevisionIdentity, UpsertMode, WeightRevisionMetadata,
};
use serde_json::json;

use crate::admin::Admin;
use crate::store::WeightStore;

const PAGE: u32 = 1000;
/// Generations named in one sentence, the newest first.
const GENERATIONS_SHOWN: usize = 3;
/// How long the next replacement waits for the base of the last one to go, and how often it looks: readers may hold it long.
const LAST_BASE_PATIENCE: Duration = Duration::from_secs(30);
const LAST_BASE_LOOK: Duration = Duration::from_millis(100);

fn invalid(error: IdentityError) -> BallastError {
    BallastError::invalid(error.to_string())
}

/// The revision that a short name stands for: the generation it names, or the newest READY one.
///
/// # Errors
/// `INVALID_ARGUMENT` for a name that does not parse, `NOT_FOUND` when nothing is READY under it.
pub async fn resolve(store: &WeightStore, name: &str) -> Result<RevisionIdentity, BallastError> {
    let (lineage, generation) = LineageKey::parse_short_name(name).map_err(invalid)?;
    match generation {
        Some(generation) => lineage.generation(generation).map_err(invalid),
        None => newest_ready(store, &lineage).await.map(|found| found.identity),
    }
}

/// The record of a lineage's newest READY generation.
pub(crate) async fn newest_ready(
    store: &WeightStore,
    lineage: &LineageKey,
) -> Result<WeightRevisionMetadata, BallastError> {
    let all = generations(store, lineage).await?;
    // Retired: about to be deleted, and closed to new readers.
    let ready = |found: &&WeightRevisionMetadata| found.availability == Availability::Ready && !found.retired;
    if let Some(found) = all.iter().rev().find(ready) {
        return Ok(found.clone());
    }
    Err(none_ready(lineage, &all))
}

/// The newest generations of a lineage, and how they stand.
fn shown(all: &[WeightRevisionMetadata]) -> String {
    let one =
        |found: &WeightRevisionMetadata| format!("#{} is {}", found.identity.weight_generation, found.availability);
    let newest: Vec<String> = all.iter().rev().take(GENERATIONS_SHOWN).map(one).collect();
    let more = if all.len() > GENERATIONS_SHOWN { ", …" } else { "" };
    format!("{}{more}", newest.join(", "))
}

/// An error that says of a revision that it is not there, with the generations that are. Any other is left as it is.
pub async fn explain_missing(
    store: &WeightStore,
    identity: &RevisionIdentity,
    mut error: BallastError,
) -> BallastError {
    if error.code != ErrorCode::NotFound {
        return error;
    }
    let lineage = identity.lineage();
    let Ok(all) = generations(store, &lineage).await else { return error };
    if all.iter().any(|found| found.identity == *identity) {
        return error;
    }
    error.message = match all.is_empty() {
        true => format!("there is no revision {identity}, and no other of {lineage}; `ballast ls` shows what there is"),
        false => format!("there is no revision {identity}: of {lineage}, {}", shown(&all)),
    };
    error
}

fn none_ready(lineage: &LineageKey, all: &[WeightRevisionMetadata]) -> BallastError {
    let message = match all.is_empty() {
        true => format!("there is no revision {lineage}; `ballast ls` shows what there is"),
        false => {
            let shown = shown(all);
            format!("no generation of {lineage} is READY ({shown}); wait for one, or name a generation with #")
        }
    };
    let details = json!({"lineage": lineage.to_string(), "generations": all.len()});
    BallastError::new(ErrorCode::NotFound, message).with_details(details)
}

/// Every record of a lineage, oldest generation first, tombstones among them.
async fn generations(store: &WeightStore, lineage: &LineageKey) -> Result<Vec<WeightRevisionMetadata>, BallastError> {
    let mut query = ListRequest {
        namespace: Some(lineage.namespace.clone()),
        resource_id: Some(lineage.resource_id.clone()),
        resource_prefix: None,
        revision: Some(lineage.revision.clone()),
        all: true,
        page_token: String::new(),
        limit: PAGE,
    };
    let mut found = Vec::new();
    loop {
        let page = store.weight_list(&lineage.tenant_id, &query).await?;
        found.extend(page.revisions);
        if page.next_page_token.is_empty() {
            found.sort_by_key(|record| record.identity.weight_generation);
            return Ok(found);
        }
        query.page_token = page.next_page_token;
    }
}

/// The generation that a put without one takes: one above everything that was ever published or is being imported.
///
/// # Errors
/// `GENERATION_EXHAUSTED` when there is none.
pub async fn next_generation(store: &WeightStore, lineage: &LineageKey) -> Result<RevisionIdentity, BallastError> {
    let all = generations(store, lineage).await?;
    let watermark = match all.last() {
        Some(last) => store.weight_get_metadata(&last.identity).await?.watermark,
        None => 0,
    };
    let next = next_after(&all, watermark).ok_or_else(|| {
        let message = format!("generation {} of {lineage} is the last there can be; choose another revision", u64::MAX);
        BallastError::new(ErrorCode::GenerationExhausted, message)
    })?;
    lineage.generation(next).map_err(invalid)
}

fn next_after(all: &[WeightRevisionMetadata], watermark: u64) -> Option<u64> {
    // A tombstone that was never READY blocks nothing: its generation is free.
    let taken = all.iter().filter(|record| record.availability != Availability::Deleted || record.manifest.is_some());
    taken.map(|record| record.identity.weight_generation).max().unwrap_or(0).max(watermark).checked_add(1)
}

/// Everything that [`WeightStore::weight_upsert`] needs to replace a lineage's newest generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// What is replaced.
    pub base: RevisionIdentity,
    /// The generation that takes its place.
    pub target_generation: u64,
    /// The base's metadata generation.
    pub expected_metadata_generation: u64,
    /// How.
    pub mode: UpsertMode,
    /// The id of the claim to go on with; `None`: derived from the arguments.
    pub request_id: Option<String>,
    /// An unfinished replacement is gone on with.
    pub resumed: bool,
}

/// Plans the replacement of the newest READY generation by the next one (or by `target_generation`). A replacement that
/// was begun and not finished, or given up before its target was there, is gone on with. One whose target is there while its
/// base still goes is waited for, unless that target is the one that is named.
///
/// # Errors
/// `NOT_FOUND` when there is nothing to replace; `BUSY` when another replacement is under way, or the last base does not go.
pub async fn plan_replacement(
    store: &WeightStore,
    lineage: &LineageKey,
    target_generation: Option<u64>,
    mode: UpsertMode,
) -> Result<Replacement, BallastError> {
    let deadline = Instant::now() + LAST_BASE_PATIENCE;
    loop {
        let all = generations(store, lineage).await?;
        let Some(last) = all.last() else { return Err(none_ready(lineage, &all)) };
        let claim = match Admin::new(store.gateway().clone()).get_upsert(&last.identity, None).await {
            Ok(claim) => Some(claim),
            Err(error) if error.code == ErrorCode::NotFound => None,
            Err(error) => return Err(error),
        };
        if let Some(resumed) = claim.as_ref().and_then(|claim| resume(claim, &all, target_generation, mode)) {
            return Ok(resumed);
        }
        let Some(claim) = claim.filter(|claim| !claim.phase.is_terminal()) else { break };
        if target_generation.is_none() && is_published(&claim.target, &all) && Instant::now() < deadline {
            tokio::time::sleep(LAST_BASE_LOOK).await;
            continue;
        }
        let message = format!(
            "{} is being replaced by generation {} ({}, {}); wait for its end, give the same mode and generation to go on with it, or abort it",
            claim.base, claim.target.weight_generation, claim.mode, claim.phase
        );
        let details = json!({"request_id": claim.request_id, "phase": claim.phase, "target_generation": claim.target.weight_generation});
        return Err(BallastError::new(ErrorCode::Busy, message).with_details(details));
    }
    let base = newest_ready(store, lineage).await?;
    let target = match target_generation {
        Some(generation) => generation,
        None => next_generation(store, lineage).await?.weight_generation,
    };
    Ok(Replacement {
        base: base.identity,
        target_generation: target,
        expected_metadata_generation: base.metadata_generation,
        mode,
        request_id: None,
        resumed: false,
    })
}

fn is_published(identity: &RevisionIdentity, all: &[WeightRevisionMetadata]) -> bool {
    all.iter().any(|record| record.identity == *identity && record.manifest.is_some())
}

/// The claim to go on with, if it is the one that is asked for and its target is not there yet.
fn resume(
    claim: &ReplacementClaim,
    all: &[WeightRevisionMetadata],
    target: Option<u64>,
    mode: UpsertMode,
) -> Option<Replacement> {
    // Without a number the next one is meant: not one that is there.
    let named =
        target.map_or_else(|| !is_published(&claim.target, all), |target| target == claim.target.weight_generation);
    let asked_for = claim.mode == mode && named;
    let wants_target = match claim.phase {
        ClaimPhase::Completed => false,
        // Given up: its base must still be what it was for the same request to be accepted.
        ClaimPhase::Aborted => all.iter().any(|record| {
            record.identity == claim.base
                && (record.metadata_generation == claim.expected_base_generation
                    || record.availability == Availability::Deleted)
                && (record.availability != Availability::Deleted || mode == UpsertMode::DeleteFirst)
        }),
        _ => true,
    };
    // An aborted claim whose lineage has moved on is history.
    let moved_on = claim.phase == ClaimPhase::Aborted
        && all.iter().any(|record| {
            record.identity.weight_generation >= claim.target.weight_generation && record.manifest.is_some()
        });
    if !asked_for || !wants_target || moved_on {
        return None;
    }
    Some(Replacement {
        base: claim.base.clone(),
        target_generation: claim.target.weight_generation,
        expected_metadata_generation: claim.expected_base_generation,
        mode,
        request_id: Some(claim.request_id.clone()),
        resumed: true,
    })
}

#[cfg(test)]
mod tests {
    use ballast_schemas::{Digest, InstanceId, LogPosition, ManifestRef, OperationId, Residency, WeightStoragePolicy};

    use super::*;

    fn record(generation: u64, availability: Availability, was_ready: bool) -> WeightRevisionMetadata {
        let identity = RevisionIdentity::new("default", "default", "m", "main", generation).unwrap();
        let group_id = identity.group_id();
        let manifest = was_ready.then(|| ManifestRef {
            key: identity.manifest_key(),
            sha256: Digest::of(b"m"),
            group_id: group_id.clone(),
            payload_keys_sha256: Digest::of(b"k"),
            payload_count: 1,
            logical_bytes: 1,
            affinity_count: 1,
            affinity_digest: Digest::of(b"a"),
        });
        WeightRevisionMetadata {
            instance: InstanceId { group_id, position: LogPosition { seq: generation, index: 0 } },
            identity,
            manifest,
            availability,
            residency: Residency::Hot,
            observed_hot_ppm: 0,
            policy: WeightStoragePolicy::default(),
            operation_id: None,
            retired: false,
            metadata_generation: 4,
            placement: vec![],
            created_unix_ms: 0,
            updated_unix_ms: 0,
            last_accessed_unix_ms: 0,
        }
    }

    #[test]
    fn the_next_generation_is_above_everything_published_or_being_imported() {
        use Availability::{Deleted, Importing, Ready};
        assert_eq!(next_after(&[], 0), Some(1));
        assert_eq!(next_after(&[], 7), Some(8));
        assert_eq!(next_after(&[record(1, Ready, true), record(2, Importing, false)], 1), Some(3));
        assert_eq!(next_after(&[record(1, Ready, true), record(2, Deleted, false)], 1), Some(2));
        assert_eq!(next_after(&[record(3, Deleted, true)], 3), Some(4));
        assert_eq!(next_after(&[record(u64::MAX, Ready, true)], 3), None);
    }

    fn claim(phase: ClaimPhase, mode: UpsertMode) -> ReplacementClaim {
        let base = record(1, Availability::Ready, true).identity;
        ReplacementClaim {
            lineage: base.lineage(),
            request_id: "r".into(),
            target: base.lineage().generation(2).unwrap(),
            base,
            mode,
            phase,
            expected_base_generation: 4,
            policy: None,
            operation_id: OperationId::at(LogPosition { seq: 9, index: 0 }, 0),
            attempt: 1,
            started_unix_ms: 0,
            updated_unix_ms: 0,
        }
    }

    #[test]
    fn an_unfinished_replacement_is_gone_on_with_and_a_finished_one_is_not() {
        use UpsertMode::{DeleteFirst, PutFirst};
        let all = [record(1, Availability::Ready, true)];
        let resumed = resume(&claim(ClaimPhase::PreparingTarget, PutFirst), &all, None, PutFirst).unwrap();
        assert_eq!((resumed.target_generation, resumed.request_id.as_deref()), (2, Some("r")));
        assert!(resume(&claim(ClaimPhase::RetiringBase, PutFirst), &all, Some(2), PutFirst).is_some());
        let published = [all[0].clone(), record(2, Availability::Ready, true)];
        assert!(resume(&claim(ClaimPhase::RetiringBase, PutFirst), &published, Some(2), PutFirst).is_some());
        assert!(resume(&claim(ClaimPhase::RetiringBase, PutFirst), &published, None, PutFirst).is_none());
        assert!(resume(&claim(ClaimPhase::PreparingTarget, PutFirst), &all, Some(3), PutFirst).is_none());
        assert!(resume(&claim(ClaimPhase::PreparingTarget, PutFirst), &all, None, DeleteFirst).is_none());
        assert!(resume(&claim(ClaimPhase::Completed, PutFirst), &all, None, PutFirst).is_none());
        assert!(resume(&claim(ClaimPhase::Aborted, PutFirst), &all, None, PutFirst).is_some());
        let changed = [WeightRevisionMetadata { metadata_generation: 5, ..all[0].clone() }];
        assert!(resume(&claim(ClaimPhase::Aborted, PutFirst), &changed, None, PutFirst).is_none());
        let gone = [record(1, Availability::Deleted, true)];
        assert!(resume(&claim(ClaimPhase::Aborted, DeleteFirst), &gone, None, DeleteFirst).is_some());
        let moved_on = [record(1, Availability::Ready, true), record(2, Availability::Ready, true)];
        assert!(resume(&claim(ClaimPhase::Aborted, PutFirst), &moved_on, None, PutFirst).is_none());
    }

    #[test]
    fn a_lineage_without_a_ready_generation_says_what_is_there() {
        let lineage = record(1, Availability::Ready, true).identity.lineage();
        assert!(none_ready(&lineage, &[]).message.contains("no revision default/m@main"));
        let error = none_ready(&lineage, &[record(3, Availability::Importing, false)]);
        assert!(error.message.contains("#3 is IMPORTING"), "{error}");
    }
}
