//! The gateway as callers meet it: JSON over a real nats-server, with nodes that answer control requests but hold no bytes.
//!
//! Not here: real nodes and workers (the workspace's `tests/`).

mod bad_input;
mod chores;
mod fixture;
mod nodes;
mod reference;
mod verbs;
