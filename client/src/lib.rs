//! The client: `WeightStore` with the eleven operations of the RFC, import and export of checkpoints, zero-copy readers,
//! names, events. It speaks to gateways over NATS and to nodes over the data plane (see ARCHITECTURE.md, The client).

mod admin;
mod base;
mod checksums;
pub mod delta;
mod events;
mod fetch;
mod fill;
mod gateway;
mod get;
mod lane;
mod lease;
mod names;
mod nodes;
mod objects;
mod open;
mod part;
mod pieces;
mod placed;
mod progress;
mod published;
mod put;
mod reading;
pub mod reshard;
pub mod safetensors;
mod session;
mod source;
mod store;
mod upload;

pub use admin::Admin;
pub use ballast_transfer::Route;
pub use events::{EventFeed, EventFilter, EventStart, FollowedEvent};
pub use gateway::{ConnectOptions, Gateway};
pub use get::{GetOptions, GetReport, GetTarget, Verify};
pub use names::{Replacement, explain_missing, next_generation, plan_replacement, resolve};
pub use nodes::Transport;
pub use objects::NodeObjects;
pub use open::{OpenRevision, TensorView};
pub use part::{PartReport, PartWriter, Sharing};
pub use placed::PlacedBuffer;
pub use progress::{Phase, Progress, ProgressUpdate};
pub use put::{PutReport, PutWriter};
pub use source::{ShardedTensor, Source, TensorData, TensorSource, describe_tensor, user_shape};
pub use store::{UpsertOptions, WeightStore};
