//! Nodes (transfer workers) as the rest of the system sees them: who lives, what each holds, and control requests.
//!
//! - `directory.rs`: live nodes and their inventories, for whoever places, reads or moves units;
//! - `control.rs`: the asking side of a control request; `listener.rs`: the node's side;
//! - `parts.rs`: replies that are larger than one NATS message.
//!
//! Not here: what a node does about a request (workers), payload bytes (transfer). See ARCHITECTURE.md, Three authorities.

mod control;
mod directory;
mod listener;
mod parts;

pub use control::{NodeCallError, NodeClient, NodeProgress};
pub use directory::{Directory, NODE_SILENCE};
pub use listener::{NodeCall, NodeListener, NodeListenerError};
