//! The data plane, both ends: group layout, memory tier, cold tier, node store, data-plane server and the client's
//! end of it, over shared memory and TCP (see ARCHITECTURE.md, The data plane). No management state lives here.

mod batching;
mod bucket;
mod bucket_index;
mod bucket_packs;
mod bucket_replica;
#[cfg(test)]
mod bucket_testing;
mod budget;
mod checksum;
mod client_end;
mod cold;
mod cold_bucket;
mod cold_disk;
mod cold_engine;
mod cold_files;
mod deriving;
#[cfg(test)]
mod deriving_tests;
mod error;
mod folder;
mod guard;
mod instance_records;
mod layout;
mod mapped;
mod memory_tier;
mod node_store;
mod objects;
mod offers;
mod patch;
#[cfg(test)]
mod process_tests;
#[cfg(test)]
mod protocol_tests;
mod rdma;
mod record;
mod segment;
mod sending;
mod server;
mod spares;
#[cfg(test)]
mod testing;
mod tmpfs;
mod token;
mod transfer_error;
mod unit_check;
mod wire;

pub use bucket::{BucketUrl, BucketUrlError};
pub use budget::{Budget, CapacityExhausted, Charge, Usage};
pub use checksum::{RunningChecksum, checksum, combine, of_parts};
pub use client_end::{ConnectOptions, NodeConnection, Route, Transport, host_id, read_ranges_side_by_side};
pub use cold::{ColdOptions, ColdPlace, ColdReport, ColdTierError, Progress};
pub use cold_engine::EngineChoice;
pub use error::{Mismatch, StoreError};
pub use folder::{FolderError, FolderIdentity, PathError, Space};
pub use guard::{FenceRefused, FenceStep, NoWitness, UnitStates, check_fence};
pub use layout::{Extent, GroupLayout, LayoutError, Run, SEGMENT_BYTES_MAX, UNIT_ALIGN_BYTES};
pub use mapped::{MapError, MappedInstance, UnitView};
pub use memory_tier::{HugePages, MemoryOptions, MemoryReport, MemoryTierError};
pub use node_store::{
    Adoption, Allocated, ColdPiece, DamagedFolder, GrantedSegments, HotPiece, InstanceReader, NodeStore,
    NodeStoreOptions, NodeUsage, OpenError,
};
pub use objects::Cleared;
pub use offers::{FragmentPlace, OfferVerdict, PartOffers};
pub use patch::{DeriveUnit, UnitPatch};
pub use rdma::rdma_devices;
pub use record::RecordError;
pub use server::{BindError, DataPlane, DataPlaneOptions};
pub use token::{TOKEN_KEY_BYTES, TOKEN_LEEWAY_MS, TokenError, TokenGate, TokenKey, TokenKeyError};
pub use transfer_error::TransferError;
