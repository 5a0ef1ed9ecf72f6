//! From tensors and files to a manifest: which unit each fragment lies in and where. The geometry is known before any
//! byte has moved; the checksums complete it.

use super::Manifest;
use super::document::Document;
use super::error::ManifestError;
use super::parts::{ExtraFile, FRAGMENT_ALIGN_BYTES, Fragment, Tensor, Unit, fragment_id, volume_bytes};
use crate::affinity::affinity_id;
use crate::digest::Digest;
use crate::identity::RevisionIdentity;

/// One stored tensor or alias group, as the importer describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedTensor {
    /// The descriptor.
    pub tensor: Tensor,
    /// Further names of the same bytes.
    pub aliases: Vec<String>,
    /// First element and extent of each fragment, in any order; none: one fragment that is the whole tensor.
    pub fragments: Vec<(Vec<u64>, Vec<u64>)>,
}

impl From<Tensor> for PlannedTensor {
    fn from(tensor: Tensor) -> Self {
        Self { tensor, aliases: Vec::new(), fragments: Vec::new() }
    }
}

/// The complete geometry of a revision: a manifest that lacks only its checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestPlan {
    draft: Manifest,
}

impl ManifestPlan {
    /// Plans one unit for each tensor or alias group and one for each extra file (path and size).
    ///
    /// # Errors
    /// Naming the first part that is not allowed.
    pub fn new(
        identity: &RevisionIdentity,
        tensors: Vec<PlannedTensor>,
        files: Vec<(String, u64)>,
    ) -> Result<Self, ManifestError> {
        let payload = format!("{}/payload", identity.key_base());
        let mut document = Document {
            version: 2,
            namespace: identity.namespace.as_str().to_owned(),
            resource_id: identity.resource_id.as_str().to_owned(),
            revision: identity.revision.as_str().to_owned(),
            weight_generation: identity.weight_generation,
            group_id: identity.group_id().as_str().to_owned(),
            manifest_key: identity.manifest_key(),
            created_at: None,
            tensors: Vec::with_capacity(tensors.len()),
            fragments: Vec::with_capacity(tensors.len()),
            units: Vec::with_capacity(tensors.len() + files.len()),
            files: Vec::with_capacity(files.len()),
        };
        let mut groups: Vec<(Vec<String>, PlannedTensor)> = tensors
            .into_iter()
            .map(|mut planned| {
                let mut names = std::mem::take(&mut planned.aliases);
                names.push(planned.tensor.tensor_id.clone());
                names.sort_unstable();
                (names, planned)
            })
            .collect();
        groups.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        for (names, planned) in groups {
            plan_unit(&mut document, &payload, &names, planned)?;
        }
        let mut files = files;
        files.sort_unstable();
        for (path, nbytes) in files {
            let affinity_id = affinity_id(&ExtraFile::affinity_members(&path));
            let unit = document.units.len() as u32;
            document.units.push(Unit { affinity_id, extent_bytes: nbytes, logical_bytes: nbytes, crc64: 0 });
            document.files.push(ExtraFile {
                path,
                nbytes,
                object_key: payload_key(&payload, &affinity_id),
                object_offset: 0,
                unit,
            });
        }
        document.tensors.sort_unstable_by(|a, b| a.tensor_id.cmp(&b.tensor_id));
        Manifest::from_document(document).map(|draft| Self { draft })
    }

    /// The fragments, each at its place.
    #[must_use]
    pub fn fragments(&self) -> &[Fragment] {
        self.draft.fragments()
    }

    /// The tensors, by name.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        self.draft.tensors()
    }

    /// The extra files, each at its place.
    #[must_use]
    pub fn files(&self) -> &[ExtraFile] {
        self.draft.files()
    }

    /// Extent bytes of every unit by index: what the layout follows from.
    #[must_use]
    pub fn extents(&self) -> Vec<u64> {
        self.draft.units().iter().map(|unit| unit.extent_bytes).collect()
    }

    /// How many units.
    #[must_use]
    pub fn unit_count(&self) -> u32 {
        self.draft.units().len() as u32
    }

    /// Logical payload bytes of all units.
    #[must_use]
    pub fn logical_bytes(&self) -> u64 {
        self.draft.logical_bytes()
    }

    /// Digest of the geometry: everything but the checksums.
    #[must_use]
    pub fn placement_digest(&self) -> Digest {
        self.draft.placement_digest()
    }

    /// Completes the manifest with the CRC-64/NVME of every unit's extent, by index.
    ///
    /// # Errors
    /// When there are not as many checksums as units.
    pub fn seal(self, checksums: &[u64]) -> Result<Manifest, ManifestError> {
        let mut document = self.draft.document;
        if checksums.len() != document.units.len() {
            let reason = format!("{} checksums for {} units", checksums.len(), document.units.len());
            return Err(ManifestError::new("units", reason));
        }
        for (unit, crc64) in document.units.iter_mut().zip(checksums) {
            unit.crc64 = *crc64;
        }
        Manifest::from_document(document)
    }
}

/// Where a unit's payload object lies: the same for the same content, so that a repeated import writes the same manifest.
fn payload_key(payload: &str, affinity_id: &Digest) -> String {
    let hex = affinity_id.to_string();
    format!("{payload}/{}", &hex[..32])
}

fn plan_unit(
    document: &mut Document,
    payload: &str,
    names: &[String],
    planned: PlannedTensor,
) -> Result<(), ManifestError> {
    let mut tensor = planned.tensor;
    let mut boxes = planned.fragments;
    if boxes.is_empty() {
        boxes.push((vec![0; tensor.global_shape.len()], tensor.global_shape.clone()));
    }
    boxes.sort_unstable();
    let members: Vec<&str> = names.iter().map(String::as_str).collect();
    let affinity_id = affinity_id(&members);
    let unit = document.units.len() as u32;
    let object_key = payload_key(payload, &affinity_id);
    let too_large = || ManifestError::new(format!("tensor {:?}", names[0]), "its bytes do not fit in 64 bits");
    let (mut end, mut logical_bytes) = (0_u64, 0_u64);
    for (global_offset, local_shape) in boxes {
        let nbytes = volume_bytes(&local_shape, tensor.itemsize).ok_or_else(too_large)?;
        let object_offset = end.checked_next_multiple_of(FRAGMENT_ALIGN_BYTES).ok_or_else(too_large)?;
        if nbytes > 0 {
            end = object_offset.checked_add(nbytes).ok_or_else(too_large)?;
            logical_bytes += nbytes;
        }
        document.fragments.push(Fragment {
            fragment_id: fragment_id(&names[0], &global_offset, &local_shape),
            tensor_id: names[0].clone(),
            aliases: if names.len() > 1 { names.to_vec() } else { Vec::new() },
            global_offset,
            local_shape,
            object_key: object_key.clone(),
            object_offset,
            nbytes,
            unit,
        });
    }
    document.units.push(Unit { affinity_id, extent_bytes: end, logical_bytes, crc64: 0 });
    for name in &names[1..] {
        let mut alias = tensor.clone();
        alias.tensor_id.clone_from(name);
        document.tensors.push(alias);
    }
    tensor.tensor_id.clone_from(&names[0]);
    document.tensors.push(tensor);
    Ok(())
}
