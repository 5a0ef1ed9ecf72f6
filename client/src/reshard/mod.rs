//! From stored fragments to the boxes that a caller wants (RFC, Relationship to Reshard, Transfer Engine, and DTensor):
//! a pure planner, plans by digest, strided copies out of mapped memory, and the reads that fetch the rest.
//!
//! A [`Plan`] says which bytes of which source go where, as regions with strides; nothing is listed row by row before it
//! is copied or asked for. [`copy_mapped`] executes it on memory that is mapped; [`WirePlan`] turns what is not into
//! ranged reads. Copying only: nothing is cast, quantised or transposed. Not here: leases, connections, who holds what.

mod cache;
mod copy;
mod error;
mod execute;
mod interval;
mod plan;
mod planner;
mod region;
mod targets;
#[cfg(test)]
mod tests;
mod wire;

pub use cache::PlanCache;
pub use copy::copy_region;
pub use error::{CopyError, LowerError, PlanError, TargetError};
pub use execute::{Copied, CopyOptions, copy_mapped};
pub use plan::{Limits, Plan, SourceFragment, SourcePlace, TargetFragment};
pub use planner::{PlanSource, PlanTarget, plan};
pub use region::{Loop, Region};
pub use targets::Targets;
pub use wire::{Coalescing, Read, Request, WirePlan};
