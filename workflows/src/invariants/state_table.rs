//! The state table (RFC, State Model): which residency and which operation go with which availability, and the legal moves.

use ballast_schemas::{Availability, OperationKind, Residency};

use super::Violation;
use crate::state::State;

const NAME: &str = "state table";

pub(super) fn check(state: &State) -> Result<(), Violation> {
    for (identity, revision) in &state.record.revisions {
        let metadata = &revision.metadata;
        let readable = matches!(metadata.residency, Residency::Hot | Residency::Cold | Residency::Mixed);
        let kind = match revision.operation_key().map(|key| state.record.operations.get(&key)) {
            None => None,
            Some(Some(operation)) => Some(operation.view.kind),
            Some(None) => {
                return Err(Violation::new(NAME, format!("{identity} names an operation that does not exist")));
            }
        };
        let legal = match metadata.availability {
            Availability::Importing => metadata.residency == Residency::Unknown && kind.is_none(),
            Availability::Ready => readable && !matches!(kind, Some(OperationKind::Deleting)),
            Availability::Degraded => !matches!(kind, Some(OperationKind::Deleting)),
            Availability::Deleting => kind == Some(OperationKind::Deleting),
            Availability::Deleted => metadata.residency == Residency::Absent && kind.is_none(),
        };
        if !legal {
            return Err(Violation::new(
                NAME,
                format!("{identity} is {} + {} with operation {kind:?}", metadata.availability, metadata.residency),
            ));
        }
    }
    Ok(())
}

pub(super) fn check_step(before: &State, after: &State) -> Result<(), Violation> {
    use Availability as A;
    for (identity, was) in &before.record.revisions {
        let Some(is) = after.record.revisions.get(identity) else {
            if was.metadata.availability == A::Deleted {
                continue;
            }
            return Err(Violation::new(NAME, format!("{identity} vanished while {}", was.metadata.availability)));
        };
        // One entry holds many commands, so every chain of legal moves is legal.
        let reaches = |from: A, to: A| match from {
            A::Importing => true,
            A::Ready | A::Degraded => to != A::Importing,
            A::Deleting => matches!(to, A::Deleting | A::Deleted),
            A::Deleted => to == A::Deleted,
        };
        let (from, to) = (was.metadata.availability, is.metadata.availability);
        let same_bytes = was.metadata.instance == is.metadata.instance;
        if same_bytes && !reaches(from, to) {
            return Err(Violation::new(NAME, format!("{identity} went from {from} to {to}")));
        }
        if !same_bytes && was.published.is_some() {
            return Err(Violation::new(NAME, format!("{identity} has other bytes than it was published with")));
        }
    }
    Ok(())
}
