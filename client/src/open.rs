//! A revision opened in place: read-only views of its tensors whose lease lives as long as they do. What is in memory on
//! this host is mapped, not copied; the rest is read into buffers of ours (ARCHITECTURE.md, Transports).

use std::collections::HashMap;
use std::sync::Arc;

use ballast_schemas::manifest::Manifest;
use ballast_schemas::{BallastError, RevisionIdentity, WeightRevisionMetadata};
use ballast_transfer::MappedInstance;

use crate::fetch::{Kept, compare, fetch};
use crate::get::{GetOptions, Verify};
use crate::lease::HeldLease;
use crate::progress::Phase;
use crate::reading::Reading;
use crate::source::user_shape;
use crate::store::WeightStore;

/// An open revision. Dropping it releases the lease in the background; [`OpenRevision::close`] also says whether the lease
/// had lapsed.
#[derive(Debug)]
pub struct OpenRevision {
    revision: WeightRevisionMetadata,
    manifest: Arc<Manifest>,
    lease: HeldLease,
    mapped: Vec<Arc<MappedInstance>>,
    /// Units that no mapping shows.
    owned: HashMap<u32, Vec<u8>>,
}

/// One tensor, where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// Element type by its safetensors name.
    pub dtype: &'a str,
    /// Bytes, row-major.
    pub bytes: &'a [u8],
}

impl OpenRevision {
    /// Opens a revision. Units that are not in this host's memory are read now.
    ///
    /// # Errors
    /// As for [`WeightStore::weight_get`].
    pub async fn open(
        store: &WeightStore,
        identity: &RevisionIdentity,
        options: GetOptions,
    ) -> Result<Self, BallastError> {
        let mut reading = Reading::open(store.gateway(), identity, &options).await?;
        let manifest = reading.manifest().clone();
        let (holders, _) = reading.holders().await;
        let mapped: Vec<Arc<MappedInstance>> = holders.into_iter().filter_map(|holder| holder.mapped).collect();
        let shown = |unit: u32| mapped.iter().find_map(|mapped| mapped.view(unit));
        if options.verify == Verify::Always {
            verify(&mapped, &manifest).await?;
        }
        let rest: Vec<u32> = (0..manifest.units().len() as u32).filter(|unit| shown(*unit).is_none()).collect();
        let total = rest.iter().map(|unit| reading.bytes_of(*unit)).sum();
        let kept = Arc::new(Kept::default());
        let meter = options.progress.meter(Phase::Reading, total);
        fetch(&mut reading, &rest, kept.clone(), options.verify, &meter).await?;
        let owned = Arc::into_inner(kept).map(Kept::into_units).unwrap_or_default();
        let revision = reading.revision().clone();
        Ok(Self { revision, manifest, lease: reading.into_lease(), mapped, owned })
    }

    /// Which revision.
    #[must_use]
    pub fn identity(&self) -> &RevisionIdentity {
        &self.revision.identity
    }

    /// Its record when the lease was granted.
    #[must_use]
    pub fn revision(&self) -> &WeightRevisionMetadata {
        &self.revision
    }

    /// Its manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether the lease is known to have ended. The views stay valid: bytes of a revision never change.
    #[must_use]
    pub fn lease_lapsed(&self) -> bool {
        self.lease.lapsed()
    }

    /// Bytes that are mapped, not copied.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        let copied: u64 = self.owned.values().map(|bytes| bytes.len() as u64).sum();
        self.manifest.logical_bytes().saturating_sub(copied)
    }

    /// A tensor by its name; `None` when there is none, or when it is stored in several fragments.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let mut fragments = self.manifest.fragments_of(name);
        let (fragment, None) = (fragments.next()?, fragments.next()) else { return None };
        let start = usize::try_from(fragment.object_offset).ok()?;
        let end = start.checked_add(usize::try_from(fragment.nbytes).ok()?)?;
        let bytes = self.unit(fragment.unit)?.get(start..end)?;
        Some(TensorView { dtype: &self.manifest.tensor(name)?.dtype, bytes })
    }

    /// The boxes in which a tensor is stored: first element, extent and bytes of each; none when there is no such tensor.
    pub fn fragments(&self, name: &str) -> impl Iterator<Item = (&[u64], &[u64], &[u8])> {
        self.manifest.fragments_of(name).filter_map(|fragment| {
            let start = usize::try_from(fragment.object_offset).ok()?;
            let end = start.checked_add(usize::try_from(fragment.nbytes).ok()?)?;
            let bytes = if start == end { &[][..] } else { self.unit(fragment.unit)?.get(start..end)? };
            Some((fragment.global_offset.as_slice(), fragment.local_shape.as_slice(), bytes))
        })
    }

    /// A tensor's dimensions.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<Vec<u64>> {
        self.manifest.tensor(name).map(user_shape)
    }

    /// One of the model's other files.
    #[must_use]
    pub fn file(&self, path: &str) -> Option<&[u8]> {
        self.unit(self.manifest.file(path)?.unit)
    }

    fn unit(&self, unit: u32) -> Option<&[u8]> {
        self.owned.get(&unit).map(Vec::as_slice).or_else(|| self.mapped.iter().find_map(|mapped| mapped.view(unit)))
    }

    /// Ends the lease.
    ///
    /// # Errors
    /// `LEASE_EXPIRED` when it had lapsed while the revision was open; `UNAVAILABLE` when nobody could say.
    pub async fn close(self) -> Result<(), BallastError> {
        self.lease.release().await
    }
}

/// Compares the checksum of everything that is mapped.
async fn verify(mapped: &[Arc<MappedInstance>], manifest: &Arc<Manifest>) -> Result<(), BallastError> {
    let (mapped, manifest) = (mapped.to_vec(), manifest.clone());
    let verified = tokio::task::spawn_blocking(move || {
        for unit in 0..manifest.units().len() as u32 {
            if let Some(view) = mapped.iter().find_map(|mapped| mapped.view(unit)) {
                compare(&manifest, unit, ballast_transfer::checksum(view))?;
            }
        }
        Ok(())
    });
    verified.await.map_err(|error| BallastError::invalid(format!("verifying failed: {error}")))?
}
