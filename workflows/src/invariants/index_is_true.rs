//! The index is what the records say: nothing that a query or a deadline relies on was forgotten.

use super::Violation;
use crate::index::Index;
use crate::state::State;

pub(super) fn check(state: &State) -> Result<(), Violation> {
    if Index::of(&state.record) == state.index {
        return Ok(());
    }
    Err(Violation::new("index", "the index differs from the one rebuilt from the records"))
}
