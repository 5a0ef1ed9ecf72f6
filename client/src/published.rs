//! A put of what is published already: the same again is no error, other content is a CONFLICT. A whole source is compared by the
//! checksums of its units; of a participant's part the boxes are, and read back where they are not whole units.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ballast_schemas::frame::OfferedFragment;
use ballast_schemas::manifest::{Manifest, ManifestPlan};
use ballast_schemas::{
    BallastError, ErrorCode, IdentityRequest, RevisionIdentity, RevisionView, SessionId, WeightRevisionMetadata,
};
use ballast_transfer::RunningChecksum;
use serde_json::json;

use crate::checksums::{StopOnDrop, of_units};
use crate::fetch::{UnitSink, fetch};
use crate::gateway::Gateway;
use crate::get::{GetOptions, Verify};
use crate::pieces::Pieces;
use crate::progress::{Phase, Progress};
use crate::reading::Reading;
use crate::source::UnitSource;
use crate::store::is_published;

/// A READY revision of the geometry that was to be put.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) revision: Box<WeightRevisionMetadata>,
    manifest: Arc<Manifest>,
}

/// The session of several writers that has published what could not be imported: the repeat of its job goes on by comparing.
pub(crate) fn published_by(conflict: &BallastError) -> Option<SessionId> {
    SessionId::new(conflict.details["published_by"].as_str()?).ok()
}

impl Published {
    /// The import was refused: because the revision is there already, with the same geometry?
    ///
    /// # Errors
    /// `conflict` when it is not; `CONFLICT` when its geometry is another.
    pub(crate) async fn find(
        gateway: &Gateway,
        identity: &RevisionIdentity,
        plan: &ManifestPlan,
        conflict: BallastError,
    ) -> Result<Self, BallastError> {
        let body = IdentityRequest { identity: identity.clone() };
        let view = gateway.call::<_, RevisionView>(&identity.tenant_id, "get_metadata", &body).await;
        let Ok(view) = view else { return Err(conflict) };
        if !is_published(&view.metadata) || view.metadata.retired {
            return Err(conflict);
        }
        let reading = Reading::open(gateway, identity, &GetOptions::default()).await?;
        let (manifest, revision) = (reading.manifest().clone(), reading.revision().clone());
        reading.release().await?;
        if manifest.placement_digest() != plan.placement_digest() {
            return Err(other_content(identity, "its tensors and files are others"));
        }
        Ok(Self { revision: Box::new(revision), manifest })
    }

    fn identity(&self) -> &RevisionIdentity {
        &self.revision.identity
    }

    /// Compares a whole source, without sending anything. `known`: the checksums of what has come later.
    ///
    /// # Errors
    /// `CONFLICT` naming what differs.
    pub(crate) async fn compare(
        &self,
        units: Vec<UnitSource>,
        known: Vec<Option<u64>>,
        progress: &Progress,
    ) -> Result<(), BallastError> {
        let meter = progress.meter(Phase::Comparing, self.manifest.logical_bytes());
        let stop = StopOnDrop::default();
        let flag = stop.0.clone();
        let computed = tokio::task::spawn_blocking(move || of_units(&units, &flag, &meter)).await;
        let computed =
            computed.map_err(|error| BallastError::invalid(format!("reading the source failed: {error}")))??;
        for (unit, (computed, known)) in (0..).zip(computed.into_iter().zip(known)) {
            // What comes later has been put: the commit made sure.
            self.expect_unit(unit, computed.or(known).unwrap_or_default())?;
        }
        Ok(())
    }

    fn expect_unit(&self, unit: u32, found: u64) -> Result<(), BallastError> {
        if self.manifest.units().get(unit as usize).is_none_or(|own| own.crc64 == found) {
            return Ok(());
        }
        let groups = self.manifest.affinity_groups();
        let name = groups
            .get(unit as usize)
            .and_then(|group| group.iter().find(|name| !name.is_empty()))
            .copied()
            .unwrap_or_default();
        Err(other_content(self.identity(), &format!("{name:?} differs"))
            .with_details(json!({"unit": unit, "name": name})))
    }

    /// Compares the boxes that were given. Those of a unit that was given in part are read back, from whoever holds it.
    ///
    /// # Errors
    /// `CONFLICT` naming what differs; otherwise as for a get.
    pub(crate) async fn compare_part(
        &self,
        gateway: &Gateway,
        pieces: &Pieces,
        progress: &Progress,
    ) -> Result<(), BallastError> {
        let whole = pieces.whole_units();
        for (unit, found) in &whole {
            self.expect_unit(*unit, *found)?;
        }
        let mut parts: HashMap<u32, Vec<OfferedFragment>> = HashMap::new();
        for given in pieces.given().into_iter().filter(|given| !whole.contains_key(&given.unit)) {
            parts.entry(given.unit).or_default().push(given);
        }
        if parts.is_empty() {
            return Ok(());
        }
        let mut units: Vec<u32> = parts.keys().copied().collect();
        units.sort_unstable();
        let mut reading = Reading::open(gateway, self.identity(), &GetOptions::default()).await?;
        let bytes = units.iter().map(|unit| reading.bytes_of(*unit)).sum();
        let found = Arc::new(Boxes::new(parts));
        let meter = progress.meter(Phase::Comparing, bytes);
        fetch(&mut reading, &units, found.clone(), Verify::Auto, &meter).await?;
        reading.release().await?;
        let Some(differs) = found.first_difference() else { return Ok(()) };
        let (tensor, shown) = pieces.name_at(differs.unit, differs.offset).unwrap_or_default();
        Err(other_content(self.identity(), &format!("{shown} differs"))
            .with_details(json!({"unit": differs.unit, "name": tensor})))
    }
}

fn other_content(identity: &RevisionIdentity, what: &str) -> BallastError {
    let message = format!(
        "{identity} is READY with other content: {what}; a revision never changes, publish the next generation"
    );
    BallastError::new(ErrorCode::Conflict, message)
}

/// Takes the checksums of boxes out of their units' bytes, which come by and are not kept.
struct Boxes(Mutex<HashMap<u32, Vec<(OfferedFragment, RunningChecksum)>>>);

impl Boxes {
    fn new(parts: HashMap<u32, Vec<OfferedFragment>>) -> Self {
        let begin = |given: OfferedFragment| (given, RunningChecksum::default());
        Self(Mutex::new(parts.into_iter().map(|(unit, all)| (unit, all.into_iter().map(begin).collect())).collect()))
    }

    fn first_difference(&self) -> Option<OfferedFragment> {
        let units = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let differing = units.values().flatten().filter(|(given, found)| given.crc64 != found.value());
        differing.map(|(given, _)| *given).min_by_key(|given| (given.unit, given.offset))
    }
}

impl UnitSink for Boxes {
    fn put(&self, unit: u32, offset: u64, bytes: &[u8]) -> Result<(), BallastError> {
        let mut units = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (given, running) in units.get_mut(&unit).into_iter().flatten() {
            if offset == 0 {
                *running = RunningChecksum::default();
            }
            let end = offset + bytes.len() as u64;
            let (from, to) = (given.offset.max(offset), (given.offset + given.bytes).min(end));
            if from < to {
                running.update(&bytes[(from - offset) as usize..(to - offset) as usize]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ballast_transfer::checksum;

    use super::*;

    #[test]
    fn boxes_are_compared_in_whatever_pieces_their_unit_comes_and_however_often() {
        let bytes: Vec<u8> = (0..100).collect();
        let given = |offset: u64, length: u64, spoiled: u64| OfferedFragment {
            unit: 3,
            offset,
            bytes: length,
            crc64: checksum(&bytes[offset as usize..(offset + length) as usize]) ^ spoiled,
        };
        for step in [1, 7, 50, 100] {
            let boxes = Boxes::new(HashMap::from([(3, vec![given(0, 10, 0), given(40, 33, 0), given(99, 1, 0)])]));
            boxes.put(3, 0, &bytes[..41]).unwrap();
            for (at, piece) in bytes.chunks(step).enumerate() {
                boxes.put(3, (at * step) as u64, piece).unwrap();
            }
            boxes.put(4, 0, &bytes).unwrap();
            assert_eq!(boxes.first_difference(), None);
            let boxes = Boxes::new(HashMap::from([(3, vec![given(0, 10, 0), given(40, 33, 1)])]));
            boxes.put(3, 0, &bytes).unwrap();
            assert_eq!(boxes.first_difference(), Some(given(40, 33, 1)));
        }
    }
}
