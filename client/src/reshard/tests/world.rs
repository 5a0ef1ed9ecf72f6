//! Random models in random shapes, and what every buffer must hold, worked out element by element.

use std::collections::BTreeMap;
use std::sync::Arc;

use ballast_schemas::RevisionIdentity;
use ballast_schemas::manifest::{AxisKind, Manifest, ManifestPlan, ParallelAxis, PlannedTensor, Tensor};
use ballast_schemas::placement::{
    AxisSizes, ParallelRank, ParallelTopology, Placement, PlacementFragment, PlacementIdentity, PlacementPart,
};

use crate::reshard::{Plan, SourcePlace};

/// Numbers from a seed (splitmix64).
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

type Cut = (Vec<u64>, Vec<u64>);

/// Cuts a box in two, again and again: tilings that no grid has, empty boxes among them.
fn tile(dice: &mut Dice, whole: Cut, depth: u32, tiles: &mut Vec<Cut>) {
    let (offset, shape) = whole;
    if depth == 0 || shape.is_empty() || dice.chance(25) {
        tiles.push((offset, shape));
        return;
    }
    let dim = dice.below(shape.len() as u64) as usize;
    let at = 1 + dice.below(shape[dim].max(1));
    if at >= shape[dim] {
        tiles.push((offset, shape));
        return;
    }
    let (mut low, mut high) = ((offset.clone(), shape.clone()), (offset, shape));
    low.1[dim] = at;
    high.0[dim] += at;
    high.1[dim] -= at;
    tile(dice, low, depth - 1, tiles);
    tile(dice, high, depth - 1, tiles);
}

/// A tensor without axes, and the further name of its bytes.
pub(super) struct Model {
    pub(super) tensors: Vec<(Tensor, Option<String>)>,
}

impl Model {
    pub(super) fn random(dice: &mut Dice) -> Self {
        let count = 1 + dice.below(3);
        let tensor = |n: u64, dice: &mut Dice| {
            let rank = if dice.chance(8) { 0 } else { 1 + dice.below(4) };
            let longest = [24, 24, 10, 6, 5][rank as usize];
            let shape = (0..rank).map(|_| if dice.chance(4) { 0 } else { 1 + dice.below(longest) }).collect();
            let itemsize = [1, 2, 3, 4, 8][dice.below(5) as usize];
            let tied = dice.chance(20).then(|| format!("t{n}.tied"));
            (Tensor::plain(format!("t{n}"), format!("X{itemsize}"), itemsize, shape), tied)
        };
        Self { tensors: (0..count).map(|n| tensor(n, dice)).collect() }
    }

    /// Stored in random tiles.
    pub(super) fn manifest(&self, dice: &mut Dice) -> Manifest {
        let planned = self.tensors.iter().map(|(tensor, tied)| {
            let mut fragments = Vec::new();
            tile(dice, (vec![0; tensor.global_shape.len()], tensor.global_shape.clone()), 4, &mut fragments);
            PlannedTensor { tensor: tensor.clone(), aliases: tied.iter().cloned().collect(), fragments }
        });
        let identity = RevisionIdentity::new("default", "default", "model", "main", 3).unwrap();
        let plan = ManifestPlan::new(&identity, planned.collect(), vec![]).unwrap();
        let units = vec![0; plan.unit_count() as usize];
        plan.seal(&units).unwrap()
    }

    /// Held by random participants along random axes, unevenly.
    pub(super) fn placement(&self, dice: &mut Dice) -> Placement {
        let size = |dice: &mut Dice, most: u64| if dice.chance(50) { 1 } else { 1 + dice.below(most) as u32 };
        let sizes = AxisSizes { dp: size(dice, 2), pp: size(dice, 3), ep: size(dice, 3), tp: size(dice, 4) };
        let topology = ParallelTopology::grid(sizes).unwrap();
        let mut held: BTreeMap<ParallelRank, Vec<PlacementFragment>> = BTreeMap::new();
        for (tensor, tied) in &self.tensors {
            let axes = random_axes(dice, tensor, sizes);
            let declared = dice.chance(70);
            let names: Vec<&String> = std::iter::once(&tensor.tensor_id).chain(tied).collect();
            let group: Vec<String> =
                if declared && names.len() > 1 { names.iter().map(|name| (*name).clone()).collect() } else { vec![] };
            for name in &names {
                let mut named = tensor.clone();
                named.tensor_id.clone_from(name);
                named.parallel_axes.clone_from(&axes);
                named.shard_dims = axes
                    .iter()
                    .filter_map(|axis| if let ParallelAxis::Split { dim, .. } = *axis { Some(dim) } else { None })
                    .collect();
                named.shard_dims.sort_unstable();
                hold(dice, &Arc::new(named), &topology, &group, &mut held);
            }
        }
        let part = |participant: &ballast_schemas::placement::Participant| {
            let fragments = held.remove(&participant.rank).unwrap_or_default();
            PlacementPart::new(identity(), topology.topology_id(), participant.clone(), fragments).unwrap()
        };
        let parts = topology.participants().iter().map(part).collect();
        Placement::assemble(identity(), topology, parts).unwrap()
    }
}

pub(super) fn identity() -> PlacementIdentity {
    PlacementIdentity {
        resource_id: "model".into(),
        revision: "main".into(),
        weight_generation: 3,
        placement_set_id: "set".into(),
    }
}

fn random_axes(dice: &mut Dice, tensor: &Tensor, sizes: AxisSizes) -> Vec<ParallelAxis> {
    let rank = tensor.global_shape.len() as u64;
    let mut axes: Vec<ParallelAxis> = Vec::new();
    for kind in [AxisKind::Dp, AxisKind::Pp, AxisKind::Ep, AxisKind::Tp] {
        if sizes.along(kind) == 1 && dice.chance(50) {
            continue;
        }
        let taken = axes.iter().any(|axis| matches!(axis, ParallelAxis::Split { .. }));
        axes.push(match kind {
            AxisKind::Dp if dice.chance(85) => ParallelAxis::Replicated { kind },
            AxisKind::Pp if dice.chance(40) => ParallelAxis::Replicated { kind },
            AxisKind::Ep if rank > 0 && dice.chance(50) => ParallelAxis::Split { kind, dim: 0 },
            AxisKind::Tp if rank > u64::from(taken) && dice.chance(75) => {
                let first = u64::from(taken);
                ParallelAxis::Split { kind, dim: (first + dice.below(rank - first)) as u32 }
            }
            AxisKind::Ep if dice.chance(50) => ParallelAxis::Replicated { kind },
            AxisKind::Tp => ParallelAxis::Replicated { kind },
            _ => ParallelAxis::Ownership { kind },
        });
    }
    axes
}

/// Lets the owners of a tensor hold it, each copy cut at other places.
fn hold(
    dice: &mut Dice,
    tensor: &Arc<Tensor>,
    topology: &ParallelTopology,
    group: &[String],
    held: &mut BTreeMap<ParallelRank, Vec<PlacementFragment>>,
) {
    let sizes = topology.sizes();
    let owned: Vec<AxisKind> = kinds(tensor, |axis| matches!(axis, ParallelAxis::Ownership { .. }));
    let copied: Vec<AxisKind> = kinds(tensor, |axis| !matches!(axis, ParallelAxis::Split { .. }));
    let along =
        |rank: &ParallelRank, kinds: &[AxisKind]| kinds.iter().map(|kind| rank.along(*kind)).collect::<Vec<_>>();
    let ranks: Vec<ParallelRank> = topology.participants().iter().map(|participant| participant.rank).collect();
    let mut owners: Vec<Vec<u32>> = ranks.iter().map(|rank| along(rank, &owned)).collect();
    owners.sort_unstable();
    owners.dedup();
    let sure = dice.below(owners.len() as u64) as usize;
    let mut at = 0;
    owners.retain(|_| {
        at += 1;
        at - 1 == sure || dice.chance(40)
    });
    let mut cuts: BTreeMap<(Vec<u32>, u32), Vec<u64>> = BTreeMap::new();
    for rank in ranks.iter().filter(|rank| owners.contains(&along(rank, &owned))) {
        let (mut offset, mut shape) = (vec![0; tensor.global_shape.len()], tensor.global_shape.clone());
        for axis in &tensor.parallel_axes {
            let ParallelAxis::Split { kind, dim } = *axis else { continue };
            let total = tensor.global_shape[dim as usize];
            let cuts = cuts.entry((along(rank, &copied), dim)).or_insert_with(|| {
                let mut cuts: Vec<u64> = (1..sizes.along(kind)).map(|_| dice.below(total + 1)).collect();
                cuts.extend([0, total]);
                cuts.sort_unstable();
                cuts
            });
            let at = rank.along(kind) as usize;
            offset[dim as usize] = cuts[at];
            shape[dim as usize] = cuts[at + 1] - cuts[at];
        }
        let mut pieces = Vec::new();
        let depth = u32::from(dice.chance(20));
        tile(dice, (offset, shape), depth, &mut pieces);
        for (offset, shape) in pieces {
            let fragment = PlacementFragment::new(tensor.clone(), offset, shape, *rank, group.to_vec()).unwrap();
            held.entry(*rank).or_default().push(fragment);
        }
    }
}

fn kinds(tensor: &Tensor, which: impl Fn(&ParallelAxis) -> bool) -> Vec<AxisKind> {
    tensor.parallel_axes.iter().filter(|axis| which(axis)).map(ParallelAxis::kind).collect()
}

/// The bytes of a box, element by element: each byte follows from the tensor and the element's place in it. Tied names
/// stand for the same bytes.
pub(super) fn bytes_of(tensor: &Tensor, offset: &[u64], shape: &[u64]) -> Vec<u8> {
    let name = tensor.tensor_id.trim_end_matches(".tied");
    let seed = name.bytes().fold(17_u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let elements: u64 = shape.iter().product();
    let mut bytes = Vec::with_capacity((elements * tensor.itemsize) as usize);
    for element in 0..elements {
        let (mut rest, mut linear, mut stride) = (element, 0, 1);
        for dim in (0..shape.len()).rev() {
            linear += (offset[dim] + rest % shape[dim]) * stride;
            rest /= shape[dim];
            stride *= tensor.global_shape[dim];
        }
        let value = Dice(seed ^ linear).next();
        bytes.extend((0..tensor.itemsize).map(|at| (value >> (8 * at)) as u8));
    }
    bytes
}

/// What the plan's sources hold.
pub(super) fn source_bytes(plan: &Plan, stored: Option<&Manifest>, held: Option<&Placement>) -> Vec<Vec<u8>> {
    let of = |at: usize| {
        let source = plan.sources()[at];
        let tensor = &plan.tensors()[source.tensor as usize];
        match source.place {
            SourcePlace::Unit { fragment, .. } | SourcePlace::Object { fragment } => {
                let own = &stored.unwrap().fragments()[fragment as usize];
                bytes_of(tensor, &own.global_offset, &own.local_shape)
            }
            SourcePlace::Held(place) => {
                let own = held.unwrap().fragment(place).unwrap();
                bytes_of(tensor, &own.global_offset, &own.local_shape)
            }
        }
    };
    (0..plan.sources().len()).map(of).collect()
}

/// The units of a stored model, padding filled with what nobody may copy.
pub(super) fn units(manifest: &Manifest) -> Vec<Vec<u8>> {
    let mut units: Vec<Vec<u8>> = manifest.units().iter().map(|unit| vec![0xee; unit.extent_bytes as usize]).collect();
    for fragment in manifest.fragments() {
        let tensor = manifest.tensor(&fragment.tensor_id).unwrap();
        let bytes = bytes_of(tensor, &fragment.global_offset, &fragment.local_shape);
        let start = fragment.object_offset as usize;
        if !bytes.is_empty() {
            units[fragment.unit as usize][start..start + bytes.len()].copy_from_slice(&bytes);
        }
    }
    units
}

/// What every target buffer must hold in the end.
pub(super) fn expected(plan: &Plan, target: &Placement) -> Vec<Vec<u8>> {
    let of = |place| {
        let own = target.fragment(place).unwrap();
        bytes_of(&own.tensor, &own.global_offset, &own.local_shape)
    };
    plan.targets().iter().map(|fragment| of(fragment.place)).collect()
}

/// Buffers full of what must not remain.
pub(super) fn blank(plan: &Plan) -> Vec<Vec<u8>> {
    plan.targets().iter().map(|target| vec![0xdd; target.nbytes as usize]).collect()
}
