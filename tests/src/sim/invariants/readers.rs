//! Readers never see wrong or missing bytes: whatever a reader was told is there, it reads, and what it reads is what was
//! published. A view stays right even after its lease has lapsed; but what was read under a lapsed lease does not count.

use ballast_schemas::LeaseId;

use crate::sim::content::Content;
use crate::sim::world::W;

/// A reader got these bytes of a unit.
pub(crate) fn saw(w: &W, lease: &LeaseId, content: &Content, unit: u32, bytes: Option<u64>, how: &str) {
    if bytes != content.unit(unit) {
        let seen = match bytes {
            None | Some(0) => "a hole".to_owned(),
            Some(bytes) => format!("{bytes:016x}"),
        };
        let message = format!("lease {lease} saw {seen} as unit {unit} of {} ({how})", content.manifest.key);
        w.violate("readers see right bytes", message);
    }
}

/// A reader counts what it read under this lease.
pub(crate) fn counted(w: &W, lease: &LeaseId) {
    if w.watch.borrow().ended.get(lease) != Some(&false) {
        w.violate("counted reads", format!("a read was counted although lease {lease} had lapsed"));
    }
}
