//! One-sided transfers over RDMA, beside a TCP connection that says what may be reached: an upload's bytes are WRITTEN to a
//! landing window, hot units are READ where they lie (see ARCHITECTURE.md, Transports). What the bytes mean, tokens and fall-back
//! to TCP are the server's and the client end's matter. RoCE v2 only.
//!
//! Without the feature `rdma` there is only the reason why it is not used.

#[cfg(not(feature = "rdma"))]
mod absent;
#[cfg(feature = "rdma")]
mod device;
#[cfg(feature = "rdma")]
mod link;
#[cfg(feature = "rdma")]
mod memory;
#[cfg(feature = "rdma")]
mod queue_pair;
#[cfg(feature = "rdma")]
mod service;

#[cfg(not(feature = "rdma"))]
pub(crate) use absent::*;
#[cfg(feature = "rdma")]
pub(crate) use device::describe;
#[cfg(feature = "rdma")]
pub(crate) use link::{Link, rounds};
#[cfg(feature = "rdma")]
pub(crate) use queue_pair::LinkError;
#[cfg(feature = "rdma")]
pub(crate) use service::{NodeLink, Service};

/// Why RDMA is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub(crate) struct NoRdma {
    pub(crate) why: String,
}

impl NoRdma {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self { why: why.into() }
    }
}

/// The RoCE v2 addresses of this host's devices, as text, or why there is no RDMA here.
///
/// # Errors
/// The reason.
pub fn rdma_devices() -> Result<String, String> {
    describe().map_err(|no_rdma| no_rdma.why)
}
