//! The stored weight manifest (RFC: StoredWeightManifest): an immutable document of tensors, fragments, aliases, extra
//! files and payload ranges, identified by the SHA-256 of its canonical JSON. Version 2 is written; version 1 is read.
//!
//! Not here: lifecycle, leases, replicas, addresses, tenant. See ARCHITECTURE.md, Manifest.

mod cover;
mod document;
mod error;
mod json;
mod parts;
mod plan;
#[cfg(test)]
mod tests;
mod validate;

use std::fmt;

use document::Document;
pub use error::ManifestError;
pub use parts::{
    AxisKind, ExtraFile, FRAGMENT_ALIGN_BYTES, Fragment, ParallelAxis, ROW_MAJOR, Tensor, Unit, check_file_path,
    check_tensor_name, fragment_id, volume_bytes,
};
pub use plan::{ManifestPlan, PlannedTensor};

// What placement documents share with this one.
pub(crate) use cover::{CoverProblem, Region, check_cover};
pub(crate) use document::{read_tensor, write_tensor};
pub(crate) use json::{Reader, Writer};
pub(crate) use parts::{PARTS_MAX, RANK_MAX};
use validate::Lookup;

use crate::affinity::{AffinityIndex, AffinityUnit, affinity_digest};
use crate::digest::{Digest, hash_list};
use crate::identity::{GroupId, RevisionIdentity};
use crate::metadata::ManifestRef;

/// A manifest that keeps every rule.
#[derive(Clone, PartialEq, Eq)]
pub struct Manifest {
    document: Document,
    lookup: Lookup,
    sha256: Digest,
}

impl fmt::Debug for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manifest")
            .field("key", &self.document.manifest_key)
            .field("version", &self.document.version)
            .field("tensors", &self.document.tensors.len())
            .field("units", &self.document.units.len())
            .field("files", &self.document.files.len())
            .field("sha256", &self.sha256)
            .finish()
    }
}

impl Manifest {
    /// Reads a canonical document, version 2 or 1, and checks every rule.
    ///
    /// # Errors
    /// Naming the field.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let document = document::read(bytes)?;
        let lookup = validate::validate(&document)?;
        Ok(Self { document, lookup, sha256: Digest::of(bytes) })
    }

    fn from_document(document: Document) -> Result<Self, ManifestError> {
        let lookup = validate::validate(&document)?;
        let sha256 = Digest::of(&document::write(&document, true));
        Ok(Self { document, lookup, sha256 })
    }

    /// The canonical JSON: what was parsed, byte by byte.
    #[must_use]
    pub fn to_canonical_bytes(&self) -> Vec<u8> {
        document::write(&self.document, true)
    }

    /// SHA-256 of the canonical JSON: the manifest's identity.
    #[must_use]
    pub fn sha256(&self) -> Digest {
        self.sha256
    }

    /// 2, or 1 for documents of the earlier format, which has no units and no checksums.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.document.version
    }

    /// Namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.document.namespace
    }

    /// The model.
    #[must_use]
    pub fn resource_id(&self) -> &str {
        &self.document.resource_id
    }

    /// The logical revision.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.document.revision
    }

    /// The generation.
    #[must_use]
    pub fn weight_generation(&self) -> u64 {
        self.document.weight_generation
    }

    /// The managed group.
    #[must_use]
    pub fn group_id(&self) -> &str {
        &self.document.group_id
    }

    /// Where the manifest itself lies.
    #[must_use]
    pub fn manifest_key(&self) -> &str {
        &self.document.manifest_key
    }

    /// Version 1: when it was made, as it says.
    #[must_use]
    pub fn created_at(&self) -> Option<&str> {
        self.document.created_at.as_deref()
    }

    /// The tensors; by name in version 2.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.document.tensors
    }

    /// The fragments; by tensor and offset in version 2.
    #[must_use]
    pub fn fragments(&self) -> &[Fragment] {
        &self.document.fragments
    }

    /// The units by index; none in version 1.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.document.units
    }

    /// The extra files by path.
    #[must_use]
    pub fn files(&self) -> &[ExtraFile] {
        &self.document.files
    }

    /// A tensor by its name.
    #[must_use]
    pub fn tensor(&self, tensor_id: &str) -> Option<&Tensor> {
        self.lookup.tensor(&self.document.tensors, tensor_id).map(|at| &self.document.tensors[at])
    }

    /// An extra file by its path.
    #[must_use]
    pub fn file(&self, path: &str) -> Option<&ExtraFile> {
        let files = &self.document.files;
        files.binary_search_by(|file| file.path.as_str().cmp(path)).ok().map(|at| &files[at])
    }

    /// The fragments that hold the bytes of a tensor (of an alias: its group's); none when there is no such tensor.
    pub fn fragments_of(&self, tensor_id: &str) -> impl Iterator<Item = &Fragment> {
        let tensor = self.lookup.tensor(&self.document.tensors, tensor_id);
        let places = tensor.map_or(&[][..], |tensor| self.lookup.fragments_of(tensor));
        places.iter().map(|place| &self.document.fragments[*place as usize])
    }

    /// Where a tensor stands in [`Manifest::tensors`].
    #[must_use]
    pub fn tensor_place(&self, tensor_id: &str) -> Option<usize> {
        self.lookup.tensor(&self.document.tensors, tensor_id)
    }

    /// Where the fragments that hold a tensor's bytes stand in [`Manifest::fragments`], for the tensor at this place in
    /// [`Manifest::tensors`]; none when there is no such place.
    #[must_use]
    pub fn fragment_places(&self, tensor_place: usize) -> &[u32] {
        if tensor_place < self.document.tensors.len() { self.lookup.fragments_of(tensor_place) } else { &[] }
    }

    /// Logical payload bytes of all units.
    #[must_use]
    pub fn logical_bytes(&self) -> u64 {
        self.document.units.iter().fold(0, |sum, unit| sum.saturating_add(unit.logical_bytes))
    }

    /// Digest of the geometry: the document without checksums.
    #[must_use]
    pub fn placement_digest(&self) -> Digest {
        let mut text = b"ballast-placement-v2\n".to_vec();
        text.extend(document::write(&self.document, false));
        Digest::of(&text)
    }

    /// The units as layout, planner and inventories number them. Empty for version 1.
    #[must_use]
    pub fn affinity_index(&self) -> AffinityIndex {
        let unit = |unit: &Unit| AffinityUnit {
            affinity_id: unit.affinity_id,
            extent_bytes: unit.extent_bytes,
            logical_bytes: unit.logical_bytes,
            crc64: unit.crc64,
        };
        AffinityIndex { units: self.document.units.iter().map(unit).collect() }
    }

    /// The member names of every unit, by index.
    #[must_use]
    pub fn affinity_groups(&self) -> Vec<Vec<&str>> {
        let mut groups: Vec<Vec<&str>> = Vec::with_capacity(self.document.units.len());
        if self.document.version == 1 {
            return groups;
        }
        for fragment in &self.document.fragments {
            if fragment.unit as usize == groups.len() {
                groups.push(match fragment.aliases.is_empty() {
                    true => vec![&fragment.tensor_id],
                    false => fragment.aliases.iter().map(String::as_str).collect(),
                });
            }
        }
        groups.extend(self.document.files.iter().map(|file| ExtraFile::affinity_members(&file.path).to_vec()));
        groups
    }

    /// The reference that metadata keeps of this manifest, for the revision it must belong to.
    ///
    /// # Errors
    /// When it belongs to another revision, or is of version 1, which can not be published.
    pub fn manifest_ref(&self, identity: &RevisionIdentity) -> Result<ManifestRef, ManifestError> {
        self.check_identity(identity)?;
        self.manifest_ref_of_group(&identity.group_id())
    }

    /// As [`Manifest::manifest_ref`], for one who knows only the managed group.
    ///
    /// # Errors
    /// As there.
    pub fn manifest_ref_of_group(&self, group_id: &GroupId) -> Result<ManifestRef, ManifestError> {
        if self.document.version != 2 {
            let reason = "1 has no checksums and can not be published; import the weights again";
            return Err(ManifestError::new("version", reason));
        }
        if self.document.group_id != group_id.as_str() {
            return Err(ManifestError::new(
                "group_id",
                format!("found {:?}, expected {:?}", self.document.group_id, group_id.as_str()),
            ));
        }
        let mut keys: Vec<&str> = Vec::with_capacity(self.document.units.len());
        for fragment in &self.document.fragments {
            if fragment.unit as usize == keys.len() {
                keys.push(&fragment.object_key);
            }
        }
        keys.extend(self.document.files.iter().map(|file| file.object_key.as_str()));
        keys.sort_unstable();
        Ok(ManifestRef {
            key: self.document.manifest_key.clone(),
            sha256: self.sha256,
            group_id: group_id.clone(),
            payload_keys_sha256: hash_list(keys.iter().map(|key| key.as_bytes())),
            payload_count: keys.len() as u64,
            logical_bytes: self.logical_bytes(),
            affinity_count: self.document.units.len() as u32,
            affinity_digest: affinity_digest(&self.affinity_groups()),
        })
    }

    /// Whether this is the manifest of that revision.
    ///
    /// # Errors
    /// Naming the field that differs.
    pub fn check_identity(&self, identity: &RevisionIdentity) -> Result<(), ManifestError> {
        let document = &self.document;
        let differs = |field: &str, found: &str, expected: &str| {
            if found == expected {
                return Ok(());
            }
            Err(ManifestError::new(field, format!("found {found:?}, expected {expected:?}")))
        };
        differs("namespace", &document.namespace, identity.namespace.as_str())?;
        differs("resource_id", &document.resource_id, identity.resource_id.as_str())?;
        differs("revision", &document.revision, identity.revision.as_str())?;
        if document.weight_generation != identity.weight_generation {
            let reason = format!("found {}, expected {}", document.weight_generation, identity.weight_generation);
            return Err(ManifestError::new("weight_generation", reason));
        }
        if document.version == 2 {
            differs("group_id", &document.group_id, identity.group_id().as_str())?;
        }
        Ok(())
    }
}
