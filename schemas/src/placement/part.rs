//! What one participant of a placement holds: boxes of tensors, without addresses. A part stands for itself; that all
//! parts together cover the model is `validate.rs`'s matter.

use std::sync::{Arc, OnceLock};

use super::document;
use super::error::PlacementError;
use super::topology::{Form, ParallelRank, ParallelTopology, Participant, sha256_id};
use crate::digest::Digest;
use crate::manifest::{
    CoverProblem, PARTS_MAX, ParallelAxis, Region, Tensor, Writer, check_cover, check_tensor_name, volume_bytes,
};

/// Which weights a placement is about. The parts of one placement agree on all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementIdentity {
    /// The model.
    pub resource_id: String,
    /// The logical revision.
    pub revision: String,
    /// The generation.
    pub weight_generation: u64,
    /// The caller's name for this set of parts, so that parts of two gatherings are not mixed.
    pub placement_set_id: String,
}

impl PlacementIdentity {
    fn check(&self) -> Result<(), PlacementError> {
        for (field, text) in [
            ("resource_id", &self.resource_id),
            ("revision", &self.revision),
            ("placement_set_id", &self.placement_set_id),
        ] {
            check_tensor_name(text).map_err(|reason| PlacementError::new(field, reason))?;
        }
        Ok(())
    }

    /// Names the first field in which another identity differs.
    pub(super) fn check_same(&self, other: &Self, path: &dyn Fn(&str) -> String) -> Result<(), PlacementError> {
        let differs = |field: &str, found: &str, expected: &str| match found == expected {
            true => Ok(()),
            false => Err(PlacementError::new(path(field), format!("found {found:?}, expected {expected:?}"))),
        };
        differs("resource_id", &other.resource_id, &self.resource_id)?;
        differs("revision", &other.revision, &self.revision)?;
        differs("weight_generation", &other.weight_generation.to_string(), &self.weight_generation.to_string())?;
        differs("placement_set_id", &other.placement_set_id, &self.placement_set_id)
    }
}

/// A box of one tensor that one participant holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementFragment {
    /// Whose box.
    pub tensor: Arc<Tensor>,
    /// First element, by dimension.
    pub global_offset: Vec<u64>,
    /// Extent, by dimension.
    pub local_shape: Vec<u64>,
    /// Bytes, row-major without gaps.
    pub nbytes: u64,
    /// The participant's coordinates.
    pub rank: ParallelRank,
    /// Every tensor that may share these bytes, ascending, when there is more than one.
    pub aliases: Vec<String>,
    /// Its name: `sha256:` and the digest of the above, unless the framework gives one of its own.
    pub placement_fragment_id: String,
}

impl PlacementFragment {
    /// The box with its size and canonical name.
    ///
    /// # Errors
    /// When the box's bytes do not fit in 64 bits; the rest is checked when it joins a part.
    pub fn new(
        tensor: Arc<Tensor>,
        global_offset: Vec<u64>,
        local_shape: Vec<u64>,
        rank: ParallelRank,
        mut aliases: Vec<String>,
    ) -> Result<Self, PlacementError> {
        let nbytes = volume_bytes(&local_shape, tensor.itemsize)
            .ok_or_else(|| PlacementError::tensor(&tensor.tensor_id, "the box's bytes do not fit in 64 bits"))?;
        aliases.sort_unstable();
        let placement_fragment_id = String::new();
        let mut fragment = Self { tensor, global_offset, local_shape, nbytes, rank, aliases, placement_fragment_id };
        fragment.placement_fragment_id = sha256_id(|w| fragment.write(w, Form::Identity));
        Ok(fragment)
    }

    /// The name of the tensor.
    #[must_use]
    pub fn tensor_id(&self) -> &str {
        &self.tensor.tensor_id
    }

    fn sort_key(&self) -> (&str, &[u64], &[u64], &str) {
        (self.tensor_id(), &self.global_offset, &self.local_shape, &self.placement_fragment_id)
    }

    pub(super) fn write(&self, w: &mut Writer, form: Form) {
        w.open();
        w.field("aliases");
        w.list(&self.aliases, |w, name| w.string(name));
        w.field("global_offset");
        w.list(&self.global_offset, |w, value| w.number(*value));
        w.field("local_shape");
        w.list(&self.local_shape, |w, value| w.number(*value));
        w.field("nbytes");
        w.number(self.nbytes);
        if form == Form::Document {
            w.field("placement_fragment_id");
            w.string(&self.placement_fragment_id);
        }
        w.field("rank");
        self.rank.write(w);
        if form == Form::Identity {
            w.field("schema");
            w.string("weight-placement-fragment");
        }
        w.field("tensor_id");
        w.string(self.tensor_id());
        w.close();
    }

    fn check(&self, rank: ParallelRank, path: &dyn Fn(&str) -> String) -> Result<(), PlacementError> {
        let wrong = |field: &str, reason: String| Err(PlacementError::new(path(field), reason));
        let (tensor, name) = (&self.tensor, self.tensor_id());
        check_tensor_name(&self.placement_fragment_id).or_else(|reason| wrong("placement_fragment_id", reason))?;
        if self.rank != rank {
            return wrong("rank", format!("found {:?}, its participant has {rank:?}", self.rank));
        }
        let dims = tensor.global_shape.len();
        for (field, found) in [("global_offset", self.global_offset.len()), ("local_shape", self.local_shape.len())] {
            if found != dims {
                return wrong(field, format!("has {found} dimensions, tensor {name:?} has {dims}"));
            }
        }
        let outside = (0..dims).find(|&dim| {
            let end = self.global_offset[dim].checked_add(self.local_shape[dim]);
            end.is_none_or(|end| end > tensor.global_shape[dim])
        });
        if let Some(dim) = outside {
            let shape = &tensor.global_shape;
            return wrong(
                "local_shape",
                format!("reaches outside tensor {name:?} of shape {shape:?} in dimension {dim}"),
            );
        }
        let expected = volume_bytes(&self.local_shape, tensor.itemsize);
        if expected != Some(self.nbytes) {
            let expected = expected.map_or_else(|| "more than 64 bits".to_owned(), |bytes| bytes.to_string());
            return wrong("nbytes", format!("found {}, expected {expected} for {name:?}", self.nbytes));
        }
        if !self.aliases.is_empty() {
            if self.aliases.len() < 2 || !self.aliases.is_sorted_by(|a, b| a < b) {
                return wrong("aliases", "must be empty, or at least two names in ascending order".to_owned());
            }
            if self.aliases.binary_search(&tensor.tensor_id).is_err() {
                return wrong("aliases", format!("must contain {name:?}"));
            }
        }
        Ok(())
    }
}

/// Where fragments stand, grouped by tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ByTensor<T> {
    starts: Vec<u32>,
    places: Vec<T>,
}

impl<T: Copy + Default> ByTensor<T> {
    /// Groups items, each given with the place of its tensor among `tensors` ones; their order within a tensor is kept.
    pub(super) fn new(tensors: usize, items: impl Iterator<Item = (u32, T)> + Clone) -> Self {
        let mut starts = vec![0_u32; tensors + 1];
        for (tensor, _) in items.clone() {
            starts[tensor as usize + 1] += 1;
        }
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        let mut next = starts.clone();
        let mut places = vec![T::default(); starts[tensors] as usize];
        for (tensor, item) in items {
            places[next[tensor as usize] as usize] = item;
            next[tensor as usize] += 1;
        }
        Self { starts, places }
    }

    pub(super) fn of(&self, tensor: usize) -> &[T] {
        match self.starts.get(tensor..tensor + 2) {
            Some(range) => &self.places[range[0] as usize..range[1] as usize],
            None => &[],
        }
    }
}

/// What one participant holds. Address-free; the same for every process that has the same coordinates.
#[derive(Clone, Debug)]
pub struct PlacementPart {
    identity: PlacementIdentity,
    topology_id: String,
    participant: Participant,
    tensors: Vec<Arc<Tensor>>,
    /// By tensor and box: a planner goes through them in this order.
    fragments: Vec<PlacementFragment>,
    by_tensor: ByTensor<u32>,
    /// Their places by their names: the order of the document.
    by_name: Vec<u32>,
    digest: OnceLock<Digest>,
}

impl PartialEq for PlacementPart {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
            && self.topology_id == other.topology_id
            && self.participant == other.participant
            && self.fragments == other.fragments
    }
}

impl Eq for PlacementPart {}

impl PlacementPart {
    /// The part of a participant that holds these fragments, in any order; none for a participant that holds nothing.
    ///
    /// # Errors
    /// Naming the field, or the tensor whose fragments overlap or have several descriptors.
    pub fn new(
        identity: PlacementIdentity,
        topology_id: impl Into<String>,
        participant: Participant,
        mut fragments: Vec<PlacementFragment>,
    ) -> Result<Self, PlacementError> {
        identity.check()?;
        let topology_id = topology_id.into();
        check_tensor_name(&topology_id).map_err(|reason| PlacementError::new("topology_id", reason))?;
        check_tensor_name(&participant.participant_id)
            .map_err(|reason| PlacementError::new("participant_id", reason))?;
        if fragments.len() > PARTS_MAX {
            return Err(PlacementError::new(
                "fragments",
                format!("{}; at most {PARTS_MAX} are allowed", fragments.len()),
            ));
        }
        fragments.sort_unstable_by(|a, b| a.sort_key().cmp(&b.sort_key()));
        let by_name = sort_by_name(&fragments);
        let name = |place: u32| &fragments[place as usize].placement_fragment_id;
        for (place, &at) in by_name.iter().enumerate() {
            let path = |field: &str| format!("fragments[{place}].{field}");
            fragments[at as usize].check(participant.rank, &path)?;
            if place > 0 && name(by_name[place - 1]) == name(at) {
                return Err(PlacementError::new(path("placement_fragment_id"), format!("{:?} stands twice", name(at))));
            }
        }
        let (tensors, by_tensor) = group(&fragments)?;
        let digest = OnceLock::new();
        let part = Self { identity, topology_id, participant, tensors, fragments, by_tensor, by_name, digest };
        part.check_overlaps()?;
        Ok(part)
    }

    /// The part of a participant whose fragments follow from the axes of each tensor: a split dimension is cut into
    /// pieces of equal length, rounded up, so that the last ones may be shorter or empty (6 over 4 ranks: 2, 2, 2, 0).
    /// `owns` says whether the participant holds a tensor at all; replicated and split tensors are held by everyone.
    ///
    /// # Errors
    /// As [`PlacementPart::new`], and when the topology has no such participant.
    pub fn from_axes(
        identity: PlacementIdentity,
        topology: &ParallelTopology,
        participant_id: &str,
        tensors: &[Arc<Tensor>],
        owns: impl Fn(&Tensor, &ParallelRank) -> bool,
    ) -> Result<Self, PlacementError> {
        let participant = topology.participant(participant_id).ok_or_else(|| {
            PlacementError::new(
                "participant_id",
                format!("{participant_id:?} is not in topology {}", topology.topology_id()),
            )
        })?;
        let rank = participant.rank;
        let mut fragments = Vec::new();
        for tensor in tensors.iter().filter(|tensor| owns(tensor, &rank)) {
            let mut offset = vec![0; tensor.global_shape.len()];
            let mut shape = tensor.global_shape.clone();
            for axis in &tensor.parallel_axes {
                if let ParallelAxis::Split { kind, dim } = *axis {
                    let Some(total) = tensor.global_shape.get(dim as usize).copied() else { continue };
                    let size = u64::from(topology.sizes().along(kind));
                    let length = total.div_ceil(size);
                    let start = length.saturating_mul(u64::from(rank.along(kind))).min(total);
                    offset[dim as usize] = start;
                    shape[dim as usize] = length.min(total - start);
                }
            }
            fragments.push(PlacementFragment::new(tensor.clone(), offset, shape, rank, Vec::new())?);
        }
        Self::new(identity, topology.topology_id(), participant.clone(), fragments)
    }

    /// Reads the canonical document of a part.
    ///
    /// # Errors
    /// Naming the field.
    pub fn parse(bytes: &[u8]) -> Result<Self, PlacementError> {
        document::parse_part(bytes)
    }

    /// The canonical document.
    #[must_use]
    pub fn to_canonical_bytes(&self) -> Vec<u8> {
        document::write_part(self)
    }

    /// SHA-256 of the canonical document.
    #[must_use]
    pub fn digest(&self) -> Digest {
        *self.digest.get_or_init(|| Digest::of(&self.to_canonical_bytes()))
    }

    /// Which weights.
    #[must_use]
    pub fn identity(&self) -> &PlacementIdentity {
        &self.identity
    }

    /// The topology that the participant belongs to.
    #[must_use]
    pub fn topology_id(&self) -> &str {
        &self.topology_id
    }

    /// Who holds this.
    #[must_use]
    pub fn participant(&self) -> &Participant {
        &self.participant
    }

    /// The tensors of its fragments, by name.
    #[must_use]
    pub fn tensors(&self) -> &[Arc<Tensor>] {
        &self.tensors
    }

    /// The fragments, by tensor and box.
    #[must_use]
    pub fn fragments(&self) -> &[PlacementFragment] {
        &self.fragments
    }

    /// Where the fragment of that name stands in [`PlacementPart::fragments`].
    #[must_use]
    pub fn fragment_place(&self, placement_fragment_id: &str) -> Option<usize> {
        let name = |place: &u32| self.fragments[*place as usize].placement_fragment_id.as_str();
        let at = self.by_name.binary_search_by(|place| name(place).cmp(placement_fragment_id)).ok()?;
        Some(self.by_name[at] as usize)
    }

    /// The fragments in the order of the document: by their names.
    pub(super) fn fragments_by_name(&self) -> impl Iterator<Item = &PlacementFragment> {
        self.by_name.iter().map(|place| &self.fragments[*place as usize])
    }

    /// Where the fragments of a tensor stand, for the tensor at this place in [`PlacementPart::tensors`].
    #[must_use]
    pub fn fragment_places(&self, tensor_place: usize) -> &[u32] {
        self.by_tensor.of(tensor_place)
    }

    /// Bytes of all fragments.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.fragments.iter().fold(0, |sum, fragment| sum.saturating_add(fragment.nbytes))
    }

    fn check_overlaps(&self) -> Result<(), PlacementError> {
        let mut comparisons = 0;
        for (place, tensor) in self.tensors.iter().enumerate() {
            let places = self.by_tensor.of(place);
            if places.len() < 2 {
                continue;
            }
            let fragments = || places.iter().map(|at| &self.fragments[*at as usize]);
            let boxes: Vec<_> =
                fragments().map(|own| Region { offset: &own.global_offset, shape: &own.local_shape }).collect();
            match check_cover(&tensor.global_shape, &boxes, &mut comparisons) {
                Err(CoverProblem::Overlap(first, second)) => {
                    let in_document =
                        |at: usize| self.by_name.iter().position(|place| *place == places[at]).unwrap_or(0);
                    let path = format!("fragments[{}].global_offset", in_document(second));
                    let reason = format!("overlaps fragments[{}] of tensor {:?}", in_document(first), tensor.tensor_id);
                    return Err(PlacementError::new(path, reason));
                }
                Err(CoverProblem::TooMany) => {
                    return Err(PlacementError::tensor(&tensor.tensor_id, "too many fragments to check for overlaps"));
                }
                // Every box was checked to lie inside, and a part need not hold all of a tensor.
                Ok(()) | Err(CoverProblem::Missing(_) | CoverProblem::Outside(_)) => {}
            }
        }
        Ok(())
    }
}

/// The places of fragments in order of their names. Canonical names differ in their first digits, which compare as one
/// number.
fn sort_by_name(fragments: &[PlacementFragment]) -> Vec<u32> {
    let name = |place: u32| fragments[place as usize].placement_fragment_id.as_str();
    let canonical = fragments.iter().all(|own| own.placement_fragment_id.starts_with("sha256:"));
    let key = |name: &str| {
        let digits = &name.as_bytes()[if canonical { 7 } else { 0 }..];
        (0..8).fold(0, |key: u64, at| key << 8 | u64::from(digits.get(at).copied().unwrap_or(0)))
    };
    let mut keyed: Vec<(u64, u32)> = (0..fragments.len() as u32).map(|place| (key(name(place)), place)).collect();
    keyed.sort_unstable_by(|a, b| a.0.cmp(&b.0).then_with(|| name(a.1).cmp(name(b.1))));
    keyed.into_iter().map(|(_, place)| place).collect()
}

/// The tensors of fragments, which are sorted by them, each with one descriptor.
fn group(fragments: &[PlacementFragment]) -> Result<(Vec<Arc<Tensor>>, ByTensor<u32>), PlacementError> {
    let mut tensors: Vec<Arc<Tensor>> = Vec::new();
    let mut places = Vec::with_capacity(fragments.len());
    for (at, fragment) in fragments.iter().enumerate() {
        let found = &fragment.tensor;
        match tensors.last() {
            Some(last) if last.tensor_id == found.tensor_id => check_same_tensor(last, found)?,
            _ => {
                let name = &found.tensor_id;
                found.check(&|field| format!("tensors[{name:?}].{field}"), 2)?;
                tensors.push(found.clone());
            }
        }
        places.push((tensors.len() as u32 - 1, at as u32));
    }
    let by_tensor = ByTensor::new(tensors.len(), places.iter().copied());
    Ok((tensors, by_tensor))
}

/// Two fragments, or two parts, say the same of a tensor.
pub(super) fn check_same_tensor(expected: &Arc<Tensor>, found: &Arc<Tensor>) -> Result<(), PlacementError> {
    if Arc::ptr_eq(expected, found) || expected == found {
        return Ok(());
    }
    let reason = format!("has two descriptors, {expected:?} and {found:?}");
    Err(PlacementError::tensor(&expected.tensor_id, reason))
}
