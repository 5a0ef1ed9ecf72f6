//! Checkpoints through a plan and back onto the disk, without a node in between; and everything that is refused.

use std::fs;
use std::os::unix::fs::{FileExt, symlink};

use ::safetensors::Dtype;
use ::safetensors::tensor::TensorView;
use ballast_schemas::manifest::Manifest;
use ballast_schemas::{BallastError, RevisionIdentity};
use proptest::prelude::*;

use super::export::bytes_by_path;
use super::*;
use crate::source::UnitSource;

fn read(unit: &UnitSource) -> Vec<u8> {
    match &unit.data {
        Data::Bytes(bytes) => bytes.to_vec(),
        Data::File { file, offset } => {
            let mut bytes = vec![0; unit.bytes as usize];
            file.open().unwrap().read_exact_at(&mut bytes, *offset).unwrap();
            bytes
        }
        Data::Later | Data::Base { .. } => panic!("no bytes for {}", unit.name),
    }
}

fn import(source: Source) -> (Manifest, Vec<Vec<u8>>) {
    let identity = RevisionIdentity::new("default", "default", "m", "main", 1).unwrap();
    let (plan, units) = source.plan(&identity).unwrap();
    let checksums = vec![0; units.len()];
    (plan.seal(&checksums).unwrap(), units.iter().map(read).collect())
}

fn stage(manifest: &Manifest, units: &[Vec<u8>], target: &Path, overwrite: bool) -> Result<Staging, ExportError> {
    let record = manifest.file(RECORD_PATH).map(|file| units[file.unit as usize].as_slice());
    let export = Export::new(manifest, record)?;
    let staging = Staging::new(&export, target, overwrite)?;
    for (unit, bytes) in units.iter().enumerate() {
        for (n, piece) in bytes.chunks(5).enumerate() {
            staging.write(export.places(unit as u32), n as u64 * 5, piece)?;
        }
    }
    Ok(staging)
}

fn export(manifest: &Manifest, units: &[Vec<u8>], target: &Path, overwrite: bool) -> Result<Vec<PathBuf>, ExportError> {
    stage(manifest, units, target, overwrite)?.publish()
}

fn model(tensors: &[(&str, Dtype, Vec<usize>)], seed: u8) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, shape)| {
            (0..shape.iter().product::<usize>() * dtype.bitsize() / 8).map(|n| seed.wrapping_add(n as u8)).collect()
        })
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, dtype, shape), bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    ::safetensors::serialize(views, None).unwrap()
}

/// A folder with an index, two shards, a config and a nested tokenizer file.
fn sharded() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    write("model-1.safetensors", &model(&[("a", Dtype::F32, vec![2, 3]), ("b", Dtype::BF16, vec![])], 1));
    write("model-2.safetensors", &model(&[("c", Dtype::F8_E4M3, vec![7]), ("e", Dtype::F32, vec![3, 0])], 9));
    let index = r#"{"metadata":{},"weight_map":{"a":"model-1.safetensors","b":"model-1.safetensors","c":"model-2.safetensors","e":"model-2.safetensors"}}"#;
    write("model.safetensors.index.json", index.as_bytes());
    write("config.json", b"{}");
    write("empty.txt", b"");
    fs::create_dir(folder.path().join("tokenizer")).unwrap();
    write("tokenizer/vocab.txt", "ü\n".as_bytes());
    folder
}

#[test]
fn a_sharded_folder_comes_back_byte_for_byte() {
    let folder = sharded();
    let source = open(folder.path()).unwrap();
    assert_eq!((source.tensor_count(), source.file_count()), (4, 4));
    let (manifest, units) = import(source);
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("deep/out");
    let written = export(&manifest, &units, &out, false).unwrap();
    assert_eq!(written.len(), 6);
    assert_eq!(bytes_by_path(&out), bytes_by_path(folder.path()));
    assert_eq!(bytes_by_path(scratch.path()).len(), 6, "nothing is left of the staging folder");
}

#[test]
fn a_single_file_comes_back_under_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("my model.safetensors");
    fs::write(&file, model(&[("w", Dtype::I64, vec![3])], 0)).unwrap();
    fs::write(folder.path().join("other.txt"), b"stays").unwrap();
    let (manifest, units) = import(open(&file).unwrap());
    let out = tempfile::tempdir().unwrap();
    export(&manifest, &units, out.path(), false).unwrap();
    assert_eq!(fs::read(out.path().join("my model.safetensors")).unwrap(), fs::read(&file).unwrap());
    assert_eq!(bytes_by_path(out.path()).len(), 1);
}

#[test]
fn tensors_that_never_were_a_file_come_as_one_that_the_formats_library_reads() {
    let tensor = |name: &str, aliases: &[&str]| crate::TensorSource {
        name: name.into(),
        dtype: "F32".into(),
        shape: vec![2],
        aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
        data: crate::TensorData::Bytes(bytes::Bytes::from_static(b"12345678")),
    };
    let (manifest, units) = import(Source::from_tensors(vec![tensor("w", &["tied"]), tensor("x", &[])]).unwrap());
    assert_eq!(units.len(), 2);
    let out = tempfile::tempdir().unwrap();
    export(&manifest, &units, out.path(), false).unwrap();
    let file = fs::read(out.path().join("model.safetensors")).unwrap();
    let read = ::safetensors::SafeTensors::deserialize(&file).unwrap();
    for name in ["w", "tied", "x"] {
        assert_eq!(read.tensor(name).unwrap().data(), b"12345678", "{name}");
    }
}

fn refuse(path: &Path) -> String {
    let error: BallastError = open(path).unwrap_err().into();
    assert_eq!(error.code, ballast_schemas::ErrorCode::InvalidArgument);
    error.message
}

#[test]
fn a_file_that_is_missing_cut_or_foreign_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    assert!(refuse(&path).contains("does not exist"));
    let good = model(&[("w", Dtype::F32, vec![4])], 0);
    let cases: [(Vec<u8>, &str); 6] = [
        (good[..good.len() - 1].to_vec(), "truncated: the header describes"),
        (good[..20].to_vec(), "but only 12 bytes follow"),
        (good[..5].to_vec(), "not even the 8"),
        ([&good[..], b"x"].concat(), "1 bytes follow the last tensor"),
        (b"PK\x03\x04 this is a zip archive".to_vec(), "another format"),
        ([&2_u64.to_le_bytes()[..], b"{\xff"].concat(), "not UTF-8 from byte 9"),
    ];
    for (bytes, word) in cases {
        fs::write(&path, bytes).unwrap();
        let reason = refuse(&path);
        assert!(reason.contains(word) && reason.contains("x.safetensors"), "{reason}");
    }
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused_by_tensor_and_shard() {
    let index = |map: &str| {
        let folder = sharded();
        fs::write(folder.path().join("model.safetensors.index.json"), format!(r#"{{"weight_map":{map}}}"#)).unwrap();
        refuse(folder.path())
    };
    assert!(
        index(r#"{"a":"model-2.safetensors","c":"model-1.safetensors"}"#)
            .contains("maps tensor \"a\" to \"model-2.safetensors\", which lacks it; \"model-1.safetensors\" has it")
    );
    assert!(index(r#"{"nobody":"model-1.safetensors"}"#).contains("maps tensor \"nobody\""));
    assert!(
        index(r#"{"a":"model-3.safetensors"}"#)
            .contains("names the shard \"model-3.safetensors\", which is not in the folder")
    );
    assert!(index(r#"{"a":"../../etc/passwd"}"#).contains("leave the folder"));
    assert!(index(r#"{"a":"model-1.safetensors","a":"model-2.safetensors"}"#).contains("twice"));
    let folder = sharded();
    fs::copy(folder.path().join("model-1.safetensors"), folder.path().join("model-2.safetensors")).unwrap();
    assert!(refuse(folder.path()).contains("is also in \"model-1.safetensors\""));
}

#[test]
fn a_folder_without_a_model_or_with_several_says_what_to_name() {
    let folder = tempfile::tempdir().unwrap();
    assert!(refuse(folder.path()).contains("no model.safetensors"));
    let bytes = model(&[("w", Dtype::U8, vec![1])], 0);
    fs::write(folder.path().join("a.safetensors"), &bytes).unwrap();
    assert_eq!(open(folder.path()).unwrap().tensor_count(), 1);
    fs::write(folder.path().join("b.safetensors"), &bytes).unwrap();
    assert!(refuse(folder.path()).contains("a.safetensors, b.safetensors; name one"));
    fs::write(folder.path().join("model.safetensors"), &bytes).unwrap();
    let source = open(folder.path()).unwrap();
    assert_eq!((source.tensor_count(), source.file_count()), (1, 2));
    fs::create_dir(folder.path().join(".ballast")).unwrap();
    assert!(refuse(folder.path()).contains("reserved"));
}

#[test]
fn links_are_followed_inside_the_folder_and_refused_outside() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), b"x").unwrap();
    let folder = sharded();
    symlink("config.json", folder.path().join("link.json")).unwrap();
    symlink("tokenizer", folder.path().join("linked")).unwrap();
    let (manifest, _) = import(open(folder.path()).unwrap());
    assert!(manifest.file("link.json").is_some() && manifest.file("linked/vocab.txt").is_some());
    symlink("..", folder.path().join("tokenizer/up")).unwrap();
    assert!(refuse(folder.path()).contains("lies in"));
    fs::remove_file(folder.path().join("tokenizer/up")).unwrap();
    symlink(outside.path().join("secret"), folder.path().join("out")).unwrap();
    assert!(refuse(folder.path()).contains("outside the folder"));
}

#[test]
fn a_snapshot_of_the_hugging_face_cache_is_read_through_its_blobs() {
    let cache = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (cache.path().join("models--x/blobs"), cache.path().join("models--x/snapshots/abc"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(blobs.join("1234"), model(&[("w", Dtype::U8, vec![3])], 0)).unwrap();
    symlink("../../blobs/1234", snapshot.join("model.safetensors")).unwrap();
    assert_eq!(open(&snapshot).unwrap().tensor_count(), 1);
}

#[test]
fn what_exists_is_not_overwritten_unless_asked_and_never_through_a_link() {
    let folder = sharded();
    let (manifest, units) = import(open(folder.path()).unwrap());
    let out = tempfile::tempdir().unwrap();
    fs::write(out.path().join("config.json"), b"mine").unwrap();
    let error = export(&manifest, &units, out.path(), false).unwrap_err();
    assert!(matches!(&error, ExportError::Exists { path } if path.ends_with("config.json")), "{error}");
    assert_eq!(bytes_by_path(out.path()).len(), 1);
    export(&manifest, &units, out.path(), true).unwrap();
    assert_eq!(bytes_by_path(out.path()), bytes_by_path(folder.path()));

    let elsewhere = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    symlink(elsewhere.path(), out.path().join("tokenizer")).unwrap();
    let error = export(&manifest, &units, out.path(), true).unwrap_err();
    assert!(matches!(error, ExportError::NotAFolder { .. }), "{error}");
    assert!(bytes_by_path(elsewhere.path()).is_empty());

    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(matches!(export(&manifest, &units, file.path(), true), Err(ExportError::Exists { .. })));
}

#[test]
fn an_export_that_is_given_up_leaves_nothing() {
    let (manifest, units) = import(open(sharded().path()).unwrap());
    let scratch = tempfile::tempdir().unwrap();
    drop(stage(&manifest, &units, &scratch.path().join("new"), false).unwrap());
    drop(stage(&manifest, &units, scratch.path(), false).unwrap());
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn a_record_that_contradicts_the_manifest_is_refused() {
    let (manifest, units) = import(open(sharded().path()).unwrap());
    let good: Record = Record::from_bytes(&units[manifest.file(RECORD_PATH).unwrap().unit as usize]).unwrap();
    let refuse = |change: &dyn Fn(&mut Record)| {
        let mut record = good.clone();
        change(&mut record);
        Export::new(&manifest, Some(&record.to_bytes())).unwrap_err().to_string()
    };
    assert!(refuse(&|record| record.files[0].path = "../x".into()).contains("leave the folder"));
    assert!(refuse(&|record| record.files[0].path = "config.json".into()).contains("written twice"));
    assert!(refuse(&|record| record.files[0].path = "config.json/x".into()).contains("file and a folder"));
    assert!(refuse(&|record| record.files.truncate(1)).contains("no recorded file has tensor \"c\""));
    assert!(refuse(&|record| record.files[1] = record.files[0].clone()).contains("two files"));
    assert!(refuse(&|record| record.files[0].header = "{}".into()).contains("no recorded file"));
    assert!(
        refuse(&|record| record.files[0].header = record.files[0].header.replace("\"a\"", "\"z\""))
            .contains("\"z\" is missing")
    );
    assert!(Export::new(&manifest, Some(b"{}")).is_err());
}

fn any_dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(vec![Dtype::BOOL, Dtype::U8, Dtype::F8_E4M3, Dtype::BF16, Dtype::F32, Dtype::I64, Dtype::C64])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_model_comes_back_byte_for_byte(
        shards in prop::collection::vec(
            prop::collection::btree_map("[a-z.\"\\\\ü]{1,8}", (any_dtype(), prop::collection::vec(0_usize..4, 0..4)), 0..6), 1..4),
        extras in prop::collection::btree_map("[a-z]{1,6}\\.(json|txt)", prop::collection::vec(any::<u8>(), 0..40), 0..4),
        seed in any::<u8>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut map = serde_json::Map::new();
        for (n, shard) in shards.iter().enumerate() {
            let names: Vec<String> = shard.keys().map(|name| format!("{n}{name}")).collect();
            let tensors: Vec<_> = names.iter().zip(shard.values()).map(|(name, (dtype, shape))| (name.as_str(), *dtype, shape.clone())).collect();
            let file = format!("part-{n}.safetensors");
            fs::write(folder.path().join(&file), model(&tensors, seed)).unwrap();
            for name in names {
                map.insert(name, file.clone().into());
            }
        }
        // A shard that no tensor names travels as an extra file.
        let index = serde_json::json!({"weight_map": map}).to_string();
        fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        for (name, bytes) in &extras {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        let (manifest, units) = import(open(folder.path()).unwrap());
        let out = folder.path().join("out");
        export(&manifest, &units, &out, false).unwrap();
        let mut expected = bytes_by_path(folder.path());
        expected.retain(|path, _| !path.starts_with("out/"));
        prop_assert_eq!(bytes_by_path(&out), expected);
    }

    #[test]
    fn no_flipped_byte_of_a_header_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let mut bytes = model(&[("a", Dtype::F32, vec![2]), ("b", Dtype::U8, vec![3])], 0);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        fs::write(&path, &bytes).unwrap();
        if let Ok(source) = open(&path) {
            let (manifest, units) = import(source);
            let out = folder.path().join("out");
            export(&manifest, &units, &out, false).unwrap();
            prop_assert_eq!(fs::read(out.join("x.safetensors")).unwrap(), bytes);
        }
    }
}
