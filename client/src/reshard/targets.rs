//! The buffers that a plan writes into, one for each target fragment, and how much of each has been written.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_schemas::placement::{Placement, RuntimeBinding};

use super::error::{CopyError, TargetError};
use super::plan::Plan;

#[derive(Clone, Copy, Debug)]
struct Buffer {
    address: *mut u8,
    bytes: usize,
    /// The buffer whose memory this one is.
    same_as: Option<u32>,
}

/// Exclusive hold of the buffers of one plan, in the order of [`Plan::targets`].
#[derive(Debug)]
pub struct Targets<'a> {
    buffers: Vec<Buffer>,
    written: Vec<AtomicU64>,
    held: PhantomData<&'a mut [u8]>,
}

// SAFETY: the buffers are plain memory that this value holds exclusively, like `&mut [u8]`, which may be sent.
unsafe impl Send for Targets<'_> {}
// SAFETY: through a shared reference only this module's siblings write, and they write each byte from one thread: regions
// of one plan are disjoint, and who executes a region is decided once.
unsafe impl Sync for Targets<'_> {}

impl<'a> Targets<'a> {
    /// Takes slices as buffers, in the order of [`Plan::targets`].
    ///
    /// # Errors
    /// When there are not as many as fragments, or one is not as long as its fragment.
    pub fn new(plan: &Plan, slices: Vec<&'a mut [u8]>) -> Result<Self, TargetError> {
        let raw: Vec<(*mut u8, usize)> = slices.into_iter().map(|slice| (slice.as_mut_ptr(), slice.len())).collect();
        // Exclusive slices do not overlap, so nothing is found that could be shared.
        Self::checked(plan, &raw)
    }

    /// Takes addresses as buffers, in the order of [`Plan::targets`]. Declared aliases may share one buffer, which is
    /// then written once.
    ///
    /// # Errors
    /// When there are not as many as fragments, one is not as long as its fragment or at address 0, or two share bytes
    /// that are no declared aliases.
    ///
    /// # Safety
    /// Every buffer is memory that may be written for as long as this value lives, and nobody else reads or writes it.
    pub unsafe fn from_raw(plan: &Plan, buffers: &[(*mut u8, usize)]) -> Result<Self, TargetError> {
        Self::checked(plan, buffers)
    }

    /// Takes the addresses of bindings, which [`Placement::check_bindings`] or [`Placement::check_binding`] has accepted
    /// for the placement that the plan was made for.
    ///
    /// # Errors
    /// When a fragment is bound by none of them; or as [`Targets::from_raw`].
    ///
    /// # Safety
    /// The bindings' addresses are of this process, and as [`Targets::from_raw`].
    pub unsafe fn from_bindings(
        plan: &Plan,
        placement: &Placement,
        bindings: &[RuntimeBinding],
    ) -> Result<Self, TargetError> {
        let mut bound: HashMap<(&str, &str), (u64, u64)> = HashMap::new();
        for binding in bindings {
            for own in &binding.fragments {
                bound.insert((&binding.participant_id, &own.placement_fragment_id), (own.address, own.nbytes));
            }
        }
        let mut raw = Vec::with_capacity(plan.targets.len());
        for target in &plan.targets {
            let fragment = placement.fragment(target.place);
            let part = placement.parts().get(target.place.part as usize);
            let key = part
                .zip(fragment)
                .map(|(part, own)| (part.participant().participant_id.as_str(), own.placement_fragment_id.as_str()));
            let Some((address, nbytes)) = key.and_then(|key| bound.get(&key)) else {
                let fragment = key.map_or("", |key| key.1).to_owned();
                return Err(TargetError::Unbound { tensor: plan.name(target.tensor), fragment });
            };
            // What does not fit is no address of this process, and refused by its length.
            raw.push((*address as usize as *mut u8, usize::try_from(*nbytes).unwrap_or(usize::MAX)));
        }
        Self::checked(plan, &raw)
    }

    fn checked(plan: &Plan, raw: &[(*mut u8, usize)]) -> Result<Self, TargetError> {
        if raw.len() != plan.targets.len() {
            return Err(TargetError::Count { expected: plan.targets.len(), found: raw.len() });
        }
        for (target, (address, bytes)) in plan.targets.iter().zip(raw) {
            let tensor = || plan.name(target.tensor);
            if *bytes as u64 != target.nbytes {
                return Err(TargetError::Length { tensor: tensor(), expected: target.nbytes, found: *bytes as u64 });
            }
            if address.is_null() && *bytes > 0 {
                return Err(TargetError::Null { tensor: tensor() });
            }
        }
        let mut buffers: Vec<Buffer> =
            raw.iter().map(|(address, bytes)| Buffer { address: *address, bytes: *bytes, same_as: None }).collect();
        let mut order: Vec<u32> = (0..raw.len() as u32).filter(|at| raw[*at as usize].1 > 0).collect();
        let range = |at: u32| {
            let (address, bytes) = raw[at as usize];
            (address as usize, (address as usize).saturating_add(bytes))
        };
        order.sort_unstable_by_key(|at| (range(*at), *at));
        for pair in order.windows(2) {
            let (first, second) = (pair[0], pair[1]);
            // Equal ranges stand together, so whatever overlaps at all overlaps its neighbour.
            if range(second).0 >= range(first).1 {
                continue;
            }
            let root = |at: u32| plan.targets[at as usize].tied_to.unwrap_or(at);
            if range(first) != range(second) || root(first) != root(second) {
                let name = |at: u32| plan.name(plan.targets[at as usize].tensor);
                return Err(TargetError::Overlap { tensor: name(first), other: name(second) });
            }
            buffers[second as usize].same_as = Some(buffers[first as usize].same_as.unwrap_or(first));
        }
        let written = raw.iter().map(|_| AtomicU64::new(0)).collect();
        Ok(Self { buffers, written, held: PhantomData })
    }

    /// Names of the tensors that are not written completely.
    #[must_use]
    pub fn unwritten(&self, plan: &Plan) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (at, target) in plan.targets.iter().enumerate() {
            if !self.is_written(at) && names.last() != Some(&plan.name(target.tensor)) {
                names.push(plan.name(target.tensor));
            }
        }
        names
    }

    /// Whether every fragment is written completely.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        (0..self.buffers.len()).all(|at| self.is_written(at))
    }

    /// Bytes written so far.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        self.written.iter().map(|written| written.load(Ordering::Relaxed)).sum()
    }

    fn is_written(&self, target: usize) -> bool {
        let buffer = self.buffers[target];
        let at = buffer.same_as.map_or(target, |first| first as usize);
        self.written[at].load(Ordering::Acquire) >= self.buffers[at].bytes as u64
    }

    /// That these are buffers for that plan.
    pub(super) fn check(&self, plan: &Plan) -> Result<(), CopyError> {
        for (at, target) in plan.targets.iter().enumerate() {
            let found = self.buffers.get(at).map_or(0, |buffer| buffer.bytes as u64);
            if found != target.nbytes {
                let tensor = plan.name(target.tensor);
                return Err(CopyError::Targets { tensor, target: at, expected: target.nbytes, found });
            }
        }
        Ok(())
    }

    /// Where a fragment is written to; `None` for one whose memory another one fills.
    pub(super) fn address(&self, target: u32) -> Option<*mut u8> {
        let buffer = self.buffers.get(target as usize)?;
        buffer.same_as.is_none().then_some(buffer.address)
    }

    pub(super) fn add_written(&self, target: u32, bytes: u64) {
        self.written[target as usize].fetch_add(bytes, Ordering::AcqRel);
    }
}
