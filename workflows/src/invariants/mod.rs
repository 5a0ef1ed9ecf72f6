//! What must hold after every entry. One file per safety invariant of the RFC that the log can see, one for the state table,
//! one for the operations, one for the participants of imports and one for the index.
//!
//! Elsewhere: 7 (generic lifecycle) and the node's part of 6 are the transfer worker's; 9 (no tensors in metadata) and 11 (no
//! active head) hold by the shape of the types; 10 (act on state and replicas) is how the machines are written.

use ballast_schemas::{GroupInventory, RevisionIdentity};

use crate::state::State;

mod complete_before_ready;
mod fenced_generations;
mod immutable_after_ready;
mod index_is_true;
mod last_replica;
mod leases_protect;
mod one_manifest;
mod operations;
mod participants;
mod replacement_order;
mod state_table;
mod terminal_is_quiet;

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{invariant}: {message}")]
pub struct Violation {
    /// Which invariant.
    pub invariant: &'static str,
    /// Which record breaks it, and how.
    pub message: String,
}

impl Violation {
    fn new(invariant: &'static str, message: impl Into<String>) -> Self {
        Self { invariant, message: message.into() }
    }
}

/// Everything that one state can show by itself.
pub(crate) fn check(state: &State) -> Result<(), Violation> {
    check_records(state)?;
    index_is_true::check(state)
}

/// Everything that its records can show.
pub(crate) fn check_records(state: &State) -> Result<(), Violation> {
    one_manifest::check(state)?;
    complete_before_ready::check(state)?;
    immutable_after_ready::check(state)?;
    leases_protect::check(state)?;
    terminal_is_quiet::check(state)?;
    replacement_order::check(state)?;
    state_table::check(state)?;
    participants::check(state)?;
    operations::check(state)
}

/// What only two states can show: `after` follows from `before` by one entry. O(state), for simulation.
///
/// # Errors
/// The first invariant that does not hold.
pub fn check_step(before: &State, after: &State) -> Result<(), Violation> {
    fenced_generations::check(before, after)?;
    immutable_after_ready::check_step(before, after)?;
    state_table::check_step(before, after)?;
    operations::check_step(before, after)
}

/// What only the nodes can show: a READY revision is readable as a whole. For simulation and `verify`.
///
/// # Errors
/// Naming what is readable nowhere.
pub fn check_group(
    state: &State,
    identity: &RevisionIdentity,
    inventory: &GroupInventory,
    units: u32,
) -> Result<(), Violation> {
    last_replica::check(state, identity, inventory, units)
}
