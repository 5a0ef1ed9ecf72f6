//! The nats-server that Ballast runs by itself: where the binary is found, and the supervised child process.
//!
//! Not here: what lives in the streams (`streams.rs`) and clients of a server that somebody else runs (`connection.rs`).
//! See ARCHITECTURE.md, The rooms.

mod embedded;
mod locate;

pub use embedded::{EmbeddedServer, ServerOptions, ServerStatus, StartServerError};
pub use locate::{LocateError, NatsServerBinary, ServerVersion, locate_nats_server};
pub(crate) use locate::{OLDEST_VERSION, RECOMMENDED_VERSION};
