//! Placements as a whole: golden documents, hostile ones, coverage rules, and bindings.

use proptest::prelude::*;

use super::*;
use crate::manifest::ParallelAxis::{self, Ownership, Replicated, Split};

fn identity() -> PlacementIdentity {
    PlacementIdentity {
        resource_id: "tiny ü".into(),
        revision: "main".into(),
        weight_generation: 3,
        placement_set_id: "job-1".into(),
    }
}

fn tensor(name: &str, shape: &[u64], axes: &[ParallelAxis]) -> Arc<Tensor> {
    let mut tensor = Tensor::plain(name, "F32", 4, shape.to_vec());
    tensor.parallel_axes = axes.to_vec();
    let dim = |axis: &ParallelAxis| if let Split { dim, .. } = *axis { Some(dim) } else { None };
    tensor.shard_dims = axes.iter().filter_map(dim).collect();
    tensor.shard_dims.sort_unstable();
    Arc::new(tensor)
}

const PP: AxisKind = AxisKind::Pp;
const TP: AxisKind = AxisKind::Tp;
const EP: AxisKind = AxisKind::Ep;
const DP: AxisKind = AxisKind::Dp;

fn fragment(
    tensor: &Arc<Tensor>,
    offset: &[u64],
    shape: &[u64],
    rank: ParallelRank,
    aliases: &[&str],
) -> PlacementFragment {
    let aliases = aliases.iter().map(|name| (*name).to_owned()).collect();
    PlacementFragment::new(tensor.clone(), offset.to_vec(), shape.to_vec(), rank, aliases).unwrap()
}

/// Two stages of two ranks: tied weights at both ends of the pipeline, an owned, an uneven and a scalar tensor.
fn sample_parts() -> (ParallelTopology, Vec<PlacementPart>) {
    let topology = ParallelTopology::grid(AxisSizes { pp: 2, tp: 2, ..Default::default() }).unwrap();
    let owned = [Ownership { kind: PP }, Split { kind: TP, dim: 0 }];
    let embed = tensor("embed", &[6, 4], &owned);
    let lm_head = tensor("lm_head", &[6, 4], &owned);
    let mut norm = (*tensor("norm.é😀", &[4], &[Ownership { kind: PP }, Replicated { kind: TP }])).clone();
    norm.layer_id = Some(1);
    let norm = Arc::new(norm);
    let odd = tensor("odd", &[3, 5], &[Replicated { kind: PP }, Split { kind: TP, dim: 1 }]);
    let scale = tensor("scale", &[], &[Replicated { kind: PP }, Replicated { kind: TP }]);
    let parts = topology.participants().iter().map(|participant| {
        let rank = participant.rank;
        let tp = u64::from(rank.tp);
        let tied = if rank.pp == 0 { &embed } else { &lm_head };
        let mut fragments = vec![
            fragment(&scale, &[], &[], rank, &[]),
            fragment(tied, &[3 * tp, 0], &[3, 4], rank, &["lm_head", "embed"]),
            fragment(&odd, &[0, 3 * tp], &[3, 3 - tp], rank, &[]),
        ];
        if rank.pp == 1 {
            fragments.push(fragment(&norm, &[0], &[4], rank, &[]));
        }
        PlacementPart::new(identity(), topology.topology_id(), participant.clone(), fragments).unwrap()
    });
    let parts = parts.collect();
    (topology, parts)
}

fn sample() -> Placement {
    let (topology, mut parts) = sample_parts();
    parts.reverse();
    Placement::assemble(identity(), topology, parts).unwrap()
}

/// The goldens were written by another JSON library.
#[test]
fn the_golden_documents_and_ids_are_byte_identical() {
    let placement = sample();
    let golden = include_str!("goldens/placement.json");
    assert_eq!(String::from_utf8(placement.to_canonical_bytes()).unwrap(), golden);
    let ids = format!(
        "topology {}\nplacement {}\ndigest {}\n",
        placement.topology().topology_id(),
        placement.placement_id(),
        placement.digest()
    );
    assert_eq!(ids, include_str!("goldens/placement.ids"));
    assert_eq!(Placement::parse(golden.as_bytes()).unwrap(), placement);
    let part = include_str!("goldens/part.json");
    assert_eq!(String::from_utf8(placement.parts()[2].to_canonical_bytes()).unwrap(), part);
    assert_eq!(PlacementPart::parse(part.as_bytes()).unwrap(), placement.parts()[2]);
}

#[test]
fn a_document_with_one_wrong_field_is_refused_with_the_path_of_the_field() {
    let golden = include_str!("goldens/placement.json");
    let cases = [
        ("\"dp_size\":1", "\"dp_size\":1.0", "topology.dp_size", "whole number"),
        ("\"dp_size\":1", "\"dp_size\":true", "topology.dp_size", "true"),
        ("\"dp_size\":1", "\"dp_size\":0", "topology.dp_size", "at least 1"),
        ("\"dp_size\":1", "\"dp_size\":2", "topology.topology_id", "its content has"),
        ("\"pp_size\":2", "\"pp_size\":1", "topology.participants[2].rank", "not below the size 1"),
        ("\"dp\":0,\"ep\":0", "\"dp\":NaN,\"ep\":0", "parts[0].fragments[0].rank.dp", "NaN"),
        ("\"dp\":0,\"ep\":0", "\"dp\":0,\"dp\":0,\"ep\":0", "parts[0].fragments[0].rank", "twice"),
        ("\"dp\":0,\"ep\":0", "\"dp\":0", "parts[0].fragments[0].rank", "\"ep\" is missing"),
        ("\"dp\":0,\"ep\":0", "\"cp\":0,\"dp\":0,\"ep\":0", "parts[0].fragments[0].rank", "unknown field \"cp\""),
        ("\"nbytes\":48", "\"nbytes\":47", "parts[0].fragments", "expected 48"),
        ("\"global_offset\":[3,0]", "\"global_offset\":[4,0]", "parts[1].fragments", "outside"),
        ("\"global_offset\":[3,0]", "\"global_offset\":[2,0]", "tensors[\"embed\"]", "overlap"),
        ("\"aliases\":[\"embed\",\"lm_head\"]", "\"aliases\":[\"embed\",\"odd\"]", "tensors[\"embed\"]", "alias"),
        (
            "\"aliases\":[\"embed\",\"lm_head\"]",
            "\"aliases\":[\"lm_head\",\"embed\"]",
            "parts[0].fragments",
            "ascending",
        ),
        ("\"tensor_id\":\"odd\"}", "\"tensor_id\":\"add\"}", "parts[0].fragments", "not in tensors"),
        ("\"tensor_id\":\"scale\"}],\"topology\"", "\"tensor_id\":\"odd\"}],\"topology\"", "tensors[4]", "repeated"),
        ("\"resource_kind\":\"model_weight\"", "\"resource_kind\":\"kv_cache\"", "resource_kind", "model_weight"),
        ("\"weight_generation\":3", "\"weight_generation\":4", "placement_id", "its content has"),
        ("\"weight_generation\":3}", "\"weight_generation\":3} ", "document", "after its end"),
        ("tiny \\u00fc", "tiny ü", "document", "printable ASCII"),
        ("tiny \\u00fc", "tiny \\u00FC", "resource_id", "escape"),
        (
            "\"participant_id\":\"dp0-pp0-ep0-tp0\",\"rank\"",
            "\"participant_id\":\"a\",\"rank\"",
            "parts[0].participant_id",
            "not in the topology",
        ),
    ];
    for (from, to, path, reason) in cases {
        assert!(golden.contains(from), "{from}");
        let error = Placement::parse(golden.replacen(from, to, 1).as_bytes()).expect_err(to);
        assert!(error.path.starts_with(path), "{to}: {error}");
        assert!(error.reason.contains(reason), "{to}: {error}");
    }
    let mut parts: Vec<_> = golden.split("{\"fragments\":").collect();
    parts.swap(1, 2);
    let swapped = parts.join("{\"fragments\":");
    assert!(Placement::parse(swapped.as_bytes()).is_err(), "parts out of order");
}

#[test]
fn the_world_is_the_participants_and_not_the_product_of_the_axes() {
    let rank = |tp, ep| ParallelRank { tp, ep, ..Default::default() };
    let participant = |name: &str, rank| Participant { participant_id: name.into(), rank };
    let sizes = AxisSizes { tp: 2, ep: 2, dp: 8, ..Default::default() };
    let pair = vec![participant("b", rank(1, 1)), participant("a", rank(0, 0))];
    let topology = ParallelTopology::new(sizes, pair.clone()).unwrap();
    assert_eq!((topology.world_size(), topology.participant("b").unwrap().rank), (2, rank(1, 1)));
    assert!(topology.participant("c").is_none());
    for (wrong, reason) in [
        (vec![], "expected 1"),
        (vec![pair[0].clone(), pair[0].clone()], "twice"),
        (vec![pair[0].clone(), participant("c", rank(1, 1))], "coordinates of another"),
        (vec![participant("a", rank(2, 0))], "not below"),
        (vec![participant("", rank(0, 0))], "empty"),
    ] {
        let error = ParallelTopology::new(sizes, wrong).unwrap_err();
        assert!(error.reason.contains(reason), "{error}");
    }
    assert!(ParallelTopology::grid(AxisSizes { tp: 1 << 20, dp: 1 << 20, ..Default::default() }).is_err());
}

#[test]
fn a_missing_doubled_or_foreign_part_is_named() {
    let gather = |change: &dyn Fn(&mut Vec<PlacementPart>)| {
        let (topology, mut parts) = sample_parts();
        change(&mut parts);
        Placement::assemble(identity(), topology, parts).unwrap_err().to_string()
    };
    let foreign = |identity: PlacementIdentity, topology_id: &str, participant: Participant| {
        PlacementPart::new(identity, topology_id, participant, vec![]).unwrap()
    };
    let (topology, parts) = sample_parts();
    let first = parts[0].participant().clone();
    assert!(gather(&|parts| drop(parts.remove(1))).contains("\"dp0-pp0-ep0-tp1\" has given no part"));
    assert!(gather(&|parts| parts.push(parts[3].clone())).contains("\"dp0-pp1-ep0-tp1\" gave two parts"));
    let stale = PlacementIdentity { weight_generation: 2, ..identity() };
    assert!(
        gather(&|parts| parts[0] = foreign(stale.clone(), topology.topology_id(), first.clone()))
            .contains("parts[0].weight_generation: found \"2\", expected \"3\"")
    );
    let other = PlacementIdentity { placement_set_id: "job-0".into(), ..identity() };
    assert!(
        gather(&|parts| parts[0] = foreign(other.clone(), topology.topology_id(), first.clone()))
            .contains("placement_set_id")
    );
    assert!(gather(&|parts| parts[0] = foreign(identity(), "sha256:0", first.clone())).contains("topology_id"));
    let moved = Participant { rank: ParallelRank { tp: 1, ..first.rank }, ..first.clone() };
    assert!(gather(&|parts| parts[0] = foreign(identity(), topology.topology_id(), moved.clone())).contains("rank"));
}

/// A placement of one tensor from (rank, offset, shape) triples.
fn of_one(
    sizes: AxisSizes,
    one: &Arc<Tensor>,
    held: &[(ParallelRank, &[u64], &[u64])],
) -> Result<Placement, PlacementError> {
    let topology = ParallelTopology::grid(sizes)?;
    let part = |participant: &Participant| {
        let own = held.iter().filter(|(rank, ..)| *rank == participant.rank);
        let own = own.map(|(rank, offset, shape)| fragment(one, offset, shape, *rank, &[])).collect();
        PlacementPart::new(identity(), topology.topology_id(), participant.clone(), own)
    };
    let parts = topology.participants().iter().map(part).collect::<Result<_, _>>()?;
    Placement::assemble(identity(), topology, parts)
}

fn tp(tp: u32) -> ParallelRank {
    ParallelRank { tp, ..Default::default() }
}

#[test]
fn split_ranks_cover_once_and_all_take_part() {
    let sizes = AxisSizes { tp: 4, ..Default::default() };
    let six = tensor("six", &[6], &[Split { kind: TP, dim: 0 }]);
    let good: [(ParallelRank, &[u64], &[u64]); 4] =
        [(tp(0), &[0], &[2]), (tp(1), &[2], &[2]), (tp(2), &[4], &[2]), (tp(3), &[6], &[0])];
    of_one(sizes, &six, &good).unwrap();
    let refused = |held: &[(ParallelRank, &[u64], &[u64])], reason: &str| {
        let error = of_one(sizes, &six, held).unwrap_err();
        assert!(error.to_string().contains("\"six\"") && error.reason.contains(reason), "{error}");
    };
    refused(&good[..3], "missing fragments of replica (all), split rank (tp=3)");
    refused(&[good[0], good[1], (tp(2), &[4], &[1]), good[3]], "1 elements uncovered");
    refused(&[good[0], (tp(1), &[1], &[2]), good[2], good[3]], "overlap");
    refused(&[good[0], (tp(0), &[1], &[1]), good[1], good[2], good[3]], "overlaps fragments[");
    // Two ranks in one stretch of the split dimension, told apart along another one.
    let plane = tensor("plane", &[4, 2], &[Split { kind: TP, dim: 0 }]);
    let held: [(ParallelRank, &[u64], &[u64]); 2] = [(tp(0), &[0, 0], &[4, 1]), (tp(1), &[0, 1], &[4, 1])];
    let error = of_one(AxisSizes { tp: 2, ..Default::default() }, &plane, &held).unwrap_err();
    assert!(error.reason.contains("share a stretch of dimension 0"), "{error}");
    // Several pieces of one rank, as a fused projection has them.
    let held: [(ParallelRank, &[u64], &[u64]); 4] =
        [(tp(0), &[0, 0], &[1, 2]), (tp(1), &[1, 0], &[1, 2]), (tp(0), &[2, 0], &[1, 2]), (tp(1), &[3, 0], &[1, 2])];
    of_one(AxisSizes { tp: 2, ..Default::default() }, &plane, &held).unwrap();
}

#[test]
fn two_splits_make_a_cartesian_product() {
    let sizes = AxisSizes { tp: 2, ep: 2, ..Default::default() };
    let both = tensor("both", &[4, 4], &[Split { kind: EP, dim: 0 }, Split { kind: TP, dim: 1 }]);
    let topology = ParallelTopology::grid(sizes).unwrap();
    Placement::from_axes(identity(), topology, std::slice::from_ref(&both), |_, _| true).unwrap();
    let diagonal = [0, 1].map(|n| Participant {
        participant_id: n.to_string(),
        rank: ParallelRank { tp: n, ep: n, ..Default::default() },
    });
    let topology = ParallelTopology::new(sizes, diagonal.to_vec()).unwrap();
    let part = |participant: &Participant| {
        let at = u64::from(participant.rank.tp);
        let own = vec![
            fragment(&both, &[2 * at, 2 * at], &[2, 2], participant.rank, &[]),
            fragment(&both, &[2 * at, 2 - 2 * at], &[2, 2], participant.rank, &[]),
        ];
        PlacementPart::new(identity(), topology.topology_id(), participant.clone(), own).unwrap()
    };
    let parts = topology.participants().iter().map(part).collect();
    let error = Placement::assemble(identity(), topology.clone(), parts).unwrap_err();
    assert!(error.reason.contains("2 split ranks, its axes have 4"), "{error}");
}

#[test]
fn every_replica_and_every_owner_covers_by_itself() {
    let replicated = tensor("r", &[4], &[Replicated { kind: DP }, Split { kind: TP, dim: 0 }]);
    let sizes = AxisSizes { dp: 2, tp: 2, ..Default::default() };
    let rank = |dp, tp| ParallelRank { dp, tp, ..Default::default() };
    let good: [(ParallelRank, &[u64], &[u64]); 4] =
        [(rank(0, 0), &[0], &[2]), (rank(0, 1), &[2], &[2]), (rank(1, 0), &[0], &[1]), (rank(1, 1), &[1], &[3])];
    of_one(sizes, &replicated, &good).unwrap();
    let error = of_one(sizes, &replicated, &good[..2]).unwrap_err();
    assert!(error.reason.contains("missing fragments of replica (dp=1), split rank (tp=0)"), "{error}");
    // Fragments of two pipeline owners do not add up to one tensor.
    let owned = tensor("o", &[4], &[Ownership { kind: PP }]);
    let stage = |pp| ParallelRank { pp, ..Default::default() };
    let sizes = AxisSizes { pp: 2, ..Default::default() };
    let error = of_one(sizes, &owned, &[(stage(0), &[0], &[2]), (stage(1), &[2], &[2])]).unwrap_err();
    assert!(error.reason.contains("2 elements uncovered"), "{error}");
    of_one(sizes, &owned, &[(stage(1), &[0], &[4])]).unwrap();
    of_one(sizes, &owned, &[(stage(0), &[0], &[4]), (stage(1), &[0], &[4])]).unwrap();
}

#[test]
fn an_axis_that_a_tensor_does_not_declare_must_not_matter_to_it() {
    let sizes = AxisSizes { tp: 2, ep: 2, ..Default::default() };
    let split = tensor("s", &[4], &[Split { kind: TP, dim: 0 }]);
    let topology = ParallelTopology::grid(sizes).unwrap();
    let error = Placement::from_axes(identity(), topology, std::slice::from_ref(&split), |_, _| true).unwrap_err();
    assert!(error.reason.contains("axis ep") && error.reason.contains("varies"), "{error}");
    let coupled = [0, 1].map(|n| Participant {
        participant_id: n.to_string(),
        rank: ParallelRank { tp: n, ep: n, ..Default::default() },
    });
    let topology = ParallelTopology::new(sizes, coupled.to_vec()).unwrap();
    Placement::from_axes(identity(), topology, &[split], |_, _| true).unwrap();
    let plain = tensor("p", &[4], &[]);
    let topology = ParallelTopology::grid(AxisSizes { dp: 2, ..Default::default() }).unwrap();
    let error = Placement::from_axes(identity(), topology, &[plain], |_, _| true).unwrap_err();
    assert!(error.reason.contains("axis dp"), "{error}");
}

#[test]
fn the_lowest_complete_data_parallel_rank_is_read_from() {
    let rank = |dp, pp, tp| ParallelRank { dp, pp, tp, ..Default::default() };
    let ranks = [rank(0, 0, 0), rank(0, 0, 1), rank(1, 0, 0), rank(1, 0, 1), rank(1, 1, 0), rank(1, 1, 1)];
    let participants =
        ranks.iter().map(|rank| Participant { participant_id: format!("{rank:?}"), rank: *rank }).collect();
    let sizes = AxisSizes { dp: 2, pp: 2, tp: 2, ..Default::default() };
    let topology = ParallelTopology::new(sizes, participants).unwrap();
    let axes = [Replicated { kind: DP }, Ownership { kind: PP }, Split { kind: TP, dim: 0 }];
    let (first, last) = (tensor("first", &[4], &axes), tensor("last", &[4], &axes));
    let owns = |tensor: &Tensor, rank: &ParallelRank| (tensor.tensor_id == "first") == (rank.pp == 0);
    let placement = Placement::from_axes(identity(), topology, &[first, last], owns).unwrap();
    let replica = placement.source_replica().unwrap();
    assert_eq!(replica.dp_rank(), 1, "rank 0 has no second stage");
    for place in 0..2 {
        let chosen = replica.fragments(place);
        assert_eq!(chosen.len(), 2);
        assert!(chosen.iter().all(|at| placement.fragment(*at).unwrap().rank.dp == 1));
    }
    assert!(replica.fragments(2).is_empty());
}

fn binding(placement: &Placement, participant: &str, base: u64) -> RuntimeBinding {
    let part = placement.part(participant).unwrap();
    let fragments = part.fragments().iter().enumerate();
    RuntimeBinding {
        resource_id: "tiny ü".into(),
        revision: "main".into(),
        placement_id: placement.placement_id().to_owned(),
        placement_digest: placement.digest(),
        participant_id: participant.to_owned(),
        instance_id: "i".into(),
        generation: 1,
        lease_id: "l".into(),
        fragments: fragments.map(|(at, own)| BindingFragment::host(own, "w", base + 4096 * at as u64)).collect(),
    }
}

#[test]
fn a_binding_that_is_not_a_row_major_view_of_its_own_bytes_is_refused() {
    let placement = sample();
    let name = "dp0-pp1-ep0-tp0";
    let good = binding(&placement, name, 1 << 20);
    placement.check_binding(&good).unwrap();
    let at = |tensor: &str| {
        let of = |own: &BindingFragment| {
            placement.part(name).unwrap().fragments().iter().any(|fragment| {
                fragment.placement_fragment_id == own.placement_fragment_id && fragment.tensor_id() == tensor
            })
        };
        good.fragments.iter().position(of).unwrap()
    };
    let (odd, scale) = (at("odd"), at("scale"));
    type Change<'a> = (&'a dyn Fn(&mut RuntimeBinding), &'a str, &'a str);
    let cases: [Change<'_>; 17] = [
        (&|b| b.revision = "x".into(), "binding.revision", "expected \"main\""),
        (&|b| b.placement_id = "x".into(), "binding.placement_id", "expected"),
        (&|b| b.placement_digest = Digest::of(b""), "binding.placement_digest", "expected"),
        (&|b| b.participant_id = "x".into(), "binding.participant_id", "not in the placement"),
        (&|b| b.participant_id = "dp0-pp0-ep0-tp0".into(), "binding.fragments[", "no fragment of participant"),
        (&|b| b.lease_id = String::new(), "binding.lease_id", "empty"),
        (&|b| drop(b.fragments.remove(odd)), "binding.fragments", "\"odd\" is not bound"),
        (&|b| b.fragments.push(b.fragments[odd].clone()), "binding.fragments[4]", "\"odd\" is bound twice"),
        (&|b| b.fragments[odd].nbytes -= 1, "binding.fragments", "expected 36"),
        (&|b| b.fragments[odd].itemsize = 2, "binding.fragments", "expected 4"),
        (&|b| b.fragments[odd].local_shape = vec![9], "binding.fragments", "expected [3, 3]"),
        (&|b| b.fragments[odd].strides = vec![4, 12], "binding.fragments", "not row-major in dimension 0"),
        (&|b| b.fragments[odd].strides = vec![12, -4], "binding.fragments", "not row-major in dimension 1"),
        (&|b| b.fragments[odd].address = 0, "binding.fragments", "no address"),
        (&|b| b.fragments[odd].storage_offset = 4, "binding.fragments", "make"),
        (&|b| b.fragments[odd].storage_nbytes -= 1, "binding.fragments", "outside the allocation"),
        (&|b| b.fragments[odd].storage_nbytes = u64::MAX, "binding.fragments", "64 bits"),
    ];
    for (change, path, reason) in cases {
        let mut bad = good.clone();
        change(&mut bad);
        let error = placement.check_binding(&bad).unwrap_err();
        assert!(error.path.starts_with(path) && error.reason.contains(reason), "{error}");
    }
    let mut bad = good.clone();
    let own = &mut bad.fragments[scale];
    (own.address, own.storage_address) = (good.fragments[odd].address + 35, good.fragments[odd].address + 35);
    let error = placement.check_binding(&bad).unwrap_err();
    assert!(error.reason.contains("\"odd\"") && error.reason.contains("\"scale\""), "{error}");
    own_by_another_worker(&placement, bad, scale);
}

/// The same address in another process, or on another device, is another byte.
fn own_by_another_worker(placement: &Placement, mut binding: RuntimeBinding, at: usize) {
    binding.fragments[at].device = "cuda:0".into();
    placement.check_binding(&binding).unwrap();
}

#[test]
fn tied_tensors_may_share_one_range_and_others_may_not() {
    let axes = [Split { kind: TP, dim: 0 }];
    let (a, b) = (tensor("a", &[2, 2], &axes), tensor("b", &[2, 2], &axes));
    let build = |aliases: &[&str]| {
        let topology = ParallelTopology::grid(AxisSizes::default()).unwrap();
        let own = [&a, &b].map(|one| fragment(one, &[0, 0], &[2, 2], tp(0), aliases));
        let part =
            PlacementPart::new(identity(), topology.topology_id(), topology.participants()[0].clone(), own.to_vec());
        Placement::assemble(identity(), topology, vec![part.unwrap()]).unwrap()
    };
    let share = |placement: &Placement| {
        let mut binding = binding(placement, "dp0-pp0-ep0-tp0", 4096);
        for own in &mut binding.fragments {
            (own.address, own.storage_address) = (4096, 4096);
        }
        placement.check_bindings(&[binding])
    };
    share(&build(&["a", "b"])).unwrap();
    assert!(share(&build(&[])).unwrap_err().reason.contains("\"a\""));
}

#[test]
fn every_participant_that_holds_anything_is_bound_once() {
    let placement = sample();
    let all: Vec<_> = placement
        .parts()
        .iter()
        .enumerate()
        .map(|(at, part)| binding(&placement, &part.participant().participant_id, (1 + at as u64) << 20))
        .collect();
    placement.check_bindings(&all).unwrap();
    assert!(placement.check_bindings(&all[1..]).unwrap_err().reason.contains("\"dp0-pp0-ep0-tp0\" holds fragments"));
    let twice = [all.clone(), vec![all[0].clone()]].concat();
    assert!(placement.check_bindings(&twice).unwrap_err().reason.contains("bound twice"));
}

proptest! {
    #[test]
    fn every_placement_made_from_axes_reads_back(
        shapes in prop::collection::btree_map("[a-zé]{1,6}", prop::collection::vec(0_u64..7, 2..4), 1..5),
        dp in 1_u32..3, ep in 1_u32..4, tp in 1_u32..4,
    ) {
        let tensors: Vec<_> = shapes
            .iter()
            .map(|(name, shape)| tensor(name, shape, &[Replicated { kind: DP }, Split { kind: EP, dim: 0 }, Split { kind: TP, dim: 1 }]))
            .collect();
        let topology = ParallelTopology::grid(AxisSizes { dp, ep, tp, pp: 1 }).unwrap();
        let placement = Placement::from_axes(identity(), topology, &tensors, |_, _| true).unwrap();
        let bytes = placement.to_canonical_bytes();
        prop_assert_eq!(&Placement::parse(&bytes).unwrap(), &placement);
        for part in placement.parts() {
            prop_assert_eq!(&PlacementPart::parse(&part.to_canonical_bytes()).unwrap(), part);
        }
    }

    #[test]
    fn no_flipped_byte_is_overlooked_and_none_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let good = include_bytes!("goldens/placement.json").to_vec();
        let at = at.index(good.len());
        let mut bad = good.clone();
        bad[at] = byte;
        prop_assert_eq!(Placement::parse(&bad).is_ok(), bad == good);
    }

    #[test]
    fn no_truncation_is_a_placement(at in any::<prop::sample::Index>()) {
        let good = include_bytes!("goldens/placement.json");
        prop_assert!(Placement::parse(&good[..at.index(good.len())]).is_err());
    }
}
