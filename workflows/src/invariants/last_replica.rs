//! Safety invariant 6: The last memory replica is not released until a cold replica has been validated: whatever the machines did, a READY
//! revision is readable as a whole. Needs the nodes' inventories, so it is checked in simulation and by `verify`.

use ballast_schemas::{Availability, GroupInventory, RevisionIdentity};

use super::Violation;
use crate::state::State;

const NAME: &str = "6, the last replica stays";

pub(super) fn check(
    state: &State,
    identity: &RevisionIdentity,
    inventory: &GroupInventory,
    units: u32,
) -> Result<(), Violation> {
    let ready = state.revision(identity).is_some_and(|metadata| metadata.availability == Availability::Ready);
    if ready && !inventory.is_readable(units) {
        let mut readable = inventory.hot(units);
        readable.union_with(&inventory.cold(units));
        let message = format!("{identity} is READY, but only {} of {units} units are readable", readable.count());
        return Err(Violation::new(NAME, message));
    }
    Ok(())
}
