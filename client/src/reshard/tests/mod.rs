//! The planner and the copies against a brute force; everything that must be refused.

mod refused;
mod world;

use proptest::prelude::*;

use ballast_schemas::placement::{BindingFragment, RuntimeBinding};

use super::execute::{Cuts, copy_in_cuts};
use super::*;
use world::{Dice, Model, blank, expected, source_bytes, units};

fn slices(buffers: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    buffers.iter_mut().map(Vec::as_mut_slice).collect()
}

fn limits() -> Limits {
    Limits::default()
}

/// Copies with a random number of threads and compares every byte.
fn check_mapped(dice: &mut Dice, plan: &Plan, sources: &[Vec<u8>], expected: &[Vec<u8>]) {
    let mut buffers = blank(plan);
    let mut targets = Targets::new(plan, slices(&mut buffers)).unwrap();
    let threads = 1 + dice.below(2) as usize;
    let options = CopyOptions { threads, ..Default::default() };
    let source = |fragment: &SourceFragment| {
        let at = plan.sources().iter().position(|other| std::ptr::eq(other, fragment)).unwrap();
        Some(sources[at].as_slice())
    };
    // Cut far smaller than outside tests, so that these small tensors are copied in many bands.
    let cuts =
        Cuts { piece_bytes: 1 + dice.below(200), band_bytes: 1 + dice.below(50), long_run_bytes: dice.below(64) };
    let copied = copy_in_cuts(plan, source, &mut targets, &options, cuts).unwrap();
    assert_eq!((copied.bytes, copied.unmapped.len()), (plan.bytes(), 0));
    assert!(targets.is_complete() && targets.unwritten(plan).is_empty());
    assert_eq!(targets.written_bytes(), plan.bytes());
    assert_eq!(buffers, expected);
    let mut one_by_one = blank(plan);
    for region in plan.regions() {
        copy_region(&sources[region.source as usize], &mut one_by_one[region.target as usize], region).unwrap();
        assert_eq!(
            region.overlap_shape().iter().product::<u64>() * plan.tensors()[region.tensor as usize].itemsize,
            region.bytes()
        );
    }
    assert_eq!(one_by_one, expected);
}

/// Reads what is not mapped through a node that knows units only, in random requests and pieces.
fn check_wire(dice: &mut Dice, plan: &Plan, units: &[Vec<u8>], sources: &[Vec<u8>], expected: &[Vec<u8>]) {
    let mapped: Vec<bool> = sources.iter().map(|_| dice.chance(20)).collect();
    let mut buffers = blank(plan);
    let mut targets = Targets::new(plan, slices(&mut buffers)).unwrap();
    let at = |fragment: &SourceFragment| plan.sources().iter().position(|other| std::ptr::eq(other, fragment)).unwrap();
    let source = |fragment: &SourceFragment| mapped[at(fragment)].then(|| sources[at(fragment)].as_slice());
    let copied = copy_mapped(plan, source, &mut targets, &CopyOptions { threads: 1, ..Default::default() }).unwrap();
    let coalescing = Coalescing { gap_bytes_max: dice.below(40), hole_ppm_max: dice.below(1_000_000) as u32 };
    let wire = WirePlan::new(plan, |source| copied.unmapped.contains(&source), &coalescing, &limits()).unwrap();
    let (ranges_max, bytes_max) = (1 + dice.below(30) as usize, 1 + dice.below(200));
    let mut bytes = 0;
    for mut request in wire.requests(&mut targets, ranges_max, bytes_max).unwrap() {
        assert!(request.ranges().len() <= ranges_max && request.bytes() <= bytes_max);
        let answer: Vec<u8> = request
            .ranges()
            .iter()
            .flat_map(|range| &units[range.unit as usize][range.offset as usize..(range.offset + range.bytes) as usize])
            .copied()
            .collect();
        assert_eq!(answer.len() as u64, request.bytes());
        bytes += request.bytes();
        while request.arrived() < request.bytes() {
            let from = request.arrived();
            if dice.chance(30)
                && let Some(memory) = request.landing(from)
            {
                let length = 1 + dice.below(memory.len() as u64);
                memory[..length as usize].copy_from_slice(&answer[from as usize..(from + length) as usize]);
                request.landed(from, length).unwrap();
                continue;
            }
            let again = from - dice.below(from.min(5) + 1);
            let to = (from + 1 + dice.below(60)).min(request.bytes());
            request.deliver(again, &answer[again as usize..to as usize]).unwrap();
        }
    }
    assert_eq!(bytes, wire.bytes());
    assert!(targets.is_complete(), "{:?}", targets.unwritten(plan));
    assert_eq!(targets.written_bytes(), plan.bytes());
    assert_eq!(buffers, expected);
}

fn cases(cases: u32) -> ProptestConfig {
    // A failing seed is printed and enough to repeat it; there is nothing to shrink a seed to.
    ProptestConfig { cases, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(5000))]

    #[test]
    fn a_stored_model_fills_every_placement_byte_for_byte(seed in any::<u64>()) {
        let dice = &mut Dice(seed);
        let model = Model::random(dice);
        let (manifest, placement) = (model.manifest(dice), model.placement(dice));
        let (source, target) = (PlanSource::Stored(&manifest), PlanTarget::Whole(&placement));
        let plan = plan(source, target, &limits()).unwrap();
        plan.check(source, target).unwrap();
        let (sources, expected) = (source_bytes(&plan, Some(&manifest), None), expected(&plan, &placement));
        check_mapped(dice, &plan, &sources, &expected);
        check_wire(dice, &plan, &units(&manifest), &sources, &expected);
    }

    #[test]
    fn a_running_placement_fills_every_other_one_byte_for_byte(seed in any::<u64>()) {
        let dice = &mut Dice(seed);
        let model = Model::random(dice);
        let (from, to) = (model.placement(dice), model.placement(dice));
        // Axes that leave no data-parallel rank with everything have no plan, and no other outcome.
        let plan = plan(PlanSource::Held(&from), PlanTarget::Whole(&to), &limits()).unwrap();
        let (sources, expected) = (source_bytes(&plan, None, Some(&from)), expected(&plan, &to));
        check_mapped(dice, &plan, &sources, &expected);
    }
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn the_local_plans_of_all_participants_are_the_whole_plan(seed in any::<u64>()) {
        let dice = &mut Dice(seed);
        let model = Model::random(dice);
        let (manifest, placement) = (model.manifest(dice), model.placement(dice));
        let source = PlanSource::Stored(&manifest);
        let whole = plan(source, PlanTarget::Whole(&placement), &limits()).unwrap();
        let mut bytes = 0;
        for part in placement.parts() {
            let local = plan(source, PlanTarget::Local(&placement, &part.participant().participant_id), &limits()).unwrap();
            prop_assert_eq!(local.targets().len(), part.fragments().len());
            bytes += local.bytes();
            let (sources, expected) = (source_bytes(&local, Some(&manifest), None), expected(&local, &placement));
            check_mapped(dice, &local, &sources, &expected);
            check_wire(dice, &local, &units(&manifest), &sources, &expected);
            let alone = plan(source, PlanTarget::Part(part), &limits()).unwrap();
            prop_assert_eq!(alone.regions(), local.regions());
        }
        prop_assert_eq!(bytes, whole.bytes());
    }
}

/// Everything changes at once: 8 tensor-parallel ranks in 4 stages become 2 with experts over 4, in two replicas.
#[test]
fn tensor_pipeline_expert_and_data_parallel_ranks_change_in_one_plan() {
    use ballast_schemas::manifest::AxisKind::{Dp, Ep, Pp, Tp};
    use ballast_schemas::manifest::ParallelAxis::{self, Ownership, Replicated, Split};
    use ballast_schemas::manifest::Tensor;
    use ballast_schemas::placement::{AxisSizes, ParallelRank, ParallelTopology, Placement};
    use std::sync::Arc;

    let placement = |sizes: AxisSizes, stages: u64, experts: &[ParallelAxis], dense: &[ParallelAxis]| {
        let mut tensors = Vec::new();
        for layer in 0..8 {
            for (name, shape, axes) in [("experts", vec![8, 12, 10], experts), ("dense", vec![16, 24], dense)] {
                let mut tensor = Tensor::plain(format!("layers.{layer}.{name}"), "BF16", 2, shape);
                tensor.layer_id = Some(layer);
                tensor.parallel_axes = axes.to_vec();
                tensor.shard_dims = axes
                    .iter()
                    .filter_map(|axis| match *axis {
                        Split { dim, .. } => Some(dim),
                        _ => None,
                    })
                    .collect();
                tensor.shard_dims.sort_unstable();
                tensors.push(Arc::new(tensor));
            }
        }
        let owns =
            move |tensor: &Tensor, rank: &ParallelRank| tensor.layer_id.unwrap() * stages / 8 == u64::from(rank.pp);
        Placement::from_axes(world::identity(), ParallelTopology::grid(sizes).unwrap(), &tensors, owns).unwrap()
    };
    let from = placement(
        AxisSizes { tp: 8, pp: 4, ..Default::default() },
        4,
        &[Ownership { kind: Pp }, Split { kind: Tp, dim: 2 }],
        &[Ownership { kind: Pp }, Split { kind: Tp, dim: 0 }],
    );
    let to = placement(
        AxisSizes { tp: 2, ep: 4, dp: 2, pp: 1 },
        1,
        &[Replicated { kind: Dp }, Split { kind: Ep, dim: 0 }, Split { kind: Tp, dim: 1 }],
        &[Replicated { kind: Dp }, Replicated { kind: Ep }, Split { kind: Tp, dim: 1 }],
    );
    let plan = plan(PlanSource::Held(&from), PlanTarget::Whole(&to), &limits()).unwrap();
    assert_eq!(plan.targets().len(), 16 * 16);
    let (sources, expected) = (source_bytes(&plan, None, Some(&from)), expected(&plan, &to));
    check_mapped(&mut Dice(1), &plan, &sources, &expected);
}

/// Large enough to be copied in bands and past the caches.
#[test]
fn a_large_tensor_crosses_from_one_dimension_to_another() {
    use ballast_schemas::manifest::{AxisKind, ParallelAxis, Tensor};
    use ballast_schemas::placement::{AxisSizes, ParallelTopology, Placement};

    let placement = |tp, dim: u32| {
        let mut tensor = Tensor::plain("w", "F32", 4, vec![5, 600, 1000]);
        tensor.parallel_axes = vec![ParallelAxis::Split { kind: AxisKind::Tp, dim }];
        tensor.shard_dims = vec![dim];
        let topology = ParallelTopology::grid(AxisSizes { tp, ..Default::default() }).unwrap();
        Placement::from_axes(world::identity(), topology, &[tensor.into()], |_, _| true).unwrap()
    };
    for (from, to) in [(0, 2), (2, 1), (2, 2)] {
        let (from, to) = (placement(2, from), placement(3, to));
        let plan = plan(PlanSource::Held(&from), PlanTarget::Whole(&to), &limits()).unwrap();
        let sources = source_bytes(&plan, None, Some(&from));
        let source = |fragment: &SourceFragment| {
            plan.sources().iter().position(|other| other == fragment).map(|at| sources[at].as_slice())
        };
        let mut buffers = blank(&plan);
        let mut targets = Targets::new(&plan, slices(&mut buffers)).unwrap();
        copy_mapped(&plan, source, &mut targets, &CopyOptions::default()).unwrap();
        assert!(targets.is_complete());
        assert!(buffers == expected(&plan, &to));
    }
}

#[test]
fn a_plan_that_was_made_is_not_made_again() {
    let dice = &mut Dice(7);
    let model = Model::random(dice);
    let (manifest, placement, other) = (model.manifest(dice), model.placement(dice), model.placement(dice));
    let cache = PlanCache::new(limits(), 1_000_000);
    let source = PlanSource::Stored(&manifest);
    let first = cache.plan(source, PlanTarget::Whole(&placement)).unwrap();
    let again = cache.plan(source, PlanTarget::Whole(&placement.clone())).unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &again));
    let participant = &placement.parts()[0].participant().participant_id;
    let local = cache.plan(source, PlanTarget::Local(&placement, participant)).unwrap();
    assert!(!std::sync::Arc::ptr_eq(&first, &local));
    cache.plan(source, PlanTarget::Whole(&other)).unwrap();
    assert_eq!(cache.len(), 3);
    let small = PlanCache::new(limits(), first.regions().len() + first.targets().len());
    small.plan(source, PlanTarget::Whole(&other)).unwrap();
    small.plan(source, PlanTarget::Whole(&placement)).unwrap();
    assert_eq!(small.len(), 1, "the plan that was used last is the one that is kept");
}

/// Rows of 8 bytes 64 apart.
fn innermost_split(participants: u32) -> (ballast_schemas::manifest::Manifest, ballast_schemas::placement::Placement) {
    use ballast_schemas::manifest::{AxisKind, ManifestPlan, ParallelAxis, Tensor};
    use ballast_schemas::placement::{AxisSizes, ParallelTopology, Placement};

    let tensor = Tensor::plain("t0", "X1", 1, vec![512, 64]);
    let identity = ballast_schemas::RevisionIdentity::new("default", "default", "model", "main", 3).unwrap();
    let manifest = ManifestPlan::new(&identity, vec![tensor.clone().into()], vec![]).unwrap().seal(&[0]).unwrap();
    let mut split = tensor;
    split.parallel_axes = vec![ParallelAxis::Split { kind: AxisKind::Tp, dim: 1 }];
    split.shard_dims = vec![1];
    let topology = ParallelTopology::grid(AxisSizes { tp: participants, ..Default::default() }).unwrap();
    let placement = Placement::from_axes(world::identity(), topology, &[split.into()], |_, _| true).unwrap();
    (manifest, placement)
}

#[test]
fn an_innermost_split_is_not_read_row_by_row() {
    let (manifest, placement) = innermost_split(8);
    let source = PlanSource::Stored(&manifest);
    let lower = |target, gap_bytes_max, hole_ppm_max| {
        let plan = plan(source, target, &limits()).unwrap();
        let wire = WirePlan::new(&plan, |_| true, &Coalescing { gap_bytes_max, hole_ppm_max }, &limits()).unwrap();
        (wire.reads().len(), wire.segments(), wire.bytes())
    };
    let one = PlanTarget::Local(&placement, "dp0-pp0-ep0-tp3");
    assert_eq!(lower(one, 56, 0), (1, 1, 511 * 64 + 8), "gaps that cost less than ranges are read along");
    assert_eq!(lower(one, 0, 900_000), (1, 1, 511 * 64 + 8));
    assert_eq!(lower(one, 0, 0), (1, 512, 512 * 8), "else one read with a stride, and nothing but the rows");
    assert_eq!(lower(PlanTarget::Whole(&placement), 0, 0), (1, 1, 512 * 64), "what all want together is read once");
}

#[test]
fn tied_tensors_that_share_memory_are_written_once() {
    let mut dice = Dice(0);
    let model = loop {
        let model = Model::random(&mut dice);
        if model.tensors.iter().any(|(tensor, tied)| tied.is_some() && tensor.nbytes() > Some(0)) {
            break model;
        }
    };
    let manifest = model.manifest(&mut dice);
    let placement = loop {
        let placement = model.placement(&mut dice);
        if placement
            .parts()
            .iter()
            .any(|part| part.fragments().iter().any(|own| !own.aliases.is_empty() && own.nbytes > 0))
        {
            break placement;
        }
    };
    let plan = plan(PlanSource::Stored(&manifest), PlanTarget::Whole(&placement), &limits()).unwrap();
    let mut buffers = blank(&plan);
    let address = |at: usize, buffers: &mut Vec<Vec<u8>>| {
        let first = plan.targets()[at].tied_to.map_or(at, |first| first as usize);
        buffers[first].as_mut_ptr() as u64
    };
    let mut bindings: Vec<RuntimeBinding> = placement
        .parts()
        .iter()
        .map(|part| RuntimeBinding {
            resource_id: "model".into(),
            revision: "main".into(),
            placement_id: placement.placement_id().to_owned(),
            placement_digest: placement.digest(),
            participant_id: part.participant().participant_id.clone(),
            instance_id: "i".into(),
            generation: 1,
            lease_id: "l".into(),
            fragments: vec![],
        })
        .collect();
    let mut shared = 0;
    for (at, target) in plan.targets().iter().enumerate() {
        let own = placement.fragment(target.place).unwrap();
        let bound = BindingFragment::host(own, "w", address(at, &mut buffers));
        bindings[target.place.part as usize].fragments.push(bound);
        shared += u64::from(target.tied_to.is_some() && target.nbytes > 0);
    }
    placement.check_bindings(&bindings).unwrap();
    // SAFETY: the addresses are of `buffers`, which outlive the targets and are not touched meanwhile.
    let mut targets = unsafe { Targets::from_bindings(&plan, &placement, &bindings) }.unwrap();
    let sources = source_bytes(&plan, Some(&manifest), None);
    let source = |fragment: &SourceFragment| {
        plan.sources().iter().position(|other| std::ptr::eq(other, fragment)).map(|at| sources[at].as_slice())
    };
    let copied = copy_mapped(&plan, source, &mut targets, &CopyOptions::default()).unwrap();
    assert!(targets.is_complete());
    assert!(shared > 0 && copied.bytes < plan.bytes(), "{shared} fragments share memory");
    drop(targets);
    for (at, bytes) in expected(&plan, &placement).iter().enumerate() {
        let first = plan.targets()[at].tied_to.map_or(at, |first| first as usize);
        assert_eq!(&buffers[first], bytes);
    }
}
