//! The base of a replacement, read under a lease while its target is imported: what of it the target has too is copied inside
//! the node and not sent (ARCHITECTURE.md, Deltas and reuse).

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use ballast_schemas::{
    BallastError, Digest, ErrorCode, IdentityRequest, MigrationMode, NodeEndpoint, Residency, RevisionIdentity,
    RevisionView, WeightRevisionMetadata,
};

use crate::gateway::Gateway;
use crate::get::GetOptions;
use crate::reading::Reading;
use crate::store::is_published;

/// How long a failed upsert tries to release its base before it tells of its failure; the release goes on by itself.
const RELEASE_PATIENCE: Duration = Duration::from_secs(3);

/// What an import takes from another revision.
#[derive(Clone, Debug)]
pub(crate) enum BaseUse {
    /// Units that turn out to be the same, if the base can be had.
    Reuse(RevisionIdentity),
    /// Everything that a delta does not change, out of the base with this manifest.
    Derive(RevisionIdentity, Digest),
}

/// A base under a lease.
#[derive(Debug)]
pub(crate) struct Base {
    reading: Reading,
    /// Units by size and checksum: only these can be the same. Whether they are is told by their BLAKE3.
    units: HashMap<(u64, u64), u32>,
    sizes: HashSet<u64>,
}

impl Base {
    /// Acquires a lease on what the import takes from; `None` when it does without.
    pub(crate) async fn open(gateway: &Gateway, base: &BaseUse) -> Result<Option<Self>, BallastError> {
        match base {
            BaseUse::Reuse(identity) => match Self::open_for_reuse(gateway, identity).await {
                Ok(base) => Ok(base),
                Err(error) => {
                    tracing::debug!(base = %identity, %error, "nothing of the base is used again");
                    Ok(None)
                }
            },
            BaseUse::Derive(identity, manifest) => {
                let reading = Reading::open(gateway, identity, &GetOptions::default()).await?;
                let found = reading.manifest().sha256();
                if found == *manifest {
                    return Ok(Some(Self::of(reading)));
                }
                // Deleted and imported again meanwhile.
                let message =
                    format!("base {identity} has manifest {found} now, expected {manifest}; make the delta anew");
                Err(BallastError::new(ErrorCode::Conflict, message))
            }
        }
    }

    async fn open_for_reuse(gateway: &Gateway, identity: &RevisionIdentity) -> Result<Option<Self>, BallastError> {
        let body = IdentityRequest { identity: identity.clone() };
        let view: RevisionView = gateway.call(&identity.tenant_id, "get_metadata", &body).await?;
        if !is_published(&view.metadata) || view.metadata.retired || warms_up(&view.metadata) {
            return Ok(None);
        }
        Ok(Some(Self::of(Reading::open(gateway, identity, &GetOptions::default()).await?)))
    }

    fn of(reading: Reading) -> Self {
        let units = (0..).zip(reading.manifest().units()).filter(|(_, unit)| unit.extent_bytes > 0);
        let units: HashMap<_, _> = units.map(|(number, unit)| ((unit.extent_bytes, unit.crc64), number)).collect();
        let sizes = units.keys().map(|(bytes, _)| *bytes).collect();
        Self { reading, units, sizes }
    }

    /// The unit of the base that may have these bytes.
    pub(crate) fn candidate(&self, bytes: u64, crc64: u64) -> Option<u32> {
        self.units.get(&(bytes, crc64)).copied()
    }

    /// Whether any unit of the base has this size.
    pub(crate) fn has_size(&self, bytes: u64) -> bool {
        self.sizes.contains(&bytes)
    }

    /// What opens the nodes' doors to it, and the nodes that hold it.
    pub(crate) fn door(&self) -> (&str, &[NodeEndpoint]) {
        self.reading.door()
    }

    /// Ends the lease. Whether it had lapsed does not matter: the node has compared every byte that it took.
    pub(crate) async fn release(self) {
        match tokio::time::timeout(RELEASE_PATIENCE, self.reading.release()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "the lease on a base"),
            // Dropped half-way, it is released in the background.
            Err(_) => tracing::debug!("the lease on a base is being released"),
        }
    }
}

/// Whether a lease would bring the revision into memory: for one that is about to be retired that is not worth it.
fn warms_up(metadata: &WeightRevisionMetadata) -> bool {
    let policy = &metadata.policy;
    policy.migration_mode == MigrationMode::Auto
        && metadata.operation_id.is_none()
        && match policy.preferred_residency {
            Residency::Hot => metadata.residency != Residency::Hot,
            Residency::Mixed => metadata.residency == Residency::Cold,
            _ => false,
        }
}
