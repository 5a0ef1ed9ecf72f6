//! The base of a replacement, read under a lease while its target is imported: what of it the target has too is copied inside
//! the node and not sent (ARCHITECTURE.md, Deltas and reuse).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ballast_schemas::frame::DerivedUnit;
use ballast_schemas::{
    BallastError, Digest, ErrorCode, IdentityRequest, MigrationMode, NodeEndpoint, Residency, RevisionIdentity,
    RevisionView, WeightRevisionMetadata,
};
use ballast_transfer::DeriveUnit;

use crate::gateway::Gateway;
use crate::get::GetOptions;
use crate::reading::Reading;
use crate::store::is_published;

/// How long a failed upsert tries to release its base before it tells of its failure; the release goes on by itself.
const RELEASE_PATIENCE: Duration = Duration::from_secs(3);

/// How long an import tries to get a base that it can do without.
const REUSE_PATIENCE: Duration = Duration::from_secs(3);

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
    /// What opens the nodes' doors to it, and the nodes that hold it.
    door: Mutex<(String, Vec<NodeEndpoint>)>,
    /// It could not be read: whoever can do without it does.
    given_up: AtomicBool,
}

impl Base {
    /// Acquires a lease on what the import takes from; `None` when it does without.
    pub(crate) async fn open(gateway: &Gateway, base: &BaseUse) -> Result<Option<Self>, BallastError> {
        match base {
            BaseUse::Reuse(identity) => {
                let opening = tokio::time::timeout(REUSE_PATIENCE, Self::open_for_reuse(gateway, identity));
                match opening.await {
                    Ok(Ok(base)) => return Ok(base),
                    Ok(Err(error)) => tracing::debug!(base = %identity, %error, "nothing of the base is used again"),
                    Err(_) => tracing::debug!(base = %identity, "the base is not waited for any longer"),
                }
                Ok(None)
            }
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
        let (token, holders) = reading.door();
        let door = Mutex::new((token.to_owned(), holders.to_vec()));
        Self { reading, units, sizes, door, given_up: AtomicBool::new(false) }
    }

    /// The unit of the base that may have these bytes.
    pub(crate) fn candidate(&self, bytes: u64, crc64: u64) -> Option<u32> {
        if self.is_given_up() {
            return None;
        }
        self.units.get(&(bytes, crc64)).copied()
    }

    /// Whether any unit of the base has this size.
    pub(crate) fn has_size(&self, bytes: u64) -> bool {
        !self.is_given_up() && self.sizes.contains(&bytes)
    }

    /// What opens the nodes' doors to it, and the nodes that hold it.
    pub(crate) fn door(&self) -> (String, Vec<NodeEndpoint>) {
        self.door.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks for both again: tokens end, and holders change.
    pub(crate) async fn renew_door(&self) -> Result<(), BallastError> {
        let door = self.reading.new_door().await?;
        *self.door.lock().unwrap_or_else(PoisonError::into_inner) = door;
        Ok(())
    }

    /// Nobody who can do without it tries to read it any more.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Compares what a node has read of the base with the manifest: whoever it had that from need not be believed.
    pub(crate) fn check(&self, asked: &[DeriveUnit<'_>], derived: &[DerivedUnit]) -> Result<(), BallastError> {
        let units = self.reading.manifest().units();
        for (asked, made) in asked.iter().zip(derived) {
            let expected = units.get(asked.base_unit as usize).map(|unit| unit.crc64);
            if expected != Some(made.base_crc64) {
                let message = format!(
                    "unit {} of the base was made out of bytes with checksum {:016x}; its manifest says {:016x}",
                    asked.base_unit,
                    made.base_crc64,
                    expected.unwrap_or_default()
                );
                return Err(BallastError::new(ErrorCode::ChecksumMismatch, message));
            }
        }
        Ok(())
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
