//! The pure core of Ballast: [`State`], [`fold`], the safety invariants, the step machines and the residency planner.
//!
//! Nothing here does I/O, reads a clock, draws a random number, uses a float or an unordered map, or panics on what it is
//! given: the same log gives the same state on every replica (see ARCHITECTURE.md, The one idea). A file per aggregate
//! (`revision.rs`, `import.rs`, `lease.rs`, `operation.rs`, `lineage.rs`, `cluster.rs`), per machine (`machines/`) and per
//! safety invariant (`invariants/`), named as the RFC's sections are.

#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::float_arithmetic,
    clippy::disallowed_methods,
    clippy::disallowed_types
)]
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        reason = "a test fails by panicking"
    )
)]

mod cluster;
mod control;
mod deletion;
mod fold;
mod import;
mod index;
mod invariants;
mod lease;
mod lineage;
mod list;
mod machines;
mod migration;
mod operation;
mod participants;
mod planner;
mod pressure;
mod recent;
mod repair;
mod revision;
mod state;
mod table;
#[cfg(test)]
mod testing;

pub use cluster::{AnnouncedReplica, Cluster};
pub use fold::{Applied, FoldHalt, fold};
pub use invariants::{Violation, check_group, check_step};
pub use machines::{Observation, Step, after_failure, next_step};
pub use planner::plan_hot_units;
pub use pressure::{MemoryUse, RoundPlan};
pub use repair::verdict;
pub use state::{AutomaticMigrations, Counts, FOLD_VERSION, State};
