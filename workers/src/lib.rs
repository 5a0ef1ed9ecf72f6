//! The two worker services. A *workflow worker* drives operations: it claims them in the log, executes the steps that
//! `ballast_workflows` names, and appends what was done. A *transfer worker* is a node: it owns a memory and a cold tier, serves
//! the data plane, carries out steps and tells what it holds.
//!
//! Not here: which step comes next (`ballast-workflows`), how bytes move (`ballast-transfer`), how the log and NATS are reached
//! (`ballast-journal`). Each service is Options → service → `run(shutdown)`. See ARCHITECTURE.md, Operations and Nodes.

mod executor;
mod failpoint;
mod introduction;
mod inventory_mirror;
mod loss_watch;
mod membership;
mod node_control;
mod node_status;
mod object_desk;
mod observing;
mod reconciler;
mod take_over;
mod transfer_worker;
mod workflow_worker;

pub use failpoint::{FailpointError, failpoints};
pub use node_status::{ColdTierReport, NodeCondition, NodeReport};
pub use transfer_worker::{TransferWorker, TransferWorkerError, TransferWorkerOptions};
pub use workflow_worker::{CONCURRENCY_DEFAULT, WorkflowWorker, WorkflowWorkerError, WorkflowWorkerOptions};
