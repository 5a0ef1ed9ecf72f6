//! Safety invariant 1: Metadata can reference only one immutable manifest identity: its own revision's key and group.

use super::Violation;
use crate::state::State;

const NAME: &str = "1, one manifest identity";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (identity, revision) in &state.record.revisions {
        let metadata = &revision.metadata;
        if metadata.identity != *identity || metadata.instance.group_id != identity.group_id() {
            return Err(Violation::new(
                NAME,
                format!("the record at {identity} is of {} in {}", metadata.identity, metadata.instance),
            ));
        }
        let Some(manifest) = &metadata.manifest else { continue };
        if manifest.key != identity.manifest_key() || manifest.group_id != metadata.instance.group_id {
            return Err(Violation::new(
                NAME,
                format!("{identity} references {} in {}", manifest.key, manifest.group_id),
            ));
        }
    }
    Ok(())
}
