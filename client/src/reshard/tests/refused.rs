//! Bad input: each a typed error that names the tensor, and nothing written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_schemas::RevisionIdentity;
use ballast_schemas::manifest::{AxisKind, Manifest, ManifestPlan, ParallelAxis, Tensor};
use ballast_schemas::placement::{AxisSizes, ParallelTopology, Placement, PlacementIdentity};

use super::world::{bytes_of, identity, units};
use super::*;

fn tensor(name: &str, shape: &[u64]) -> Tensor {
    Tensor::plain(name, "F32", 4, shape.to_vec())
}

fn manifest(tensors: &[Tensor]) -> Manifest {
    let identity = RevisionIdentity::new("default", "default", "model", "main", 3).unwrap();
    let plan = ManifestPlan::new(&identity, tensors.iter().cloned().map(Into::into).collect(), vec![]).unwrap();
    let checksums = vec![0; tensors.len()];
    plan.seal(&checksums).unwrap()
}

/// Tensors split along their first dimension over so many ranks.
fn placement_of(identity: PlacementIdentity, tensors: &[Tensor], tp: u32) -> Placement {
    let split = |tensor: &Tensor| {
        let mut split = tensor.clone();
        split.parallel_axes = vec![ParallelAxis::Split { kind: AxisKind::Tp, dim: 0 }];
        split.shard_dims = vec![0];
        Arc::new(split)
    };
    let tensors: Vec<_> = tensors.iter().map(split).collect();
    let topology = ParallelTopology::grid(AxisSizes { tp, ..Default::default() }).unwrap();
    Placement::from_axes(identity, topology, &tensors, |_, _| true).unwrap()
}

fn placement(tensors: &[Tensor], tp: u32) -> Placement {
    placement_of(identity(), tensors, tp)
}

fn refuse(stored: &[Tensor], wanted: &[Tensor]) -> PlanError {
    plan(PlanSource::Stored(&manifest(stored)), PlanTarget::Whole(&placement(wanted, 2)), &limits()).unwrap_err()
}

#[test]
fn a_target_that_leaves_out_or_adds_a_tensor_is_refused() {
    let (a, b) = (tensor("a", &[4]), tensor("b", &[4]));
    assert_eq!(refuse(&[a.clone(), b.clone()], std::slice::from_ref(&b)), PlanError::Omitted { tensor: "a".into() });
    assert_eq!(refuse(std::slice::from_ref(&a), &[a.clone(), b.clone()]), PlanError::Added { tensor: "b".into() });
    let part = placement(std::slice::from_ref(&a), 1).parts()[0].clone();
    let stored = manifest(&[a, b]);
    plan(PlanSource::Stored(&stored), PlanTarget::Part(&part), &limits()).unwrap();
}

#[test]
fn what_would_need_more_than_copying_is_refused() {
    let stored = tensor("w", &[4, 6]);
    let field = |change: &dyn Fn(&mut Tensor)| {
        let mut wanted = stored.clone();
        change(&mut wanted);
        match refuse(std::slice::from_ref(&stored), &[wanted]) {
            PlanError::Incompatible { tensor, field, .. } if tensor == "w" => field,
            other => panic!("{other}"),
        }
    };
    assert_eq!(field(&|wanted| wanted.dtype = "I32".into()), "dtype");
    assert_eq!(field(&|wanted| wanted.itemsize = 2), "itemsize");
    assert_eq!(field(&|wanted| wanted.global_shape = vec![6, 4]), "global_shape");
    assert_eq!(field(&|wanted| wanted.layout_fingerprint = "tiled".into()), "layout_fingerprint");
}

#[test]
fn a_target_of_other_weights_is_refused() {
    let a = tensor("a", &[4]);
    let stored = manifest(std::slice::from_ref(&a));
    for (change, field) in [
        (PlacementIdentity { weight_generation: 2, ..identity() }, "weight_generation"),
        (PlacementIdentity { revision: "next".into(), ..identity() }, "revision"),
        (PlacementIdentity { resource_id: "other".into(), ..identity() }, "resource_id"),
    ] {
        let target = placement_of(change, std::slice::from_ref(&a), 2);
        let error = plan(PlanSource::Stored(&stored), PlanTarget::Whole(&target), &limits()).unwrap_err();
        assert!(matches!(&error, PlanError::Identity { field: found, .. } if *found == field), "{error}");
    }
    let target = placement(&[a], 2);
    let error = plan(PlanSource::Stored(&stored), PlanTarget::Local(&target, "nobody"), &limits()).unwrap_err();
    assert_eq!(error, PlanError::UnknownParticipant { participant: "nobody".into() });
}

#[test]
fn a_plan_that_was_changed_is_noticed() {
    let a = tensor("a", &[4, 4]);
    let (stored, target) = (manifest(std::slice::from_ref(&a)), placement(&[a], 2));
    let (source, target) = (PlanSource::Stored(&stored), PlanTarget::Whole(&target));
    let good = plan(source, target, &limits()).unwrap();
    good.check(source, target).unwrap();
    let changes: [&dyn Fn(&mut Plan); 5] = [
        &|plan| plan.regions[1].source_offset = 0,
        &|plan| plan.regions[1].inner_bytes -= 1,
        &|plan| plan.regions[1].target = 0,
        &|plan| drop(plan.regions.pop()),
        &|plan| plan.sources[0].nbytes = 1,
    ];
    for change in changes {
        let mut bad = good.clone();
        change(&mut bad);
        let error = bad.check(source, target).unwrap_err();
        assert!(matches!(&error, PlanError::NotCanonical { tensor, .. } if tensor == "a"), "{error}");
    }
}

#[test]
fn a_plan_beyond_its_limits_is_refused_before_it_is_built() {
    let tensors = [tensor("a", &[4]), tensor("b", &[4])];
    let (stored, target) = (manifest(&tensors), placement(&tensors, 4));
    let limited = |limits| plan(PlanSource::Stored(&stored), PlanTarget::Whole(&target), &limits);
    assert_eq!(limited(Limits { regions: 8, ..limits() }).unwrap().regions().len(), 8);
    for (limits, what) in [
        (Limits { regions: 5, ..limits() }, "regions"),
        (Limits { comparisons: 5, ..limits() }, "comparisons of boxes"),
    ] {
        let error = limited(limits).unwrap_err();
        assert!(
            matches!(&error, PlanError::TooMany { tensor, what: found, .. } if tensor == "b" && *found == what),
            "{error}"
        );
    }
    let (stored, target) = innermost_split(8);
    let plan = plan(PlanSource::Stored(&stored), PlanTarget::Local(&target, "dp0-pp0-ep0-tp0"), &limits()).unwrap();
    let lower = |limits| WirePlan::new(&plan, |_| true, &Coalescing { gap_bytes_max: 0, hole_ppm_max: 0 }, &limits);
    assert_eq!(lower(limits()).unwrap().segments(), 512);
    let error = lower(Limits { segments_per_region: 511, ..limits() }).unwrap_err();
    assert_eq!(error, LowerError::Segments { tensor: "t0".into(), segments: 512, limit: 511 });
    let error = lower(Limits { segments: 511, ..limits() }).unwrap_err();
    assert_eq!(error, LowerError::TotalSegments { tensor: "t0".into(), limit: 511 });
}

#[test]
fn weights_that_are_in_no_unit_are_not_read_by_unit() {
    let a = tensor("a", &[4]);
    let (from, to) = (placement(std::slice::from_ref(&a), 1), placement(&[a], 2));
    let plan = plan(PlanSource::Held(&from), PlanTarget::Whole(&to), &limits()).unwrap();
    let error = WirePlan::new(&plan, |_| true, &Coalescing::default(), &limits()).unwrap_err();
    assert_eq!(error, LowerError::NotStored { tensor: "a".into() });
}

#[test]
fn a_buffer_that_does_not_fit_is_refused_by_the_name_of_its_tensor() {
    let tensors = [tensor("a", &[4]), tensor("b", &[4])];
    let (stored, target) = (manifest(&tensors), placement(&tensors, 1));
    let plan = plan(PlanSource::Stored(&stored), PlanTarget::Whole(&target), &limits()).unwrap();
    let refused = |sizes: &[usize]| {
        let mut buffers: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size]).collect();
        Targets::new(&plan, slices(&mut buffers)).map(drop).unwrap_err()
    };
    assert_eq!(refused(&[16]), TargetError::Count { expected: 2, found: 1 });
    assert_eq!(refused(&[16, 15]), TargetError::Length { tensor: "b".into(), expected: 16, found: 15 });
    assert_eq!(refused(&[17, 16]), TargetError::Length { tensor: "a".into(), expected: 16, found: 17 });
    let mut memory = [0_u8; 32];
    let base = memory.as_mut_ptr();
    let raw = |buffers: [(*mut u8, usize); 2]| {
        // SAFETY: the buffers lie in `memory`, or are refused; nothing is written.
        unsafe { Targets::from_raw(&plan, &buffers) }.map(drop)
    };
    raw([(base, 16), (base.wrapping_add(16), 16)]).unwrap();
    let overlap = Err(TargetError::Overlap { tensor: "a".into(), other: "b".into() });
    assert_eq!(raw([(base, 16), (base.wrapping_add(15), 16)]), overlap);
    assert_eq!(raw([(base, 16), (base, 16)]), overlap, "they are no declared aliases");
    assert_eq!(raw([(std::ptr::null_mut(), 16), (base, 16)]), Err(TargetError::Null { tensor: "a".into() }));
}

#[test]
fn a_source_of_another_size_and_buffers_of_another_plan_are_refused_before_anything_is_written() {
    let tensors = [tensor("a", &[4]), tensor("b", &[4])];
    let (stored, target) = (manifest(&tensors), placement(&tensors, 1));
    let plan = plan(PlanSource::Stored(&stored), PlanTarget::Whole(&target), &limits()).unwrap();
    let mut buffers = blank(&plan);
    let mut targets = Targets::new(&plan, slices(&mut buffers)).unwrap();
    let sources = [vec![1_u8; 16], vec![1_u8; 15]];
    let source = |fragment: &SourceFragment| Some(sources[fragment.tensor as usize].as_slice());
    let error = copy_mapped(&plan, source, &mut targets, &CopyOptions::default()).unwrap_err();
    assert_eq!(error, CopyError::Source { tensor: "b".into(), expected: 16, found: 15 });
    assert_eq!(targets.unwritten(&plan), ["a", "b"]);
    let halves = placement(&tensors, 2);
    let other = super::plan(PlanSource::Stored(&stored), PlanTarget::Whole(&halves), &limits()).unwrap();
    let error = copy_mapped(&other, |_| None, &mut targets, &CopyOptions::default()).unwrap_err();
    assert!(matches!(&error, CopyError::Targets { tensor, .. } if tensor == "a"), "{error}");
    assert_eq!(buffers, blank(&plan));
}

#[test]
fn a_region_never_reaches_outside_what_it_is_given() {
    let a = tensor("a", &[4, 4]);
    let (stored, target) = (manifest(std::slice::from_ref(&a)), placement(std::slice::from_ref(&a), 2));
    let plan = plan(PlanSource::Stored(&stored), PlanTarget::Whole(&target), &limits()).unwrap();
    let source = bytes_of(&a, &[0, 0], &[4, 4]);
    let region = &plan.regions()[1];
    assert!(matches!(
        copy_region(&source[..63], &mut [0; 32], region),
        Err(CopyError::Bounds { needed: 64, found: 63, .. })
    ));
    assert!(matches!(copy_region(&source, &mut [0; 31], region), Err(CopyError::Bounds { needed: 32, found: 31, .. })));
    let mut wild = region.clone();
    wild.loops = vec![Loop { count: u64::MAX, source_stride: u64::MAX, target_stride: 3 }].into();
    assert!(copy_region(&source, &mut [0; 32], &wild).is_err());
}

#[test]
fn a_copy_that_is_stopped_says_what_is_missing() {
    // 20 MiB each: more than one piece.
    let tensors = [tensor("a", &[5 << 20]), tensor("b", &[5 << 20])];
    let (stored, target) = (manifest(&tensors), placement(&tensors, 1));
    let plan = plan(PlanSource::Stored(&stored), PlanTarget::Whole(&target), &limits()).unwrap();
    let bytes = vec![7; 20 << 20];
    let mut buffers = blank(&plan);
    let mut targets = Targets::new(&plan, slices(&mut buffers)).unwrap();
    let (stop, reported) = (AtomicBool::new(false), AtomicU64::new(0));
    let progress = |bytes| {
        if reported.fetch_add(bytes, Ordering::Relaxed) + bytes >= 20 << 20 {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let options = CopyOptions { threads: 1, progress: Some(&progress), stop: Some(&stop) };
    let error = copy_mapped(&plan, |_| Some(&bytes), &mut targets, &options).unwrap_err();
    assert_eq!(error, CopyError::Interrupted { unwritten: vec!["b".into()] });
    assert!(!targets.is_complete());
}

#[test]
fn an_answer_that_breaks_off_is_not_complete_and_is_completed_by_asking_again() {
    let tensors = [tensor("a", &[40]), tensor("b", &[40]), tensor("c", &[40])];
    let (stored, target) = (manifest(&tensors), placement(&tensors, 2));
    let plan = plan(PlanSource::Stored(&stored), PlanTarget::Whole(&target), &limits()).unwrap();
    let units = units(&stored);
    let wire = WirePlan::new(&plan, |_| true, &Coalescing::default(), &limits()).unwrap();
    let mut buffers = blank(&plan);
    let mut targets = Targets::new(&plan, slices(&mut buffers)).unwrap();
    let answer = |request: &Request<'_>| -> Vec<u8> {
        let bytes = |range: &ballast_schemas::frame::ReadRange| {
            units[range.unit as usize][range.offset as usize..(range.offset + range.bytes) as usize].to_vec()
        };
        request.ranges().iter().flat_map(bytes).collect()
    };
    let mut request = wire.requests(&mut targets, 100, 1 << 20).unwrap().next().unwrap();
    let whole = answer(&request);
    assert_eq!(whole.len(), 480);
    request.deliver(0, &whole[..290]).unwrap();
    assert!(matches!(request.deliver(291, &whole[291..]), Err(CopyError::Answer { from: 291, .. })), "a gap");
    assert!(matches!(request.deliver(290, &whole), Err(CopyError::Answer { to: 770, expected: 480, .. })), "too much");
    drop(request);
    assert_eq!(targets.unwritten(&plan), ["b", "c"]);
    assert!(!targets.is_complete());
    // A retry begins with buffers that count anew.
    let mut targets = Targets::new(&plan, slices(&mut buffers)).unwrap();
    for mut request in wire.requests(&mut targets, 2, 100).unwrap() {
        let answer = answer(&request);
        let half = answer.len() / 2;
        request.deliver(0, &answer[..half]).unwrap();
        request.deliver(0, &answer).unwrap();
    }
    assert!(targets.is_complete());
    assert_eq!(targets.written_bytes(), plan.bytes());
    assert_eq!(buffers, expected(&plan, &target));
}

#[test]
fn a_source_that_no_data_parallel_rank_holds_completely_has_no_plan() {
    use ballast_schemas::placement::{ParallelRank, Participant};

    let axes = [ParallelAxis::Replicated { kind: AxisKind::Dp }, ParallelAxis::Ownership { kind: AxisKind::Pp }];
    let tensors = ["a", "b"].map(|name| {
        let mut one = tensor(name, &[4]);
        one.parallel_axes = axes.to_vec();
        Arc::new(one)
    });
    let rank = |dp, pp| ParallelRank { dp, pp, ..Default::default() };
    let participants = [rank(0, 0), rank(1, 1)].map(|rank| Participant { participant_id: format!("{rank:?}"), rank });
    let topology =
        ParallelTopology::new(AxisSizes { dp: 2, pp: 2, ..Default::default() }, participants.to_vec()).unwrap();
    let owns = |one: &Tensor, rank: &ParallelRank| (one.tensor_id == "a") == (rank.pp == 0);
    let from = Placement::from_axes(identity(), topology, &tensors, owns).unwrap();
    let to = placement(&[tensor("a", &[4]), tensor("b", &[4])], 1);
    let error = plan(PlanSource::Held(&from), PlanTarget::Whole(&to), &limits()).unwrap_err();
    assert!(matches!(&error, PlanError::NoReplica { tensor, .. } if tensor.contains("\"b\"")), "{error}");
    // Every error of this module reaches the caller with its tensor.
    let shown = ballast_schemas::BallastError::from(error);
    assert_eq!(shown.code, ballast_schemas::ErrorCode::InvalidArgument);
    assert!(shown.details["tensor"].as_str().unwrap().contains("\"b\""));
}
