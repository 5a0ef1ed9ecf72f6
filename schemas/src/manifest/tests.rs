//! The manifest as a whole: golden documents, hostile documents, and any model that can be planned.

use proptest::prelude::*;

use super::*;

fn identity() -> RevisionIdentity {
    RevisionIdentity::new("default", "prod", "tiny ü", "main", 3).unwrap()
}

fn tensor(name: &str, shape: &[u64]) -> PlannedTensor {
    Tensor::plain(name, "F32", 4, shape.to_vec()).into()
}

/// Two tied tensors, a split one, a scalar, an empty one and a file.
fn sample() -> Manifest {
    let tied = PlannedTensor { aliases: vec!["embed".into()], ..tensor("lm_head", &[2, 3]) };
    let mut split = tensor("layers.0.w", &[4, 2]);
    split.tensor.parallel_axes =
        vec![ParallelAxis::Replicated { kind: AxisKind::Dp }, ParallelAxis::Split { kind: AxisKind::Tp, dim: 0 }];
    split.tensor.shard_dims = vec![0];
    split.tensor.layer_id = Some(0);
    split.fragments = vec![(vec![2, 0], vec![2, 2]), (vec![0, 0], vec![2, 2])];
    let tensors = vec![split, tied, tensor("scale", &[]), tensor("empty", &[0, 5])];
    let plan =
        ManifestPlan::new(&identity(), tensors, vec![("tokenizer/vocab.txt".into(), 11), ("config.json".into(), 2)])
            .unwrap();
    assert_eq!(plan.extents(), [24, 0, 272, 4, 2, 11]);
    plan.seal(&[1, 2, 3, 4, 5, 0xdead_beef]).unwrap()
}

#[test]
fn the_golden_document_of_version_2_is_byte_identical() {
    let golden = include_bytes!("goldens/manifest-v2.json");
    assert_eq!(String::from_utf8(sample().to_canonical_bytes()).unwrap(), std::str::from_utf8(golden).unwrap());
    let parsed = Manifest::parse(golden).unwrap();
    assert_eq!(parsed, sample());
    assert_eq!(parsed.sha256(), Digest::of(golden));
}

#[test]
fn the_digests_of_the_golden_document_do_not_change() {
    let manifest = sample();
    let reference = manifest.manifest_ref(&identity()).unwrap();
    let digests = format!(
        "sha256 {}\nplacement {}\npayload_keys {}\naffinity {}\n",
        reference.sha256,
        manifest.placement_digest(),
        reference.payload_keys_sha256,
        reference.affinity_digest
    );
    assert_eq!(digests, include_str!("goldens/manifest-v2.digests"));
    assert_eq!(
        (reference.payload_count, reference.affinity_count, reference.logical_bytes),
        (6, 6, 24 + 32 + 4 + 2 + 11)
    );
    assert_eq!(
        reference.affinity_digest,
        affinity_digest(&[
            vec!["embed", "lm_head"],
            vec!["empty"],
            vec!["layers.0.w"],
            vec!["scale"],
            vec!["", "config.json"],
            vec!["", "tokenizer/vocab.txt"],
        ])
    );
}

#[test]
fn the_golden_document_of_version_1_is_read_but_can_not_be_published() {
    let golden = include_bytes!("goldens/manifest-v1.json");
    let manifest = Manifest::parse(golden).unwrap();
    assert_eq!(manifest.version(), 1);
    assert_eq!(manifest.created_at(), Some("2026-01-02T03:04:05Z"));
    assert_eq!(manifest.to_canonical_bytes(), golden);
    assert_eq!(manifest.fragments_of("b").count(), 1);
    assert!(manifest.affinity_index().is_empty());
    let identity = RevisionIdentity::new("default", "n", "m", "r", 7).unwrap();
    assert!(manifest.manifest_ref(&identity).unwrap_err().reason.contains("checksums"));
}

#[test]
fn checksums_change_the_identity_but_not_the_placement() {
    let plan = || ManifestPlan::new(&identity(), vec![tensor("a", &[2])], vec![]).unwrap();
    let (one, two) = (plan().seal(&[1]).unwrap(), plan().seal(&[2]).unwrap());
    assert_ne!(one.sha256(), two.sha256());
    assert_eq!(one.placement_digest(), two.placement_digest());
    assert_eq!(one.placement_digest(), plan().placement_digest());
    assert!(plan().seal(&[]).is_err());
}

#[test]
fn a_tied_tensor_is_stored_once_and_found_under_both_names() {
    let manifest = sample();
    let fragments = |name: &str| manifest.fragments_of(name).map(|fragment| fragment.unit).collect::<Vec<_>>();
    assert_eq!(fragments("embed"), [0]);
    assert_eq!(fragments("lm_head"), [0]);
    assert_eq!(fragments("layers.0.w"), [2, 2]);
    assert_eq!(fragments("nobody"), [0_u32; 0]);
    assert_eq!(manifest.tensor("lm_head").unwrap().global_shape, [2, 3]);
    assert_eq!(manifest.file("config.json").unwrap().unit, 4);
}

#[test]
fn a_manifest_of_another_revision_is_refused_by_the_field_that_differs() {
    let other = RevisionIdentity::new("other", "prod", "tiny ü", "main", 3).unwrap();
    assert_eq!(sample().manifest_ref(&other).unwrap_err().path, "group_id");
    let other = identity().lineage().generation(4).unwrap();
    assert_eq!(sample().manifest_ref(&other).unwrap_err().path, "weight_generation");
}

/// Replaces the first `from` in the golden document.
fn broken(from: &str, to: &str) -> String {
    let golden = String::from_utf8(sample().to_canonical_bytes()).unwrap();
    assert!(golden.contains(from), "{from}");
    golden.replacen(from, to, 1)
}

#[test]
fn a_document_with_one_wrong_field_is_refused_with_the_path_of_the_field() {
    let cases = [
        ("\"dtype\":\"F32\"", "\"dtype\": \"F32\"", "tensors[0].dtype", "white space"),
        ("\"dtype\":\"F32\"", "\"color\":1,\"dtype\":\"F32\"", "tensors[0]", "unknown field \"color\""),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"dtype\":\"F32\"", "tensors[0]", "twice"),
        ("\"dtype\":\"F32\",", "", "tensors[0]", "\"dtype\" is missing"),
        ("\"itemsize\":4", "\"itemsize\":4.0", "tensors[0].itemsize", "whole number"),
        ("\"itemsize\":4", "\"itemsize\":4e0", "tensors[0].itemsize", "whole number"),
        ("\"itemsize\":4", "\"itemsize\":04", "tensors[0].itemsize", "leading zero"),
        ("\"itemsize\":4", "\"itemsize\":-4", "tensors[0].itemsize", "negative"),
        ("\"itemsize\":4", "\"itemsize\":true", "tensors[0].itemsize", "true"),
        ("\"itemsize\":4", "\"itemsize\":NaN", "tensors[0].itemsize", "NaN"),
        ("\"itemsize\":4", "\"itemsize\":\"4\"", "tensors[0].itemsize", "a string"),
        ("\"itemsize\":4", "\"itemsize\":99999999999999999999", "tensors[0].itemsize", "64 bits"),
        ("\"itemsize\":4", "\"itemsize\":0", "tensors[0].itemsize", "at least 1"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"\"", "tensors[0].dtype", "empty"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F\\u00332\"", "tensors[0].dtype", "escape"),
        ("\"resource_kind\":\"model_weight\"", "\"resource_kind\":\"kv\"", "resource_kind", "model_weight"),
        ("\"version\":2", "\"version\":3", "version", "expected 2"),
        ("\"weight_generation\":3", "\"weight_generation\":4", "manifest_key", "expected"),
        ("\"weight_generation\":3}", "\"weight_generation\":3} ", "document", "after its end"),
        ("\"group_id\":\"weight:", "\"group_id\":\"wait:", "group_id", "weight:"),
        ("\"shard_dims\":[0]", "\"shard_dims\":[1]", "tensors[2].parallel_axes", "shard_dims"),
        ("\"shard_dims\":[0]", "\"shard_dims\":[0,0]", "tensors[2].shard_dims", "ascend"),
        ("\"shard_dims\":[0]", "\"shard_dims\":[2]", "tensors[2].shard_dims", "rank"),
        ("\"kind\":\"dp\"", "\"kind\":\"xp\"", "tensors[2].parallel_axes[0].kind", "xp"),
        ("\"kind\":\"dp\"", "\"kind\":\"tp\"", "tensors[2].parallel_axes", "unique"),
        ("\"semantics\":\"replicated\"", "\"semantics\":\"split\"", "tensors[2].parallel_axes[0].semantics", "dim"),
        ("\"dim\":0,\"kind\":\"tp\"", "\"dim\":0,\"kind\":\"pp\"", "tensors[2].parallel_axes", "can not split"),
        ("\"global_offset\":[2,0]", "\"global_offset\":[1,0]", "fragments[3].global_offset", "overlaps fragments[2]"),
        ("\"global_offset\":[2,0]", "\"global_offset\":[3,0]", "fragments[3].local_shape", "outside"),
        ("\"global_shape\":[4,2]", "\"global_shape\":[5,2]", "tensors[2]", "2 elements"),
        ("\"global_offset\":[2,0]", "\"global_offset\":[2]", "fragments[3].global_offset", "dimensions"),
        ("\"nbytes\":16", "\"nbytes\":15", "fragments[2].nbytes", "expected 16"),
        ("\"object_offset\":256", "\"object_offset\":16", "fragments[3].object_offset", "256"),
        ("\"object_offset\":256", "\"object_offset\":0", "units[2].extent_bytes", "overlap"),
        ("\"extent_bytes\":272", "\"extent_bytes\":273", "units[2].extent_bytes", "expected 272"),
        ("\"logical_bytes\":32", "\"logical_bytes\":33", "units[2].logical_bytes", "expected 32"),
        ("\"crc64\":\"00000000deadbeef\"", "\"crc64\":\"DEADBEEF\"", "units[5].crc64", "hex"),
        ("\"aliases\":[\"embed\",\"lm_head\"]", "\"aliases\":[]", "tensors[3]", "no fragment stands for \"lm_head\""),
        ("\"aliases\":[\"embed\",\"lm_head\"]", "\"aliases\":[\"embed\"]", "fragments[0].aliases", "two names"),
        (
            "\"aliases\":[\"embed\",\"lm_head\"]",
            "\"aliases\":[\"embed\",\"scale\"]",
            "fragments[0].aliases",
            "descriptor",
        ),
        ("\"path\":\"config.json\"", "\"path\":\"../config.json\"", "files[0].path", "leave the folder"),
        ("\"path\":\"config.json\"", "\"path\":\"tokenizer\"", "files[1].path", "is a file"),
        ("\"path\":\"config.json\"", "\"path\":\"x\"", "files[1]", "order"),
        ("\"path\":\"config.json\"", "\"path\":\"a.json\"", "units[4].affinity_id", "from its members"),
        (
            "\"tensor_id\":\"scale\",\"unit\"",
            "\"tensor_id\":\"skale\",\"unit\"",
            "fragments[4].tensor_id",
            "not in tensors",
        ),
        ("\"tensor_id\":\"empty\"}", "\"tensor_id\":\"embed\"}", "tensors[1].tensor_id", "twice"),
    ];
    for (from, to, path, reason) in cases {
        let error = Manifest::parse(broken(from, to).as_bytes()).expect_err(to);
        assert_eq!(error.path, path, "{to}: {error}");
        assert!(error.reason.contains(reason), "{to}: {error}");
    }
}

#[test]
fn text_that_is_no_manifest_is_refused() {
    for text in ["", "{}", "[]", "null", "{\"files\":[", "\u{feff}{}", "{\"created_at\":\"x\"}"] {
        assert!(Manifest::parse(text.as_bytes()).is_err(), "{text}");
    }
    assert!(Manifest::parse(b"{\"files\":[\xff]}").unwrap_err().reason.contains("UTF-8"));
}

#[test]
fn names_that_no_unit_could_have_are_refused() {
    let plan = |name: &str| ManifestPlan::new(&identity(), vec![tensor(name, &[1])], vec![]);
    for wrong in ["", "a\0b", &"x".repeat(4097)] {
        assert!(plan(wrong).is_err(), "{wrong:?}");
    }
    let file = |path: &str| ManifestPlan::new(&identity(), vec![], vec![(path.to_owned(), 1)]);
    for wrong in ["", "/etc/passwd", "a//b", "./a", "a/..", "a/", "a\0"] {
        assert!(file(wrong).is_err(), "{wrong:?}");
    }
    let twice = ManifestPlan::new(&identity(), vec![tensor("a", &[1]), tensor("a", &[1])], vec![]);
    assert!(twice.unwrap_err().reason.contains("twice"));
    let huge = ManifestPlan::new(&identity(), vec![tensor("a", &[u64::MAX, 2])], vec![]);
    assert!(huge.is_err());
}

#[test]
fn a_hundred_thousand_tensors_parse() {
    let tensors = (0..100_000)
        .map(|n| tensor(&format!("model.layers.{}.mlp.experts.{}.down_proj.weight", n / 100, n % 100), &[64, 32]))
        .collect();
    let plan = ManifestPlan::new(&identity(), tensors, vec![]).unwrap();
    let checksums: Vec<u64> = (0..100_000).collect();
    let bytes = plan.seal(&checksums).unwrap().to_canonical_bytes();
    let started = std::time::Instant::now();
    let manifest = Manifest::parse(&bytes).unwrap();
    println!("{} bytes, {} tensors: {:?}", bytes.len(), manifest.tensors().len(), started.elapsed());
    assert_eq!(manifest.affinity_index().len(), 100_000);
}

fn any_tensor() -> impl Strategy<Value = (String, Vec<u64>, u64)> {
    ("[a-zé\\\\\"\n.]{1,12}", prop::collection::vec(0_u64..5, 0..4), prop_oneof![Just(1_u64), Just(2), Just(8)])
}

proptest! {
    #[test]
    fn every_planned_model_reads_back_from_its_canonical_bytes(
        tensors in prop::collection::btree_map("[a-zé\\\\\"\n.]{1,12}", any_tensor(), 0..12),
        files in prop::collection::btree_map("[a-z]{1,8}\\.[a-zé]{1,3}", 0_u64..9000, 0..4),
    ) {
        let planned: Vec<PlannedTensor> = tensors
            .iter()
            .map(|(name, (_, shape, itemsize))| Tensor::plain(name, "X", *itemsize, shape.clone()).into())
            .collect();
        let units = planned.len() + files.len();
        let mut reversed = planned.clone();
        reversed.reverse();
        let files: Vec<_> = files.into_iter().collect();
        let plan = ManifestPlan::new(&identity(), planned, files.clone()).unwrap();
        prop_assert_eq!(&plan, &ManifestPlan::new(&identity(), reversed, files).unwrap());
        let checksums: Vec<u64> = (0..units as u64).collect();
        let manifest = plan.seal(&checksums).unwrap();
        let bytes = manifest.to_canonical_bytes();
        prop_assert_eq!(&Manifest::parse(&bytes).unwrap(), &manifest);
        let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        prop_assert_eq!(serde_json::to_vec(&value).unwrap(), bytes, "the document is not canonical JSON");
    }

    #[test]
    fn no_flipped_byte_is_overlooked_and_none_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let good = sample().to_canonical_bytes();
        let mut bad = good.clone();
        let at = at.index(bad.len());
        bad[at] = byte;
        if let Ok(parsed) = Manifest::parse(&bad) {
            prop_assert_eq!(parsed.to_canonical_bytes(), bad);
        }
    }

    #[test]
    fn no_truncation_is_a_manifest(at in any::<prop::sample::Index>()) {
        let good = sample().to_canonical_bytes();
        prop_assert!(Manifest::parse(&good[..at.index(good.len())]).is_err());
    }
}
