//! Safety invariant 3: The manifest reference and payload summary are immutable after READY.

use super::Violation;
use crate::import::manifest_digest;
use crate::state::State;

const NAME: &str = "3, immutable after READY";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (identity, revision) in &state.record.revisions {
        let found = revision.metadata.manifest.as_ref().map(manifest_digest);
        if found != revision.published {
            return Err(Violation::new(
                NAME,
                format!("{identity} does not reference the manifest it was published with"),
            ));
        }
    }
    Ok(())
}

pub(super) fn check_step(before: &State, after: &State) -> Result<(), Violation> {
    for (identity, was) in &before.record.revisions {
        let Some(is) = after.record.revisions.get(identity) else { continue };
        if was.published.is_some() && (was.published != is.published || was.metadata.instance != is.metadata.instance) {
            return Err(Violation::new(NAME, format!("{identity} changed its manifest or its bytes after READY")));
        }
    }
    Ok(())
}
