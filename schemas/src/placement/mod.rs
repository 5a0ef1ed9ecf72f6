//! Who holds which box of which tensor (RFC, Relationship to Reshard, Transfer Engine, and DTensor): topologies of explicit participants, the part that
//! each of them holds, the placement that all parts make together, and the addresses that one process binds to its part.
//!
//! Placements are address-free documents named by the digest of their canonical JSON; bindings live and die with a
//! process and are never written down. Not here: how bytes get from one placement to another.

mod ascii;
mod binding;
mod document;
mod error;
mod part;
#[cfg(test)]
mod tests;
mod topology;
mod validate;

use std::sync::{Arc, OnceLock};

pub use binding::{BindingFragment, RuntimeBinding};
pub use error::PlacementError;
pub use part::{PlacementFragment, PlacementIdentity, PlacementPart};
pub use topology::{AxisSizes, PARTICIPANTS_MAX, ParallelRank, ParallelTopology, Participant};

use crate::digest::Digest;
use crate::manifest::{AxisKind, Tensor};
use document::Named;
use part::ByTensor;
use validate::Roles;

/// Where a fragment stands in a placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FragmentPlace {
    /// Index in [`Placement::parts`].
    pub part: u32,
    /// Index in [`PlacementPart::fragments`].
    pub fragment: u32,
}

/// One complete placement of a weight generation: the parts of every participant, which hold every tensor as its axes
/// say.
#[derive(Clone, Debug)]
pub struct Placement {
    identity: PlacementIdentity,
    topology: ParallelTopology,
    parts: Vec<PlacementPart>,
    tensors: Vec<Arc<Tensor>>,
    by_tensor: ByTensor<FragmentPlace>,
    named: OnceLock<Named>,
}

impl PartialEq for Placement {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity && self.topology == other.topology && self.parts == other.parts
    }
}

impl Eq for Placement {}

impl Placement {
    /// The placement that these parts make, given in any order.
    ///
    /// # Errors
    /// When a participant's part is missing, doubled, or of other weights, another topology or another gathering; when a
    /// tensor is not held as its axes say, or has two descriptors; when alias groups disagree. Names the field or tensor.
    pub fn assemble(
        identity: PlacementIdentity,
        topology: ParallelTopology,
        mut parts: Vec<PlacementPart>,
    ) -> Result<Self, PlacementError> {
        parts.sort_by(|a, b| a.participant().participant_id.cmp(&b.participant().participant_id));
        validate::check_parts(&identity, &topology, &parts)?;
        let (tensors, by_tensor) = validate::check_contents(&topology, &parts)?;
        Ok(Self { identity, topology, parts, tensors, by_tensor, named: OnceLock::new() })
    }

    /// The placement whose parts follow from the axes of each tensor, as [`PlacementPart::from_axes`] has them.
    ///
    /// # Errors
    /// As [`Placement::assemble`].
    pub fn from_axes(
        identity: PlacementIdentity,
        topology: ParallelTopology,
        tensors: &[Arc<Tensor>],
        owns: impl Fn(&Tensor, &ParallelRank) -> bool,
    ) -> Result<Self, PlacementError> {
        let part = |participant: &Participant| {
            PlacementPart::from_axes(identity.clone(), &topology, &participant.participant_id, tensors, &owns)
        };
        let parts = topology.participants().iter().map(part).collect::<Result<_, _>>()?;
        Self::assemble(identity, topology, parts)
    }

    /// Reads the canonical document of a placement.
    ///
    /// # Errors
    /// Naming the field.
    pub fn parse(bytes: &[u8]) -> Result<Self, PlacementError> {
        document::parse_placement(bytes)
    }

    /// The canonical document.
    #[must_use]
    pub fn to_canonical_bytes(&self) -> Vec<u8> {
        document::write_placement(self, self.placement_id())
    }

    /// `sha256:` and the digest of what the placement says.
    #[must_use]
    pub fn placement_id(&self) -> &str {
        &self.names().placement_id
    }

    /// SHA-256 of the canonical document.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.names().digest
    }

    /// Worked out when first asked for: the document of a large placement is long.
    fn names(&self) -> &Named {
        self.named.get_or_init(|| Named::of(&document::write_placement(self, "")))
    }

    fn named(self, named: Named) -> Self {
        Self { named: OnceLock::from(named), ..self }
    }

    /// Which weights.
    #[must_use]
    pub fn identity(&self) -> &PlacementIdentity {
        &self.identity
    }

    /// Who takes part.
    #[must_use]
    pub fn topology(&self) -> &ParallelTopology {
        &self.topology
    }

    /// The parts, one for each participant, by their names.
    #[must_use]
    pub fn parts(&self) -> &[PlacementPart] {
        &self.parts
    }

    /// The part of a participant.
    #[must_use]
    pub fn part(&self, participant_id: &str) -> Option<&PlacementPart> {
        self.part_place(participant_id).map(|at| &self.parts[at])
    }

    /// Where a participant's part stands in [`Placement::parts`].
    #[must_use]
    pub fn part_place(&self, participant_id: &str) -> Option<usize> {
        // There is one part for each participant, in the same order.
        self.topology.participant_place(participant_id)
    }

    /// The tensors of all parts, by name.
    #[must_use]
    pub fn tensors(&self) -> &[Arc<Tensor>] {
        &self.tensors
    }

    /// The fragments of a tensor, in order of the parts, for the tensor at this place in [`Placement::tensors`].
    #[must_use]
    pub fn fragment_places(&self, tensor_place: usize) -> &[FragmentPlace] {
        self.by_tensor.of(tensor_place)
    }

    /// The fragment at a place that this placement has given.
    #[must_use]
    pub fn fragment(&self, place: FragmentPlace) -> Option<&PlacementFragment> {
        self.parts.get(place.part as usize)?.fragments().get(place.fragment as usize)
    }

    /// The data-parallel rank to read from: the lowest whose participants hold every tensor that is not owned along that
    /// axis.
    ///
    /// # Errors
    /// When no data-parallel rank holds them all; names a tensor that the lowest one lacks.
    pub fn source_replica(&self) -> Result<SourceReplica<'_>, PlacementError> {
        let mut ranks: Vec<u32> = self.topology.participants().iter().map(|participant| participant.rank.dp).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let mut lacking = None;
        for dp in ranks {
            let lacks = |place: &usize| {
                !Roles::of(&self.tensors[*place]).owned_by(AxisKind::Dp)
                    && !self.fragment_places(*place).iter().any(|at| self.rank_of(*at).dp == dp)
            };
            match (0..self.tensors.len()).find(lacks) {
                None => return Ok(SourceReplica { placement: self, dp }),
                Some(place) => lacking = lacking.or(Some((dp, place))),
            }
        }
        let (dp, place) = lacking.unwrap_or_default();
        let tensor_id = self.tensors.get(place).map_or("", |tensor| &tensor.tensor_id);
        Err(PlacementError::tensor(
            tensor_id,
            format!("no data-parallel rank holds every tensor; rank {dp} lacks this one"),
        ))
    }

    fn rank_of(&self, place: FragmentPlace) -> &ParallelRank {
        &self.parts[place.part as usize].participant().rank
    }
}

/// One complete copy of every tensor of a placement.
#[derive(Clone, Copy, Debug)]
pub struct SourceReplica<'a> {
    placement: &'a Placement,
    dp: u32,
}

impl SourceReplica<'_> {
    /// The data-parallel rank that holds it.
    #[must_use]
    pub fn dp_rank(&self) -> u32 {
        self.dp
    }

    /// The fragments that make up one copy of the tensor at this place in [`Placement::tensors`]: of this data-parallel
    /// rank (of any, for a tensor that is owned along that axis), the lowest owner's lowest replica.
    #[must_use]
    pub fn fragments(&self, tensor_place: usize) -> Vec<FragmentPlace> {
        let Some(tensor) = self.placement.tensors.get(tensor_place) else { return Vec::new() };
        let roles = Roles::of(tensor);
        let owned = roles.owned_by(AxisKind::Dp);
        let places = self.placement.fragment_places(tensor_place).iter().copied();
        let candidates: Vec<_> = places
            .filter(|place| owned || self.placement.rank_of(*place).dp == self.dp)
            .map(|place| (roles.copy_of(self.placement.rank_of(place)), place))
            .collect();
        let Some(chosen) = candidates.iter().map(|(copy, _)| *copy).min() else { return Vec::new() };
        candidates.into_iter().filter(|(copy, _)| *copy == chosen).map(|(_, place)| place).collect()
    }
}
