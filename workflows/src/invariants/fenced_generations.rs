//! Safety invariant 4: A stale generation must not overwrite a newer state: the metadata generation grows with every change of the record and
//! never falls; neither does the watermark.

use ballast_schemas::Availability;

use super::Violation;
use crate::state::State;

const NAME: &str = "4, fenced generations";

pub(super) fn check(before: &State, after: &State) -> Result<(), Violation> {
    for (identity, was) in &before.record.revisions {
        let Some(is) = after.record.revisions.get(identity) else { continue };
        let (was, is) = (&was.metadata, &is.metadata);
        // A tombstone was purged and the identity imported anew in one entry: another record, which counts from 1.
        if was.availability == Availability::Deleted && is.instance.position > was.instance.position {
            continue;
        }
        if is.metadata_generation < was.metadata_generation {
            return Err(Violation::new(
                NAME,
                format!("{identity} fell from generation {} to {}", was.metadata_generation, is.metadata_generation),
            ));
        }
        let mut touched = was.clone();
        touched.last_accessed_unix_ms = is.last_accessed_unix_ms;
        if is.metadata_generation == was.metadata_generation && touched != *is {
            return Err(Violation::new(
                NAME,
                format!("{identity} changed without a new generation ({})", is.metadata_generation),
            ));
        }
    }
    for (key, was) in &before.record.lineages {
        let is = after.watermark(key);
        if is < was.watermark {
            return Err(Violation::new(NAME, format!("the watermark of {key} fell from {} to {is}", was.watermark)));
        }
    }
    Ok(())
}
