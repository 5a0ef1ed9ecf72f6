//! Safety invariant 9: Metadata does not store Tensors, fragments, runtime addresses, or framework objects: a record is as
//! large for a thousand units as for one, and small.

use ballast_schemas::Reply;

use super::Folded;
use crate::sim::world::W;

/// Generous for the names, digests and numbers of one record.
const RECORD_BYTES_MAX: usize = 1_536;
/// A note is a sentence.
const NOTE_BYTES_MAX: usize = 240;

pub(super) fn check(w: &W, folded: &Folded<'_>) {
    let size = |reply: &Reply| rmp_serde::to_vec(reply).map_or(usize::MAX, |bytes| bytes.len());
    for reply in folded.outcomes.iter().flatten() {
        let (name, note) = match reply {
            Reply::Revision(revision) => (revision.identity.to_string(), None),
            Reply::Operation(operation) => (operation.operation_id.to_string(), operation.note.as_ref()),
            _ => continue,
        };
        let bytes = size(reply);
        if bytes > RECORD_BYTES_MAX || note.is_some_and(|note| note.len() > NOTE_BYTES_MAX) {
            w.violate("9, light metadata", format!("the record of {name} has {bytes} bytes, its note {note:?}"));
        }
    }
}
