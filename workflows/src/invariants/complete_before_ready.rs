//! Safety invariant 2: READY is not published until payloads and manifest are committed completely: no published record without a manifest,
//! no manifest on one that never was published, no session left open on it.

use ballast_schemas::Availability;

use super::Violation;
use crate::state::State;

const NAME: &str = "2, complete before READY";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (identity, revision) in &state.record.revisions {
        let availability = revision.metadata.availability;
        let importing = availability == Availability::Importing;
        let readable = matches!(availability, Availability::Ready | Availability::Degraded);
        if readable && (revision.metadata.manifest.is_none() || revision.published.is_none()) {
            return Err(Violation::new(NAME, format!("{identity} is {availability} without a committed manifest")));
        }
        if revision.metadata.manifest.is_some() != revision.published.is_some() {
            return Err(Violation::new(NAME, format!("{identity} has a manifest that was never published")));
        }
        if importing != revision.import.is_some() || (importing && revision.published.is_some()) {
            return Err(Violation::new(NAME, format!("{identity} is {availability}, but its session says otherwise")));
        }
    }
    Ok(())
}
