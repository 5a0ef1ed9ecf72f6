//! Safety invariant 10: After failover, the next action is determined jointly by persisted state and actual replicas, not by
//! trusting stale progress alone: what an operation reports at its end, and that a revision degraded or recovered, is true.

use ballast_schemas::{Availability, Command, RevisionIdentity};

use super::{Folded, Watch, recorded};
use crate::sim::world::W;

const NAME: &str = "10, actual replicas";

pub(super) fn check(w: &W, watch: &Watch, folded: &Folded<'_>) {
    for (id, command) in folded.accepted() {
        match command {
            Command::OperationFinished(finished) => {
                let Some(operation) = folded.before.operation(&finished.operation_id) else { continue };
                if operation.status.is_terminal() || watch.struck_since_look(id, &operation.instance) {
                    continue;
                }
                let Some(record) = folded.after.revision(&operation.identity) else { continue };
                let units = record.manifest.as_ref().map_or(0, |manifest| manifest.affinity_count);
                let found = recorded(w, &operation.instance, units).residency(units);
                if found != finished.residency {
                    let message =
                        format!("{} ended as {}, the nodes hold {found}", operation.operation_id, finished.residency);
                    w.violate(NAME, message);
                }
            }
            Command::RevisionDegraded(c) => expect(w, watch, folded, id, &c.identity, Availability::Degraded),
            Command::RevisionRecovered(c) => expect(w, watch, folded, id, &c.identity, Availability::Ready),
            _ => {}
        }
    }
}

fn expect(
    w: &W,
    watch: &Watch,
    folded: &Folded<'_>,
    id: &ballast_schemas::CommandId,
    identity: &RevisionIdentity,
    to: Availability,
) {
    let was = folded.before.revision(identity).map(|record| record.availability);
    let Some(record) = folded.after.revision(identity).filter(|record| record.availability == to) else { return };
    if was == Some(to) || watch.struck_since_look(id, &record.instance) {
        return;
    }
    let units = record.manifest.as_ref().map_or(0, |manifest| manifest.affinity_count);
    let readable = recorded(w, &record.instance, units).is_readable(units);
    if readable != (to == Availability::Ready) {
        w.violate(NAME, format!("{identity} became {to}, and it is readable: {readable}"));
    }
}
