//! The two workers against a real fold and a real nats-server: what a workflow worker does with operations (its nodes are ones
//! that say what a test wants), and what a transfer worker does with bytes.
//!
//! Not here: processes that are killed (the workspace's `tests/`), which step follows which (`ballast-workflows`).

mod fake_node;
mod migrations;
mod node;
mod operations;
mod site;
