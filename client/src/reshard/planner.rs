//! The planner: for every target fragment the source fragments that it meets, as regions. Pure, and the same for every
//! process that asks. Source and target are validated documents: the fragments of one source copy never overlap, so a
//! target fragment is covered when the regions add up to its bytes.

use std::collections::HashMap;
use std::sync::Arc;

use ballast_schemas::manifest::{Manifest, Tensor};
use ballast_schemas::placement::{
    FragmentPlace, Placement, PlacementFragment, PlacementIdentity, PlacementPart, SourceReplica,
};

use super::error::PlanError;
use super::interval::IntervalIndex;
use super::plan::{Limits, Plan, SourceFragment, SourcePlace, TargetFragment};
use super::region::{Block, Region};

/// Where weights are read from.
#[derive(Clone, Copy, Debug)]
pub enum PlanSource<'a> {
    /// A stored revision.
    Stored(&'a Manifest),
    /// Running participants: the lowest complete data-parallel replica of their placement.
    Held(&'a Placement),
}

/// What is wanted of them.
#[derive(Clone, Copy, Debug)]
pub enum PlanTarget<'a> {
    /// Everything that a placement has, for all of its participants.
    Whole(&'a Placement),
    /// What one participant of a placement has. Nothing need be known of the others but their placement.
    Local(&'a Placement, &'a str),
    /// A part by itself. Whether some tensor is left out can not be told without the whole placement.
    Part(&'a PlacementPart),
}

/// Plans how the target is filled from the source.
///
/// # Errors
/// When the two are of different weights, tensors are missing, added or incompatible, the source is incomplete, or the
/// plan would grow above a limit. Names the tensor.
pub fn plan(source: PlanSource<'_>, target: PlanTarget<'_>, limits: &Limits) -> Result<Plan, PlanError> {
    let source = SourceView::new(source)?;
    let target = TargetView::new(target)?;
    check_identity(source.identity(), target.identity())?;
    let matches = match_tensors(&source, &target)?;
    let mut planner = Planner { source, target, limits, comparisons: 0, plan: Plan::default(), ties: HashMap::new() };
    let mut work = Work::default();
    for (place, source_place) in matches.into_iter().enumerate() {
        planner.plan_tensor(place, source_place, &mut work)?;
    }
    Ok(planner.plan)
}

impl Plan {
    /// Whether this is the plan from that source to that target: every region follows from the fragments it joins, and
    /// none is missing.
    ///
    /// # Errors
    /// Naming the first tensor whose regions differ; or why the two have no plan.
    pub fn check(&self, source: PlanSource<'_>, target: PlanTarget<'_>) -> Result<(), PlanError> {
        let mut limits = Limits::default();
        limits.regions = limits.regions.max(self.regions.len() as u64 + 1);
        let expected = plan(source, target, &limits)?;
        let differs =
            |tensor: u32, region: usize| Err(PlanError::NotCanonical { tensor: expected.name(tensor), region });
        if let Some(at) = first_difference(&self.regions, &expected.regions) {
            let region = expected.regions.get(at).or(self.regions.get(at));
            return differs(region.map_or(0, |region| region.tensor), at);
        }
        if let Some(at) = first_difference(&self.sources, &expected.sources) {
            let source = expected.sources.get(at).map_or(0, |source| source.tensor);
            return differs(source, self.regions.iter().position(|region| region.source as usize == at).unwrap_or(0));
        }
        if let Some(at) = first_difference(&self.targets, &expected.targets) {
            let target = expected.targets.get(at).map_or(0, |target| target.tensor);
            return differs(target, self.regions.iter().position(|region| region.target as usize == at).unwrap_or(0));
        }
        if *self != expected {
            return differs(0, self.regions.len());
        }
        Ok(())
    }
}

fn first_difference<T: PartialEq>(found: &[T], expected: &[T]) -> Option<usize> {
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    differs.or((found.len() != expected.len()).then(|| found.len().min(expected.len())))
}

/// The source, with what is the same for all tensors worked out.
enum SourceView<'a> {
    Stored(&'a Manifest),
    Held(&'a Placement, SourceReplica<'a>),
}

impl<'a> SourceView<'a> {
    fn new(source: PlanSource<'a>) -> Result<Self, PlanError> {
        match source {
            PlanSource::Stored(manifest) => Ok(Self::Stored(manifest)),
            PlanSource::Held(placement) => match placement.source_replica() {
                Ok(replica) => Ok(Self::Held(placement, replica)),
                Err(error) => Err(PlanError::NoReplica { tensor: error.path, reason: error.reason }),
            },
        }
    }

    fn identity(&self) -> (&'a str, &'a str, u64) {
        match *self {
            Self::Stored(manifest) => (manifest.resource_id(), manifest.revision(), manifest.weight_generation()),
            Self::Held(placement, _) => of_identity(placement.identity()),
        }
    }

    fn tensor_count(&self) -> usize {
        match self {
            Self::Stored(manifest) => manifest.tensors().len(),
            Self::Held(placement, _) => placement.tensors().len(),
        }
    }

    fn tensor(&self, place: usize) -> Option<&'a Tensor> {
        match *self {
            Self::Stored(manifest) => manifest.tensors().get(place),
            Self::Held(placement, _) => placement.tensors().get(place).map(Arc::as_ref),
        }
    }

    /// Where a tensor stands. Both sides are mostly sorted by name, so it is mostly where the last one suggests.
    fn tensor_place(&self, name: &str, suggested: usize) -> Option<usize> {
        if self.tensor(suggested).is_some_and(|tensor| tensor.tensor_id == name) {
            return Some(suggested);
        }
        match self {
            Self::Stored(manifest) => manifest.tensor_place(name),
            Self::Held(placement, _) => {
                placement.tensors().binary_search_by(|tensor| tensor.tensor_id.as_str().cmp(name)).ok()
            }
        }
    }

    /// The fragments of one copy of a tensor.
    fn fragments(&self, tensor_place: usize, found: &mut Vec<(SourcePlace, Block<'a>, u64)>) {
        found.clear();
        match self {
            Self::Stored(manifest) => found.extend(manifest.fragment_places(tensor_place).iter().map(|place| {
                let own = &manifest.fragments()[*place as usize];
                let place = match manifest.version() {
                    1 => SourcePlace::Object { fragment: *place },
                    _ => SourcePlace::Unit { fragment: *place, unit: own.unit, offset: own.object_offset },
                };
                (place, Block { offset: &own.global_offset, shape: &own.local_shape }, own.nbytes)
            })),
            Self::Held(placement, replica) => {
                let chosen = replica.fragments(tensor_place).into_iter();
                found.extend(chosen.filter_map(|place| {
                    placement.fragment(place).map(|own| (SourcePlace::Held(place), block(own), own.nbytes))
                }));
            }
        }
    }
}

/// The target, with its participant found.
#[derive(Clone, Copy)]
enum TargetView<'a> {
    Whole(&'a Placement),
    Local(&'a Placement, u32),
    Part(&'a PlacementPart),
}

impl<'a> TargetView<'a> {
    fn new(target: PlanTarget<'a>) -> Result<Self, PlanError> {
        Ok(match target {
            PlanTarget::Whole(placement) => Self::Whole(placement),
            PlanTarget::Local(placement, participant) => match placement.part_place(participant) {
                Some(part) => Self::Local(placement, part as u32),
                None => return Err(PlanError::UnknownParticipant { participant: participant.to_owned() }),
            },
            PlanTarget::Part(part) => Self::Part(part),
        })
    }

    fn identity(self) -> (&'a str, &'a str, u64) {
        match self {
            Self::Whole(placement) | Self::Local(placement, _) => of_identity(placement.identity()),
            Self::Part(part) => of_identity(part.identity()),
        }
    }

    fn tensors(self) -> &'a [Arc<Tensor>] {
        match self {
            Self::Whole(placement) | Self::Local(placement, _) => placement.tensors(),
            Self::Part(part) => part.tensors(),
        }
    }

    /// The fragments of a tensor that are wanted.
    fn fragments(self, tensor_place: usize, found: &mut Vec<(FragmentPlace, &'a PlacementFragment)>) {
        found.clear();
        match self {
            Self::Whole(placement) | Self::Local(placement, _) => {
                let wanted = |place: &&FragmentPlace| match self {
                    Self::Local(_, part) => place.part == part,
                    _ => true,
                };
                let places = placement.fragment_places(tensor_place).iter().filter(wanted);
                found.extend(places.filter_map(|place| placement.fragment(*place).map(|own| (*place, own))));
            }
            Self::Part(part) => found.extend(
                part.fragment_places(tensor_place)
                    .iter()
                    .map(|place| (FragmentPlace { part: 0, fragment: *place }, &part.fragments()[*place as usize])),
            ),
        }
    }
}

fn of_identity(identity: &PlacementIdentity) -> (&str, &str, u64) {
    (&identity.resource_id, &identity.revision, identity.weight_generation)
}

fn block(fragment: &PlacementFragment) -> Block<'_> {
    Block { offset: &fragment.global_offset, shape: &fragment.local_shape }
}

fn check_identity(source: (&str, &str, u64), target: (&str, &str, u64)) -> Result<(), PlanError> {
    let differs = |field, expected: &dyn ToString, found: &dyn ToString| {
        Err(PlanError::Identity { field, expected: expected.to_string(), found: found.to_string() })
    };
    if source.0 != target.0 {
        return differs("resource_id", &source.0, &target.0);
    }
    if source.1 != target.1 {
        return differs("revision", &source.1, &target.1);
    }
    if source.2 != target.2 {
        return differs("weight_generation", &source.2, &target.2);
    }
    Ok(())
}

/// For each tensor of the target where it stands in the source. Both have the same ones, alike in all that copying
/// needs.
fn match_tensors(source: &SourceView<'_>, target: &TargetView<'_>) -> Result<Vec<usize>, PlanError> {
    let mut matches = Vec::with_capacity(target.tensors().len());
    let mut suggested = 0;
    for wanted in target.tensors() {
        let name = &wanted.tensor_id;
        let place = source.tensor_place(name, suggested);
        let Some((place, held)) = place.and_then(|place| Some((place, source.tensor(place)?))) else {
            return Err(PlanError::Added { tensor: name.clone() });
        };
        check_compatible(held, wanted)?;
        matches.push(place);
        suggested = place + 1;
    }
    if !matches!(target, TargetView::Part(_)) && matches.len() != source.tensor_count() {
        let mut seen = vec![false; source.tensor_count()];
        matches.iter().for_each(|place| seen[*place] = true);
        let omitted = seen.iter().position(|seen| !seen).and_then(|place| source.tensor(place));
        return Err(PlanError::Omitted { tensor: omitted.map_or_else(String::new, |tensor| tensor.tensor_id.clone()) });
    }
    Ok(matches)
}

fn check_compatible(held: &Tensor, wanted: &Tensor) -> Result<(), PlanError> {
    let differs = |field, expected: String, found: String| {
        Err(PlanError::Incompatible { tensor: wanted.tensor_id.clone(), field, expected, found })
    };
    if held.dtype != wanted.dtype {
        return differs("dtype", held.dtype.clone(), wanted.dtype.clone());
    }
    if held.itemsize != wanted.itemsize {
        return differs("itemsize", held.itemsize.to_string(), wanted.itemsize.to_string());
    }
    if held.global_shape != wanted.global_shape {
        return differs("global_shape", format!("{:?}", held.global_shape), format!("{:?}", wanted.global_shape));
    }
    if held.layout_fingerprint != wanted.layout_fingerprint {
        return differs("layout_fingerprint", held.layout_fingerprint.clone(), wanted.layout_fingerprint.clone());
    }
    Ok(())
}

/// Lists that are filled anew for each tensor.
#[derive(Default)]
struct Work<'a> {
    index: IntervalIndex,
    sources: Vec<(SourcePlace, Block<'a>, u64)>,
    /// Where each source stands in the plan, once a region needs it.
    used: Vec<Option<u32>>,
    targets: Vec<(FragmentPlace, &'a PlacementFragment)>,
    candidates: Vec<u32>,
}

/// What makes two target fragments of one participant the same memory: alias group, box and owner.
type Tie<'a> = (u32, &'a [String], &'a [u64], &'a [u64]);

struct Planner<'a, 'l> {
    source: SourceView<'a>,
    target: TargetView<'a>,
    limits: &'l Limits,
    comparisons: u64,
    plan: Plan,
    ties: HashMap<Tie<'a>, u32>,
}

impl<'a> Planner<'a, '_> {
    fn plan_tensor(&mut self, place: usize, source_place: usize, work: &mut Work<'a>) -> Result<(), PlanError> {
        self.target.fragments(place, &mut work.targets);
        let Some(tensor) = self.target.tensors().get(place).filter(|_| !work.targets.is_empty()) else { return Ok(()) };
        let number = self.plan.tensors.len() as u32;
        self.plan.tensors.push(tensor.clone());
        self.source.fragments(source_place, &mut work.sources);
        work.used.clear();
        work.used.resize(work.sources.len(), None);
        let sources = &work.sources;
        work.index.build(sources.len(), |at| sources[at].1);
        let too_many = |what, limit| PlanError::TooMany { tensor: tensor.tensor_id.clone(), what, limit };
        for &(place, wanted) in &work.targets {
            let target = self.plan.targets.len() as u32;
            let tied_to = match wanted.aliases.is_empty() {
                true => None,
                false => self.tied(place.part, wanted, target),
            };
            self.plan.targets.push(TargetFragment { tensor: number, place, nbytes: wanted.nbytes, tied_to });
            if wanted.nbytes == 0 {
                continue;
            }
            work.candidates.clear();
            work.index.candidates(block(wanted), &mut work.candidates);
            work.candidates.sort_unstable();
            self.comparisons += work.candidates.len() as u64;
            if self.comparisons > self.limits.comparisons {
                return Err(too_many("comparisons of boxes", self.limits.comparisons));
            }
            let mut found = 0_u64;
            for &at in &work.candidates {
                let (source, held, nbytes) = work.sources[at as usize];
                let Some(mut region) = Region::between(held, block(wanted), tensor.itemsize) else { continue };
                if self.plan.regions.len() as u64 == self.limits.regions {
                    return Err(too_many("regions", self.limits.regions));
                }
                let sources = &mut self.plan.sources;
                region.source = *work.used[at as usize].get_or_insert_with(|| {
                    sources.push(SourceFragment { tensor: number, place: source, nbytes });
                    sources.len() as u32 - 1
                });
                (region.tensor, region.target) = (number, target);
                found += region.bytes();
                self.plan.regions.push(region);
            }
            if found != wanted.nbytes {
                let (tensor, offset) = (tensor.tensor_id.clone(), wanted.global_offset.clone());
                return Err(PlanError::Uncovered { tensor, offset, expected: wanted.nbytes, found });
            }
            self.plan.bytes = self.plan.bytes.saturating_add(found);
        }
        Ok(())
    }

    /// The first target of the same box of the same alias group and participant, when that is another one.
    fn tied(&mut self, part: u32, wanted: &'a PlacementFragment, target: u32) -> Option<u32> {
        let tie = (part, &wanted.aliases[..], &wanted.global_offset[..], &wanted.local_shape[..]);
        let first = *self.ties.entry(tie).or_insert(target);
        (first != target).then_some(first)
    }
}
