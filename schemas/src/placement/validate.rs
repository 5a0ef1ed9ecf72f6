//! Whether all parts of a placement hold every tensor as its axes say (formats: placement coverage): each owner and each
//! replica by itself, split ranks together and all of them, several splits as a Cartesian product.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::FragmentPlace;
use super::error::PlacementError;
use super::part::{ByTensor, PlacementFragment, PlacementIdentity, PlacementPart, check_same_tensor};
use super::topology::{KINDS, ParallelRank, ParallelTopology};
use crate::manifest::{AxisKind, CoverProblem, ParallelAxis, Region, Tensor, check_cover};

/// The tensors of all parts by name, and where their fragments stand.
pub(super) type Contents = (Vec<Arc<Tensor>>, ByTensor<FragmentPlace>);

/// Every participant has given its part, once, and for this placement. Parts come sorted by participant.
pub(super) fn check_parts(
    identity: &PlacementIdentity,
    topology: &ParallelTopology,
    parts: &[PlacementPart],
) -> Result<(), PlacementError> {
    for (place, part) in parts.iter().enumerate() {
        let path = |field: &str| format!("parts[{place}].{field}");
        let name = &part.participant().participant_id;
        identity.check_same(part.identity(), &path)?;
        if part.topology_id() != topology.topology_id() {
            let reason = format!("found {:?} from {name:?}, expected {:?}", part.topology_id(), topology.topology_id());
            return Err(PlacementError::new(path("topology_id"), reason));
        }
        let Some(declared) = topology.participant(name) else {
            return Err(PlacementError::new(path("participant_id"), format!("{name:?} is not in the topology")));
        };
        if declared.rank != part.participant().rank {
            let reason =
                format!("found {:?} for {name:?}, the topology has {:?}", part.participant().rank, declared.rank);
            return Err(PlacementError::new(path("rank"), reason));
        }
        if place > 0 && parts[place - 1].participant().participant_id == *name {
            return Err(PlacementError::new(path("participant_id"), format!("{name:?} gave two parts")));
        }
    }
    let missing = topology.participants().iter().find(|participant| {
        parts.binary_search_by(|part| part.participant().participant_id.cmp(&participant.participant_id)).is_err()
    });
    match missing {
        Some(participant) => {
            Err(PlacementError::new("parts", format!("participant {:?} has given no part", participant.participant_id)))
        }
        None => Ok(()),
    }
}

/// Checks all that no part can know alone.
pub(super) fn check_contents(topology: &ParallelTopology, parts: &[PlacementPart]) -> Result<Contents, PlacementError> {
    let contents = gather(parts)?;
    let mut checker = Checker { topology, parts, expected: HashMap::new(), comparisons: 0 };
    for (place, tensor) in contents.0.iter().enumerate() {
        checker.check_tensor(tensor, contents.1.of(place))?;
    }
    check_aliases(parts, &contents)?;
    Ok(contents)
}

fn gather(parts: &[PlacementPart]) -> Result<Contents, PlacementError> {
    let mut places: HashMap<&str, u32> = HashMap::new();
    let mut tensors: Vec<&Arc<Tensor>> = Vec::new();
    for tensor in parts.iter().flat_map(PlacementPart::tensors) {
        match places.get(tensor.tensor_id.as_str()) {
            Some(&place) => check_same_tensor(tensors[place as usize], tensor)?,
            None => {
                places.insert(&tensor.tensor_id, tensors.len() as u32);
                tensors.push(tensor);
            }
        }
    }
    if tensors.is_empty() {
        return Err(PlacementError::new("tensors", "a placement must hold at least one tensor"));
    }
    let mut order: Vec<u32> = (0..tensors.len() as u32).collect();
    order.sort_unstable_by(|a, b| tensors[*a as usize].tensor_id.cmp(&tensors[*b as usize].tensor_id));
    let mut rank = vec![0_u32; tensors.len()];
    for (place, found) in order.iter().enumerate() {
        rank[*found as usize] = place as u32;
    }
    let mut items = Vec::with_capacity(parts.iter().map(|part| part.fragments().len()).sum());
    for (at, part) in parts.iter().enumerate() {
        for (local, tensor) in part.tensors().iter().enumerate() {
            // Every name was entered above.
            let place = places.get(tensor.tensor_id.as_str()).map_or(0, |found| rank[*found as usize]);
            let fragments = part.fragment_places(local);
            items.extend(fragments.iter().map(|own| (place, FragmentPlace { part: at as u32, fragment: *own })));
        }
    }
    let by_tensor = ByTensor::new(tensors.len(), items.into_iter());
    Ok((order.iter().map(|found| tensors[*found as usize].clone()).collect(), by_tensor))
}

/// A rank with only some kinds kept: the coordinates of an owner, of a replica, or of a slice.
fn keep(rank: &ParallelRank, kinds: Kinds) -> ParallelRank {
    let along = |kind: AxisKind| if kinds.contains(kind) { rank.along(kind) } else { 0 };
    ParallelRank { dp: along(AxisKind::Dp), pp: along(AxisKind::Pp), ep: along(AxisKind::Ep), tp: along(AxisKind::Tp) }
}

/// A set of kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Kinds(u8);

impl Kinds {
    fn with(self, kind: AxisKind) -> Self {
        Self(self.0 | 1 << kind as u8)
    }

    fn contains(self, kind: AxisKind) -> bool {
        self.0 & 1 << kind as u8 != 0
    }
}

/// What a tensor's axes do, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Roles {
    owned: Kinds,
    replicated: Kinds,
    split: Kinds,
}

impl Roles {
    pub(super) fn of(tensor: &Tensor) -> Self {
        let mut roles = Self::default();
        for axis in &tensor.parallel_axes {
            match *axis {
                ParallelAxis::Ownership { kind } => roles.owned = roles.owned.with(kind),
                ParallelAxis::Replicated { kind } => roles.replicated = roles.replicated.with(kind),
                ParallelAxis::Split { kind, .. } => roles.split = roles.split.with(kind),
            }
        }
        roles
    }

    /// Which copy of the tensor a participant belongs to: those with the same owner and replica make one.
    pub(super) fn copy_of(self, rank: &ParallelRank) -> (ParallelRank, ParallelRank) {
        (keep(rank, self.owned), keep(rank, self.replicated))
    }

    pub(super) fn owned_by(self, kind: AxisKind) -> bool {
        self.owned.contains(kind)
    }
}

/// The replica and the slice that a participant stands for.
type Share = (ParallelRank, ParallelRank);

struct Checker<'a> {
    topology: &'a ParallelTopology,
    parts: &'a [PlacementPart],
    /// For each set of roles and owner, what the topology's participants must hold; tensors mostly have the same few.
    expected: HashMap<(Roles, ParallelRank), Arc<[Share]>>,
    comparisons: u64,
}

impl<'a> Checker<'a> {
    fn fragment(&self, place: FragmentPlace) -> &'a PlacementFragment {
        &self.parts[place.part as usize].fragments()[place.fragment as usize]
    }

    fn expected(&mut self, roles: Roles, owner: ParallelRank) -> Arc<[Share]> {
        let shares = || {
            let ranks = self.topology.participants().iter().map(|participant| &participant.rank);
            let mut shares: Vec<Share> = ranks
                .filter(|rank| keep(rank, roles.owned) == owner)
                .map(|rank| (keep(rank, roles.replicated), keep(rank, roles.split)))
                .collect();
            shares.sort_unstable();
            shares.dedup();
            shares.into()
        };
        self.expected.entry((roles, owner)).or_insert_with(shares).clone()
    }

    fn check_tensor(&mut self, tensor: &Tensor, places: &[FragmentPlace]) -> Result<(), PlacementError> {
        let roles = Roles::of(tensor);
        self.check_undeclared(tensor, roles, places)?;
        let mut held: Vec<(ParallelRank, ParallelRank, ParallelRank, FragmentPlace)> = places
            .iter()
            .map(|&place| {
                let rank = &self.fragment(place).rank;
                let (owner, replica) = roles.copy_of(rank);
                (owner, replica, keep(rank, roles.split), place)
            })
            .collect();
        held.sort_unstable_by_key(|(owner, replica, slice, _)| (*owner, *replica, *slice));
        for of_owner in held.chunk_by(|a, b| a.0 == b.0) {
            let mut shares: Vec<Share> = of_owner.iter().map(|(_, replica, slice, _)| (*replica, *slice)).collect();
            shares.dedup();
            let expected = self.expected(roles, of_owner[0].0);
            if shares[..] != expected[..] {
                return Err(self.wrong_shares(tensor, roles, &shares, &expected));
            }
            for copy in of_owner.chunk_by(|a, b| a.1 == b.1) {
                let slices = copy.chunk_by(|a, b| a.2 == b.2).count() as u64;
                self.check_copy(tensor, roles, slices, copy.iter().map(|(.., place)| *place))?;
            }
        }
        Ok(())
    }

    /// The difference between who holds the tensor and who should, as a sentence.
    fn wrong_shares(&self, tensor: &Tensor, roles: Roles, held: &[Share], expected: &[Share]) -> PlacementError {
        let missing = expected.iter().find(|share| held.binary_search(share).is_err());
        let (what, share) = match missing {
            Some(share) => ("missing", *share),
            None => (
                "unexpected",
                held.iter().copied().find(|share| expected.binary_search(share).is_err()).unwrap_or_default(),
            ),
        };
        let name = |rank: &ParallelRank, kinds: Kinds| {
            let kinds = KINDS.into_iter().filter(|kind| kinds.contains(*kind));
            let names: Vec<String> = kinds.map(|kind| format!("{}={}", kind.name(), rank.along(kind))).collect();
            if names.is_empty() { "all".to_owned() } else { names.join(" ") }
        };
        let (replica, slice) = (name(&share.0, roles.replicated), name(&share.1, roles.split));
        PlacementError::tensor(
            &tensor.tensor_id,
            format!("{what} fragments of replica ({replica}), split rank ({slice})"),
        )
    }

    /// One copy of the tensor: its fragments cover it exactly, and each split rank has its own stretch of its dimension.
    fn check_copy(
        &mut self,
        tensor: &Tensor,
        roles: Roles,
        slices: u64,
        places: impl Iterator<Item = FragmentPlace> + Clone,
    ) -> Result<(), PlacementError> {
        let wrong = |reason: String| Err(PlacementError::tensor(&tensor.tensor_id, reason));
        let fragments: Vec<&PlacementFragment> = places.map(|place| self.fragment(place)).collect();
        let boxes: Vec<_> =
            fragments.iter().map(|own| Region { offset: &own.global_offset, shape: &own.local_shape }).collect();
        let name = |at: usize| format!("{:?} {:?}+{:?}", fragments[at].rank, boxes[at].offset, boxes[at].shape);
        match check_cover(&tensor.global_shape, &boxes, &mut self.comparisons) {
            Ok(()) => {}
            Err(CoverProblem::Outside(at)) => return wrong(format!("fragment {} reaches outside", name(at))),
            Err(CoverProblem::Overlap(first, second)) => {
                return wrong(format!("fragments {} and {} overlap", name(first), name(second)));
            }
            Err(CoverProblem::Missing(elements)) => {
                return wrong(format!("fragments leave {elements} elements uncovered"));
            }
            Err(CoverProblem::TooMany) => return wrong("too many fragments to check their cover".to_owned()),
        }
        let kinds = KINDS.into_iter().filter(|kind| roles.split.contains(*kind));
        let product =
            kinds.fold(1_u64, |product, kind| product.saturating_mul(u64::from(self.topology.sizes().along(kind))));
        if slices != product {
            let reason =
                format!("is held by {slices} split ranks, its axes have {product}: each combination must take part");
            return wrong(reason);
        }
        for axis in &tensor.parallel_axes {
            let ParallelAxis::Split { kind, dim } = *axis else { continue };
            let dim = dim as usize;
            let mut stretches: Vec<(u64, u64, u32)> = fragments
                .iter()
                .filter(|own| !own.local_shape.contains(&0))
                .map(|own| {
                    (own.global_offset[dim], own.global_offset[dim] + own.local_shape[dim], own.rank.along(kind))
                })
                .collect();
            stretches.sort_unstable();
            let (mut end, mut holder) = (0, None);
            for (start, until, rank) in stretches {
                if start < end && holder != Some(rank) {
                    return wrong(format!(
                        "{} ranks share a stretch of dimension {dim}, which that axis splits",
                        kind.name()
                    ));
                }
                if until > end {
                    (end, holder) = (until, Some(rank));
                }
            }
        }
        Ok(())
    }

    /// An axis that a tensor does not declare must not matter to it: it has one rank, or its ranks follow from those of
    /// the axes that are declared (tensor and expert ranks on the same workers).
    fn check_undeclared(&self, tensor: &Tensor, roles: Roles, places: &[FragmentPlace]) -> Result<(), PlacementError> {
        let declared = Kinds(roles.owned.0 | roles.replicated.0 | roles.split.0);
        for kind in KINDS {
            if declared.contains(kind) || self.topology.sizes().along(kind) == 1 {
                continue;
            }
            let wrong = |reason: &str| {
                let name = kind.name();
                Err(PlacementError::tensor(&tensor.tensor_id, format!("axis {name} has several ranks and {reason}")))
            };
            let mut pairs: Vec<(ParallelRank, u32)> = places
                .iter()
                .map(|place| &self.fragment(*place).rank)
                .map(|rank| (keep(rank, declared), rank.along(kind)))
                .collect();
            pairs.sort_unstable();
            pairs.dedup();
            let ranks: BTreeSet<u32> = pairs.iter().map(|pair| pair.1).collect();
            if matches!(kind, AxisKind::Dp | AxisKind::Pp) || ranks.len() <= 1 {
                return wrong("the tensor does not say whether it is split, replicated or owned along it");
            }
            if pairs.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                return wrong("the tensor varies along it without saying how");
            }
        }
        Ok(())
    }
}

/// Alias groups are the same everywhere, and their members are of one kind.
fn check_aliases(parts: &[PlacementPart], (tensors, by_tensor): &Contents) -> Result<(), PlacementError> {
    let aliases = |place: FragmentPlace| &parts[place.part as usize].fragments()[place.fragment as usize].aliases;
    for (at, tensor) in tensors.iter().enumerate() {
        let wrong = |reason: String| Err(PlacementError::tensor(&tensor.tensor_id, reason));
        let places = by_tensor.of(at);
        let Some(group) = places.first().map(|first| aliases(*first)) else { continue };
        if places.iter().any(|place| aliases(*place) != group) {
            return wrong("its fragments declare different alias groups".to_owned());
        }
        for name in group {
            let Ok(member) = tensors.binary_search_by(|other| other.tensor_id.cmp(name)) else {
                return wrong(format!("its alias {name:?} is in no part"));
            };
            if !tensors[member].is_alias_of(tensor) {
                return wrong(format!("its alias {name:?} has another descriptor"));
            }
            if by_tensor.of(member).first().is_none_or(|first| aliases(*first) != group) {
                return wrong(format!("its alias {name:?} declares another alias group"));
            }
        }
    }
    Ok(())
}
