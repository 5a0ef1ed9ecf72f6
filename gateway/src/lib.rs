//! The gateway: the NATS service that callers speak to, placement of imports, transfer tokens, introductions of nodes, the
//! inbox, and health and metrics over HTTP.
//!
//! It holds no state of its own: every gateway folds the same log, so any of them can answer any call. Not here: what a command
//! means (`ballast-workflows`), the log itself (`ballast-journal`), payload bytes (`ballast-transfer`).
//! See ARCHITECTURE.md, The rooms.

mod context;
mod gateway;
mod hello;
mod http;
mod inbox;
mod metrics;
mod placement;
mod request;
mod room;
mod service;
mod tokens;
mod verbs;

pub use gateway::{Gateway, GatewayError, GatewayHandle, GatewayOptions};
