//! The shared log over NATS JetStream, and everything that keeps it going: the embedded server, group commit, replicas that
//! fold the log, snapshots and trimming, work hints, events, inventories and the token key.
//!
//! Not here: what a command means (`ballast-workflows`), who may send one (`ballast-gateway`). The log is a small trait
//! ([`Log`]) with a provider in memory ([`MemoryLog`]) for simulation. See ARCHITECTURE.md, The log and the fold.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking"))]

mod agreement;
mod appender;
mod connection;
mod events;
mod follow;
mod hints;
mod history;
mod inventory;
mod jetstream_log;
mod keys;
mod log;
mod memory_log;
pub mod nodes;
mod publish;
mod replica;
mod server;
mod snapshots;
mod streams;
mod upkeep;

pub use agreement::DigestExchange;
pub use connection::{ConnectError, Lookout, connect};
pub use events::{EventFilter, EventPublisher, EventReader, EventSink, EventStart, FollowedEvent};
pub use hints::{Hint, HintPublisher, HintReader};
pub use history::{Decided, History, HistoryEntry, HistoryError, StoredSnapshot, Walk};
pub use inventory::{InventoryUpdate, InventoryWatch, PublishInventoryError, publish_inventory, withdraw_inventory};
pub use jetstream_log::JetStreamLog;
pub use keys::{KeyError, TokenKey, token_key};
pub use log::{AppendError, Log, LogBounds, LogError, Record, Tail, TailError};
pub use memory_log::MemoryLog;
pub use replica::{Replica, ReplicaError, ReplicaOptions, SubmitError, WaitError, fresh_command_id};
pub use server::{
    EmbeddedServer, LocateError, NatsServerBinary, ServerOptions, ServerStatus, ServerVersion, StartServerError,
    locate_nats_server,
};
pub use snapshots::{
    JetStreamSnapshots, MemorySnapshots, RestoreFrom, SnapshotError, SnapshotName, SnapshotStore, decode_snapshot,
    encode_snapshot,
};
pub use streams::{LastSeen, OpenStreamsError, StreamOptions, Streams, open_streams, view_streams};
pub use upkeep::{SnapshotRules, UpkeepError, UpkeepOptions};
