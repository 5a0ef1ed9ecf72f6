//! What a plan says. It holds no address, no name of a node and no lease, so one plan serves every load of the same
//! revision into the same placement.

use std::sync::Arc;

use ballast_schemas::manifest::Tensor;
use ballast_schemas::placement::FragmentPlace;

use super::region::Region;

/// What one plan, and one lowering of it, may grow to. Beyond any of these it is refused before it is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Regions of one plan.
    pub regions: u64,
    /// Pairs of boxes that planning may compare.
    pub comparisons: u64,
    /// Segments that one region may be lowered to.
    pub segments_per_region: u64,
    /// Segments that one lowering may have in all.
    pub segments: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { regions: 1_000_000, comparisons: 50_000_000, segments_per_region: 1_000_000, segments: 10_000_000 }
    }
}

/// Where the bytes of a source fragment are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourcePlace {
    /// In a unit of a stored manifest of version 2.
    Unit {
        /// Index of the manifest's fragment.
        fragment: u32,
        /// The unit.
        unit: u32,
        /// First byte inside the unit.
        offset: u64,
    },
    /// In the payload object that a manifest of version 1 names.
    Object {
        /// Index of the manifest's fragment.
        fragment: u32,
    },
    /// In the memory of a participant of the source placement.
    Held(FragmentPlace),
}

/// A fragment that is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceFragment {
    /// Index of the tensor in the plan.
    pub tensor: u32,
    /// Where its bytes are.
    pub place: SourcePlace,
    /// Bytes of the fragment.
    pub nbytes: u64,
}

/// A fragment that is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetFragment {
    /// Index of the tensor in the plan.
    pub tensor: u32,
    /// Where it stands in the target placement; part 0 when the target is a part by itself.
    pub place: FragmentPlace,
    /// Bytes of the fragment; 0 for the empty shard of an uneven split.
    pub nbytes: u64,
    /// An earlier target fragment that may be the same memory: the same box of a declared alias, of one participant.
    pub tied_to: Option<u32>,
}

/// Which bytes of which source fragment go where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub(super) tensors: Vec<Arc<Tensor>>,
    pub(super) sources: Vec<SourceFragment>,
    pub(super) targets: Vec<TargetFragment>,
    pub(super) regions: Vec<Region>,
    pub(super) bytes: u64,
}

impl Plan {
    /// The tensors that the target wants, by name.
    #[must_use]
    pub fn tensors(&self) -> &[Arc<Tensor>] {
        &self.tensors
    }

    /// The fragments that are read from, by tensor.
    #[must_use]
    pub fn sources(&self) -> &[SourceFragment] {
        &self.sources
    }

    /// The fragments that are written to, by tensor and then by participant: the order in which buffers are given.
    #[must_use]
    pub fn targets(&self) -> &[TargetFragment] {
        &self.targets
    }

    /// The copies that make up the plan, by target fragment.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Bytes that the plan writes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn name(&self, tensor: u32) -> String {
        self.tensors.get(tensor as usize).map_or_else(String::new, |tensor| tensor.tensor_id.clone())
    }
}
