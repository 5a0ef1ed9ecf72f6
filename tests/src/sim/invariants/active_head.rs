//! Safety invariant 11: A lineage claim or watermark must not be interpreted as the serving active head: what discovery
//! finds is READY where it was looked up, whatever the watermark says.

use ballast_schemas::{Availability, RevisionIdentity};

use crate::sim::replica::Replica;
use crate::sim::world::W;

pub(crate) fn no_active_head(w: &W, replica: &Replica, found: &RevisionIdentity) {
    let availability = replica.read(|state| state.revision(found).map(|record| record.availability));
    if availability != Some(Availability::Ready) {
        w.violate("11, no active head", format!("{found} was discovered, and is {availability:?}"));
    }
}
