//! Safety invariant 2: READY is not published until the payloads and manifest are committed completely and pass group
//! validation: at the entry that publishes, every node of the placement holds everything.

use ballast_schemas::{Availability, Command};

use super::{Folded, Watch};
use crate::sim::node::Tier;
use crate::sim::world::W;

const NAME: &str = "2, complete before READY";

pub(super) fn check(w: &W, watch: &Watch, folded: &Folded<'_>) {
    for (_, command) in folded.accepted() {
        let Command::CommitImport(commit) = command else { continue };
        let was = folded.before.revision(&commit.identity).map(|record| record.availability);
        let Some(record) = folded.after.revision(&commit.identity) else { continue };
        let published = record.availability == Availability::Ready && was != Some(Availability::Ready);
        if !published || watch.struck.contains_key(&record.instance) {
            continue;
        }
        let units = commit.manifest.affinity_count;
        for node in record.placement.iter().filter_map(|node| w.node_named(node)) {
            let disks = node.disks.borrow();
            let has = |unit: &u32| {
                disks.has_good(&record.instance, Tier::Memory, *unit)
                    || disks.has_good(&record.instance, Tier::Cold, *unit)
            };
            let sealed = disks.memory.get(&record.instance).and_then(|folder| folder.content.as_ref());
            let same = sealed.is_some_and(|content| content.manifest.sha256 == commit.manifest.sha256);
            let whole = (0..units).all(|unit| has(&unit));
            if !same || !whole {
                let found = (0..units).filter(has).count();
                let message = format!("{} is READY; {} holds {found} of {units} units", commit.identity, node.id);
                return w.violate(NAME, message);
            }
        }
    }
}
