//! What Ballast's parts say to each other: identities, policies, states, commands, outcomes, events,
//! subjects, node requests, transfer frames and the manifest. Strict validation, no I/O, no clock.
//!
//! A value that exists has been validated: constructors and deserialisers refuse what no state could accept.

mod affinity;
mod api;
mod command;
mod config;
mod digest;
mod envelope;
mod error;
mod event;
pub mod frame;
mod identity;
mod inventory;
mod limits;
pub mod manifest;
mod messagepack;
mod metadata;
mod node;
mod object;
mod outcome;
pub mod placement;
mod policy;
mod position;
mod request;
mod shared;
mod state;
pub mod subject;
mod text;
mod time;
mod units;

pub use affinity::{AffinityIndex, AffinityUnit, affinity_digest, affinity_id};
pub use api::*;
pub use command::*;
pub use config::*;
pub use digest::{Digest, hash_list, hash_prefixed};
pub use envelope::{Envelope, EnvelopeError};
pub use error::{BallastError, ErrorCode};
pub use event::{Event, EventBody};
pub use identity::{
    Component, GroupId, IdentityError, IdentityParts, LineageKey, RevisionIdentity, TenantId, default_upsert_request_id,
};
pub use inventory::{Bitmap, GroupInventory, NodeInventory, UnitRange, total_units};
pub use limits::*;
pub use messagepack::from_messagepack;
pub use metadata::*;
pub use node::*;
pub use object::*;
pub use outcome::{Outcome, Rejection, Reply, lost_parts, missing_parts};
pub use policy::{HotRatio, PolicyError, WeightStoragePolicy};
pub use position::{
    ClusterId, CommandId, InstanceId, LeaseId, LogPosition, NodeId, OperationId, ParticipantId, ReplicaId, SessionId,
    WorkerId, WriterId,
};
pub use request::{Consistency, Request, RequestOptions, read_json};
pub use shared::Shared;
pub use state::*;
pub use time::LogTime;
pub use units::{human_bytes, human_ms};
