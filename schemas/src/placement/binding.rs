//! The addresses that one live process gives to its part of a placement. Only row-major views are bound: what is copied
//! is plain ranges. A binding lives as long as the process's allocations and is never written down.

use std::collections::BTreeMap;

use super::error::PlacementError;
use super::part::{PlacementFragment, PlacementPart};
use super::{Placement, PlacementIdentity};
use crate::digest::Digest;

/// Where one fragment lies in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingFragment {
    /// Which fragment of the placement.
    pub placement_fragment_id: String,
    /// First byte of the view. 0 only for a view of no bytes.
    pub address: u64,
    /// Bytes of the view.
    pub nbytes: u64,
    /// The process that can reach the address.
    pub worker: String,
    /// Where that process is reached; empty in its own.
    pub endpoint: String,
    /// The device that the address belongs to.
    pub device: String,
    /// Bytes of one element.
    pub itemsize: u64,
    /// Extent of the view, by dimension.
    pub local_shape: Vec<u64>,
    /// Bytes from one element to the next, by dimension, as the framework says.
    pub strides: Vec<i64>,
    /// First byte of the allocation that the view lies in.
    pub storage_address: u64,
    /// Bytes of the allocation.
    pub storage_nbytes: u64,
    /// Bytes from the allocation's first to the view's first.
    pub storage_offset: u64,
}

impl BindingFragment {
    /// A fragment that lies at an address of this process by itself, row-major, in an allocation of its own size.
    #[must_use]
    pub fn host(fragment: &PlacementFragment, worker: impl Into<String>, address: u64) -> Self {
        let itemsize = fragment.tensor.itemsize;
        let strides = row_major(&fragment.local_shape, itemsize).into_iter();
        Self {
            placement_fragment_id: fragment.placement_fragment_id.clone(),
            address,
            nbytes: fragment.nbytes,
            worker: worker.into(),
            endpoint: String::new(),
            device: "cpu".to_owned(),
            itemsize,
            local_shape: fragment.local_shape.clone(),
            strides: strides.map(|stride| i64::try_from(stride).unwrap_or(i64::MAX)).collect(),
            storage_address: address,
            storage_nbytes: fragment.nbytes,
            storage_offset: 0,
        }
    }

    fn check(&self, fragment: &PlacementFragment, path: &dyn Fn(&str) -> String) -> Result<(), PlacementError> {
        let name = fragment.tensor_id();
        let wrong =
            |field: &str, reason: String| Err(PlacementError::new(path(field), format!("{reason} (tensor {name:?})")));
        if self.itemsize != fragment.tensor.itemsize {
            return wrong("itemsize", format!("found {}, expected {}", self.itemsize, fragment.tensor.itemsize));
        }
        if self.local_shape != fragment.local_shape {
            return wrong("local_shape", format!("found {:?}, expected {:?}", self.local_shape, fragment.local_shape));
        }
        if self.nbytes != fragment.nbytes {
            return wrong("nbytes", format!("found {}, expected {}", self.nbytes, fragment.nbytes));
        }
        if self.strides.len() != self.local_shape.len() {
            return wrong(
                "strides",
                format!("has {} dimensions, the shape has {}", self.strides.len(), self.local_shape.len()),
            );
        }
        // A dimension of extent 1 is never stepped along, and an empty view has no elements to step between.
        let expected = row_major(&self.local_shape, self.itemsize);
        let steps = |dim: usize| self.nbytes > 0 && self.local_shape[dim] > 1;
        let off = (0..expected.len()).find(|&dim| steps(dim) && u64::try_from(self.strides[dim]) != Ok(expected[dim]));
        if let Some(dim) = off {
            let reason = format!(
                "found {:?}, expected {expected:?}: the view is not row-major in dimension {dim}",
                self.strides
            );
            return wrong("strides", reason);
        }
        if self.nbytes == 0 {
            return Ok(());
        }
        if self.address == 0 || self.storage_address == 0 {
            return wrong("address", "is 0, which is no address".to_owned());
        }
        if self.storage_address.checked_add(self.storage_nbytes).is_none() {
            return wrong("storage_nbytes", "the allocation's end does not fit in 64 bits".to_owned());
        }
        if self.storage_address.checked_add(self.storage_offset) != Some(self.address) {
            let reason = format!(
                "found {}, storage_address and storage_offset make {}",
                self.address,
                self.storage_address.wrapping_add(self.storage_offset)
            );
            return wrong("address", reason);
        }
        if self.storage_offset.checked_add(self.nbytes).is_none_or(|end| end > self.storage_nbytes) {
            let reason = format!(
                "{} bytes from byte {} reach outside the allocation of {}",
                self.nbytes, self.storage_offset, self.storage_nbytes
            );
            return wrong("nbytes", reason);
        }
        Ok(())
    }
}

/// Bytes from one element to the next, by dimension, without gaps.
fn row_major(shape: &[u64], itemsize: u64) -> Vec<u64> {
    let mut strides = vec![itemsize; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
    }
    strides
}

/// What one live process has bound: every fragment of its part, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeBinding {
    /// The model.
    pub resource_id: String,
    /// The logical revision.
    pub revision: String,
    /// The placement that it binds.
    pub placement_id: String,
    /// Its digest.
    pub placement_digest: Digest,
    /// Whose part.
    pub participant_id: String,
    /// The process; another one after each restart.
    pub instance_id: String,
    /// Of the process's allocations: another one after they moved.
    pub generation: u64,
    /// What keeps the allocations alive.
    pub lease_id: String,
    /// The addresses, in any order.
    pub fragments: Vec<BindingFragment>,
}

/// A bound range, for the overlap check.
struct Range<'a> {
    start: u64,
    end: u64,
    fragment: &'a PlacementFragment,
}

impl Placement {
    /// Whether a binding is of this placement, binds every fragment of its participant once, as row-major views inside
    /// their allocations, and no byte twice but for declared aliases.
    ///
    /// # Errors
    /// Naming the field and the tensor.
    pub fn check_binding(&self, binding: &RuntimeBinding) -> Result<(), PlacementError> {
        let mut ranges = BTreeMap::new();
        self.check_one(binding, &mut ranges, "binding")?;
        check_overlaps(ranges)
    }

    /// Whether these bindings together bind every participant that holds anything, once, each as
    /// [`Placement::check_binding`] has it, and share no bytes within one process and device.
    ///
    /// # Errors
    /// Naming the field, the tensor or the participant.
    pub fn check_bindings(&self, bindings: &[RuntimeBinding]) -> Result<(), PlacementError> {
        let mut ranges = BTreeMap::new();
        let mut bound = vec![false; self.parts().len()];
        for (at, binding) in bindings.iter().enumerate() {
            let place = self.check_one(binding, &mut ranges, &format!("bindings[{at}]"))?;
            if std::mem::replace(&mut bound[place], true) {
                let reason = format!("{:?} is bound twice", binding.participant_id);
                return Err(PlacementError::new(format!("bindings[{at}].participant_id"), reason));
            }
        }
        let unbound = |(part, bound): &(&PlacementPart, &bool)| !**bound && !part.fragments().is_empty();
        if let Some((part, _)) = self.parts().iter().zip(&bound).find(unbound) {
            let reason =
                format!("participant {:?} holds fragments and has no binding", part.participant().participant_id);
            return Err(PlacementError::new("bindings", reason));
        }
        check_overlaps(ranges)
    }

    fn check_one<'a>(
        &'a self,
        binding: &RuntimeBinding,
        ranges: &mut BTreeMap<(String, String, String), Vec<Range<'a>>>,
        path: &str,
    ) -> Result<usize, PlacementError> {
        let differs = |field: &str, found: &str, expected: &str| match found == expected {
            true => Ok(()),
            false => {
                Err(PlacementError::new(format!("{path}.{field}"), format!("found {found:?}, expected {expected:?}")))
            }
        };
        let PlacementIdentity { resource_id, revision, .. } = self.identity();
        differs("resource_id", &binding.resource_id, resource_id)?;
        differs("revision", &binding.revision, revision)?;
        differs("placement_id", &binding.placement_id, self.placement_id())?;
        differs("placement_digest", &binding.placement_digest.to_string(), &self.digest().to_string())?;
        for (field, text) in [("instance_id", &binding.instance_id), ("lease_id", &binding.lease_id)] {
            if text.is_empty() {
                return Err(PlacementError::new(format!("{path}.{field}"), "is empty, expected a non-empty string"));
            }
        }
        let Some(place) = self.part_place(&binding.participant_id) else {
            let reason = format!("{:?} is not in the placement", binding.participant_id);
            return Err(PlacementError::new(format!("{path}.participant_id"), reason));
        };
        let part = &self.parts()[place];
        let fragments = part.fragments();
        let mut bound = vec![false; fragments.len()];
        for (at, own) in binding.fragments.iter().enumerate() {
            let path = |field: &str| format!("{path}.fragments[{at}].{field}");
            let id = &own.placement_fragment_id;
            let Some(found) = part.fragment_place(id) else {
                let reason = format!("{id:?} is no fragment of participant {:?}", binding.participant_id);
                return Err(PlacementError::new(path("placement_fragment_id"), reason));
            };
            let fragment = &fragments[found];
            if std::mem::replace(&mut bound[found], true) {
                let reason = format!("{id:?} of tensor {:?} is bound twice", fragment.tensor_id());
                return Err(PlacementError::new(path("placement_fragment_id"), reason));
            }
            own.check(fragment, &path)?;
            if own.nbytes > 0 {
                // The end was checked to lie inside the allocation, whose end fits.
                let range = Range { start: own.address, end: own.address + own.nbytes, fragment };
                let space = (binding.instance_id.clone(), own.worker.clone(), own.device.clone());
                ranges.entry(space).or_default().push(range);
            }
        }
        if let Some(missing) = bound.iter().position(|bound| !bound) {
            let fragment = &fragments[missing];
            let reason = format!(
                "tensor {:?} is not bound: fragment {:?}",
                fragment.tensor_id(),
                fragment.placement_fragment_id
            );
            return Err(PlacementError::new(format!("{path}.fragments"), reason));
        }
        Ok(place)
    }
}

fn check_overlaps(spaces: BTreeMap<(String, String, String), Vec<Range<'_>>>) -> Result<(), PlacementError> {
    for mut ranges in spaces.into_values() {
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        for pair in ranges.windows(2) {
            let (first, second) = (&pair[0], &pair[1]);
            // Equal ranges stand together, so whatever overlaps at all overlaps its neighbour.
            if second.start >= first.end
                || ((first.start, first.end) == (second.start, second.end) && tied(first, second))
            {
                continue;
            }
            let reason = format!(
                "bytes from {:#x} are bound for tensor {:?} and for {:?}",
                second.start,
                first.fragment.tensor_id(),
                second.fragment.tensor_id()
            );
            return Err(PlacementError::tensor(second.fragment.tensor_id(), reason));
        }
    }
    Ok(())
}

/// Whether two fragments may be one range: the same box of members of one alias group.
fn tied(first: &Range<'_>, second: &Range<'_>) -> bool {
    let (first, second) = (first.fragment, second.fragment);
    !first.aliases.is_empty()
        && first.aliases == second.aliases
        && first.global_offset == second.global_offset
        && first.local_shape == second.local_shape
        && first.tensor_id() != second.tensor_id()
}
