//! Every decoder, and the fold itself, fed with damaged and with arbitrary input (`make fuzz`).
//!
//! A mutation fuzzer of our own: each input is a real encoding (recorded from a simulated cluster, golden files, values made
//! here) with some of it changed. Text of JSON is also changed by structure: a field gets the value that a field of that
//! name has elsewhere, so that commands stay well typed and speak of the same few identities. It is *not* guided by
//! coverage, and so finds what is near to real input. An input follows from its target, seed and number alone.
//!
//! What must hold: no panic, no more than [`MEMORY_BYTES_MAX`] of address space, no input that takes longer than
//! [`INPUT_SECONDS_MAX`]; and whatever commands the fold accepts, the state satisfies its invariants.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ballast_client::delta::{Members, SparseDelta};
use ballast_schemas::manifest::Manifest;
use ballast_schemas::placement::{Placement, PlacementPart};
use ballast_schemas::{
    AcquireLeaseRequest, BeginImportRequest, Bitmap, Command, CommandRecord, CommitImportRequest, Digest, Envelope,
    Event, IdentityRequest, InstanceId, JoinImportRequest, LineageKey, ListOperationsRequest, ListRequest, LogPosition,
    MigrateRequest, NodeHello, NodeInventory, NodeReply, NodeRequest, NodeStatus, ObjectRequest, OperationRequest,
    PartRequest, ParticipantId, ReleaseLeaseRequest, RemoveRequest, RenewLeaseRequest, RepairRequest, Request,
    SessionId, SessionRequest, StatusRequest, TokenClaims, TokenPart, TokenRight, UnitEffect, UnitRange,
    UpdatePolicyRequest, UpsertIdRequest, UpsertRequest, VerifyRequest, frame, object_head,
};
use ballast_transfer::TokenKey;
use ballast_workflows::{State, fold};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::sim::{self, Rng};

/// Address space that a process which decodes may take.
pub const MEMORY_BYTES_MAX: u64 = 2 << 30;
/// Longest time for one input.
pub const INPUT_SECONDS_MAX: u64 = 10;
/// Commands of one input to the fold.
const FOLDED_AT_ONCE: usize = 60;
/// The key that test tokens are signed with.
const KEY: [u8; 32] = [7; 32];

/// One decoder with real encodings of what it reads.
#[derive(Debug)]
pub struct Target {
    /// Its name on the command line.
    pub name: &'static str,
    corpus: Vec<Vec<u8>>,
    shape: Shape,
    run: fn(&[u8]) -> bool,
}

/// How inputs are changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Binary,
    Json,
    /// A JSON list of log entries.
    Entries,
}

/// One entry of the log as the fold's inputs write it.
#[derive(Serialize, Deserialize)]
struct Entry {
    unix_ns: u64,
    commands: Vec<CommandRecord>,
}

impl Target {
    /// Feeds one input; tells whether it was accepted.
    #[must_use]
    pub fn feed(&self, input: &[u8]) -> bool {
        (self.run)(input)
    }

    /// The real encodings.
    #[must_use]
    pub fn corpus(&self) -> &[Vec<u8>] {
        &self.corpus
    }
}

/// All targets and what their inputs are made of.
#[derive(Debug)]
pub struct Fuzzer {
    /// In alphabetical order.
    pub targets: Vec<Target>,
    /// Values by the name of their field.
    values: BTreeMap<String, Vec<Value>>,
    entries: Vec<Value>,
}

impl Default for Fuzzer {
    fn default() -> Self {
        Self::new()
    }
}

impl Fuzzer {
    /// Simulates a cluster for its log and collects the rest.
    ///
    /// # Panics
    /// When a real encoding is not accepted: then the fuzzer would test nothing.
    #[must_use]
    pub fn new() -> Self {
        let log = sim::record(7);
        let envelopes: Vec<Vec<u8>> = log.iter().map(|(_, bytes)| bytes.clone()).collect();
        let mut values = BTreeMap::new();
        let mut entries = Vec::new();
        let mut commands = Vec::new();
        let (mut state, mut states) = (State::default(), Vec::new());
        for (seq, (unix_ns, bytes)) in (1..).zip(&log) {
            let envelope = Envelope::decode(bytes).expect("a recorded envelope decodes");
            fold(&mut state, seq, *unix_ns, &envelope).expect("a recorded envelope folds");
            if seq % 50 == 1 {
                states.push(encode(&state));
            }
            commands.extend(envelope.commands().iter().map(|record| encode(&record.command)));
            let entry = to_value(&Entry { unix_ns: *unix_ns, commands: envelope.commands().to_vec() });
            collect(&entry, "", &mut values);
            entries.push(entry);
        }
        let bodies = request_bodies();
        bodies.iter().for_each(|body| collect(body, "", &mut values));
        let whole = entries.iter().take(FOLDED_AT_ONCE).cloned().collect();
        let mut targets = vec![
            Target { name: "command", corpus: commands, shape: Shape::Binary, run: |bytes| rmp::<Command>(bytes) },
            Target { name: "envelope", corpus: envelopes, shape: Shape::Binary, run: envelope },
            Target { name: "fold", corpus: vec![text(&Value::Array(whole))], shape: Shape::Entries, run: fold_entries },
            Target { name: "snapshot", corpus: states, shape: Shape::Binary, run: snapshot },
            Target { name: "request", corpus: bodies.iter().map(text).collect(), shape: Shape::Json, run: request },
        ];
        targets.extend(documents());
        targets.extend(messages());
        targets.sort_by_key(|target| target.name);
        for target in &targets {
            let accepted = target.corpus.iter().filter(|input| target.feed(input)).count();
            assert!(
                accepted > 0 && accepted == target.corpus.len(),
                "{}: {accepted} of {} are accepted",
                target.name,
                target.corpus.len()
            );
        }
        Self { targets, values, entries }
    }

    /// The input with this number.
    #[must_use]
    pub fn input(&self, target: &Target, seed: u64, number: u64) -> Vec<u8> {
        let rng = &mut Rng::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number));
        match target.shape {
            Shape::Entries => {
                let mut chosen = self.choose_entries(rng);
                for _ in 0..rng.between(0, 12) {
                    self.change_value(&mut chosen, "", rng);
                }
                text(&chosen)
            }
            Shape::Json if rng.below(2) == 0 => {
                let input = rng.pick(&target.corpus).cloned().unwrap_or_default();
                let Ok(mut value) = serde_json::from_slice(&input) else { return mutate(input, target, rng) };
                for _ in 0..rng.between(1, 4) {
                    self.change_value(&mut value, "", rng);
                }
                text(&value)
            }
            Shape::Json | Shape::Binary => mutate(rng.pick(&target.corpus).cloned().unwrap_or_default(), target, rng),
        }
    }

    /// The beginning of the recorded log, then entries of it that are left out, repeated and in the wrong order.
    fn choose_entries(&self, rng: &mut Rng) -> Value {
        let start = rng.between(1, 40) as usize;
        let mut chosen: Vec<Value> = self.entries.iter().take(start).cloned().collect();
        while chosen.len() < FOLDED_AT_ONCE {
            let at = match rng.below(3) {
                0 => rng.index(self.entries.len()),
                _ => (chosen.len() + rng.index(8)).min(self.entries.len() - 1),
            };
            chosen.push(self.entries[at].clone());
        }
        Value::Array(chosen)
    }

    /// Changes one value somewhere below, mostly to one that a field of that name has elsewhere.
    fn change_value(&self, value: &mut Value, name: &str, rng: &mut Rng) {
        match value {
            Value::Array(items) if !items.is_empty() => {
                let at = rng.index(items.len());
                match rng.below(12) {
                    0 => drop(items.remove(at)),
                    1 => items.push(items[at].clone()),
                    _ => self.change_value(&mut items[at], name, rng),
                }
            }
            Value::Object(fields) if !fields.is_empty() => {
                let at = rng.index(fields.len());
                let Some(key) = fields.keys().nth(at).cloned() else { return };
                match rng.below(20) {
                    0 => drop(fields.remove(&key)),
                    1 => drop(fields.insert(format!("{key}x"), Value::Null)),
                    _ => {
                        if let Some(field) = fields.get_mut(&key) {
                            self.change_value(field, &key, rng);
                        }
                    }
                }
            }
            leaf => {
                let known = self.values.get(name).and_then(|known| rng.pick(known));
                *leaf = match (rng.below(8), known) {
                    (0, _) => odd_value(rng),
                    (_, Some(known)) => known.clone(),
                    (_, None) => odd_value(rng),
                };
            }
        }
    }
}

fn odd_value(rng: &mut Rng) -> Value {
    let odd = [
        json!(0),
        json!(1),
        json!(u32::MAX),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(-1),
        json!(0.5),
        json!(1e300),
        json!(null),
        json!(true),
        json!([]),
        json!({}),
        json!(""),
        json!("a"),
        json!("\u{0}"),
        json!("../x"),
        json!("x".repeat(5000)),
    ];
    odd[rng.index(odd.len())].clone()
}

/// Changes bytes: flips, numbers at the edges of their range, parts that are cut, repeated or from another encoding.
fn mutate(mut input: Vec<u8>, target: &Target, rng: &mut Rng) -> Vec<u8> {
    const EDGES: [u8; 12] = [0, 1, 0x7f, 0x80, 0xff, 0xc0, 0xc1, 0xc6, 0xdb, 0xdd, 0xdf, 0xcf];
    for _ in 0..rng.between(1, 6) {
        let len = input.len();
        let (at, to) = (rng.index(len + 1), rng.index(len + 1));
        let range = at.min(to)..at.max(to).min(at.min(to) + 64);
        match rng.below(8) {
            0 if len > 0 => input[at.min(len - 1)] ^= 1 << rng.below(8),
            1 if len > 0 => input[at.min(len - 1)] = EDGES[rng.index(EDGES.len())],
            2 => drop(input.drain(range)),
            3 => {
                let part = input[range].to_vec();
                input.splice(at..at, part);
            }
            4 => input.truncate(at),
            5 => {
                let other = rng.pick(&target.corpus).cloned().unwrap_or_default();
                let from = rng.index(other.len() + 1);
                input.splice(at.., other[from..].iter().copied());
            }
            6 => {
                // A number, or the length of a list, text or map that is not there.
                let number = [rng.next(), u64::MAX, u32::MAX.into(), 0][rng.index(4)].to_be_bytes();
                let end = len.min(at + 4);
                input.splice(at..end, number[..4].iter().copied());
            }
            _ => {
                // Very deep nesting: arrays of one in MessagePack, brackets in JSON.
                let deep = if target.shape == Shape::Binary { 0x91 } else { b'[' };
                input.splice(at..at, std::iter::repeat_n(deep, rng.between(1, 100_000) as usize));
            }
        }
    }
    input
}

/// Every value below `value` by the name of its field.
fn collect(value: &Value, name: &str, values: &mut BTreeMap<String, Vec<Value>>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, name, values)),
        Value::Object(fields) => fields.iter().for_each(|(key, field)| collect(field, key, values)),
        leaf => {
            let known = values.entry(name.to_owned()).or_default();
            if known.len() < 64 && !known.contains(leaf) {
                known.push(leaf.clone());
            }
        }
    }
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    rmp_serde::to_vec_named(value).expect("a value of ours encodes")
}

fn to_value<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("a value of ours is JSON")
}

fn text(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn rmp<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> bool {
    ballast_schemas::from_messagepack::<T>(bytes).is_ok()
}

fn json_of<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> bool {
    serde_json::from_slice::<T>(bytes).is_ok()
}

/// As stored, and with a checksum that fits: otherwise nothing but the checksum would be tested.
fn envelope(bytes: &[u8]) -> bool {
    let whole = Envelope::decode(bytes).is_ok();
    let Some((header, body)) = bytes.split_at_checked(36) else { return whole };
    let sealed = [&header[..4], Digest::of(body).as_bytes(), body].concat();
    Envelope::decode(&sealed).is_ok() || whole
}

fn snapshot(bytes: &[u8]) -> bool {
    ballast_schemas::from_messagepack::<State>(bytes)
        .is_ok_and(|state| state.check_invariants().is_ok() && state.digest() == state.digest())
}

/// # Panics
/// When the state violates an invariant afterwards.
fn fold_entries(bytes: &[u8]) -> bool {
    let Ok(entries) = serde_json::from_slice::<Vec<Value>>(bytes) else { return false };
    let mut state = State::default();
    let mut folded = 0;
    for entry in entries {
        // An entry that is not well typed could not be in a log.
        let Ok(entry) = serde_json::from_value::<Entry>(entry) else { continue };
        let Ok((envelope, _)) = Envelope::seal(format!("e{folded}"), entry.commands) else { continue };
        let seq = state.log_seq().saturating_add(1);
        if fold(&mut state, seq, entry.unix_ns, &envelope).is_ok() {
            folded += 1;
        }
    }
    if let Err(violation) = state.check_invariants() {
        panic!("the fold accepted what it must not: {violation}");
    }
    folded > 0
}

/// The bodies of every verb.
fn request(bytes: &[u8]) -> bool {
    fn is<B: serde::de::DeserializeOwned>(bytes: &[u8]) -> bool {
        Request::<B>::from_json(bytes).is_ok()
    }
    let readers = [
        is::<BeginImportRequest>,
        is::<JoinImportRequest>,
        is::<PartRequest>,
        is::<CommitImportRequest>,
        is::<SessionRequest>,
        is::<AcquireLeaseRequest>,
        is::<RenewLeaseRequest>,
        is::<ReleaseLeaseRequest>,
        is::<IdentityRequest>,
        is::<ListRequest>,
        is::<UpdatePolicyRequest>,
        is::<MigrateRequest>,
        is::<RemoveRequest>,
        is::<UpsertRequest>,
        is::<UpsertIdRequest>,
        is::<OperationRequest>,
        is::<ListOperationsRequest>,
        is::<RepairRequest>,
        is::<VerifyRequest>,
        is::<StatusRequest>,
    ];
    // Every reader reads every body, whichever accepts it.
    readers.iter().filter(|read| read(bytes)).count() > 0
}

fn request_bodies() -> Vec<Value> {
    let which = json!({"namespace": "models", "resource_id": "m", "revision": "main", "weight_generation": 1});
    let next = json!({"namespace": "models", "resource_id": "m", "revision": "main", "weight_generation": 2});
    let instance = to_value(&instance());
    let policy = json!({"preferred_residency": "MIXED", "mixed_hot_ratio": 0.25, "migration_mode": "AUTO"});
    vec![
        json!({"identity": which}),
        json!({"identity": which, "options": {"request_id": "r1", "min_log_seq": 3, "consistency": "linearizable"}}),
        json!({"identity": which, "session_id": "s1", "ttl_ms": 15000, "placement_digest": Digest::of(b"layout"),
               "logical_bytes": 18, "reserved_bytes": 4096, "unit_count": 1}),
        json!({"identity": which, "session_id": "s1", "placement_digest": Digest::of(b"layout"), "logical_bytes": 18,
               "reserved_bytes": 4096, "unit_count": 1, "participants": ["rank0", "rank1"]}),
        json!({"identity": which, "session_id": "s1", "participant": "rank0", "writer_id": "w1",
               "placement_digest": Digest::of(b"layout")}),
        json!({"identity": which, "session_id": "s1", "participant": "rank0", "instance": instance, "epoch": 1}),
        json!({"identity": which, "session_id": "s1", "manifest_sha256": Digest::of(b"manifest")}),
        json!({"identity": which, "session_id": "s1"}),
        json!({"identity": which, "from": 7}),
        json!({"identity": which, "lease_id": "l1", "holder": "reader", "ttl_ms": 60000}),
        json!({"identity": which, "policy": policy, "expected_metadata_generation": 4}),
        json!({"identity": which, "target": "MIXED", "mixed_hot_ratio": 0.5, "expected_metadata_generation": 4}),
        json!({"identity": which, "expected_metadata_generation": 4}),
        json!({"base": which, "target": next, "mode": "DELETE_FIRST", "expected_metadata_generation": 4, "replacement_request_id": "r"}),
        json!({"resource_prefix": "m", "all": true, "limit": 10, "page_token": ""}),
        json!({"operation_id": "op-12.0"}),
        json!({}),
    ]
}

/// What is stored as a document, or comes as a file.
fn documents() -> Vec<Target> {
    let golden = |path: &str| {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../schemas/src").join(path);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let header = json!({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
                        "b": {"dtype": "BF16", "shape": [], "data_offsets": [16, 18]}});
    let index =
        json!({"metadata": {"total_size": 18}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}});
    vec![
        Target {
            name: "manifest",
            corpus: vec![golden("manifest/goldens/manifest-v1.json"), golden("manifest/goldens/manifest-v2.json")],
            shape: Shape::Json,
            run: |bytes| Manifest::parse(bytes).is_ok(),
        },
        Target {
            name: "placement",
            corpus: vec![golden("placement/goldens/placement.json")],
            shape: Shape::Json,
            run: |bytes| Placement::parse(bytes).is_ok(),
        },
        Target {
            name: "part",
            corpus: vec![golden("placement/goldens/part.json")],
            shape: Shape::Json,
            run: |bytes| PlacementPart::parse(bytes).is_ok(),
        },
        Target { name: "safetensors_header", corpus: vec![text(&header)], shape: Shape::Json, run: safetensors_header },
        Target { name: "safetensors_index", corpus: vec![text(&index)], shape: Shape::Json, run: safetensors_index },
    ]
}

thread_local! {
    static SCRATCH: tempfile::TempDir = {
        let folder = tempfile::tempdir().expect("a scratch folder");
        for (name, tensor) in [("model-1.safetensors", "a"), ("model-2.safetensors", "b")] {
            let header = json!({tensor: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}});
            std::fs::write(folder.path().join(name), safetensors(&text(&header), 16)).expect("a scratch file");
        }
        folder
    };
}

/// A file of this header and some payload.
fn safetensors(header: &[u8], payload_bytes: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, &vec![0; payload_bytes]].concat()
}

fn safetensors_header(header: &[u8]) -> bool {
    SCRATCH.with(|folder| {
        let path = folder.path().join("one.safetensors");
        std::fs::write(&path, safetensors(header, 18)).is_ok() && ballast_client::safetensors::open(&path).is_ok()
    })
}

fn safetensors_index(index: &[u8]) -> bool {
    SCRATCH.with(|folder| {
        // It is a folder of two shards and this index; the file of the other target is not one of them.
        drop(std::fs::remove_file(folder.path().join("one.safetensors")));
        let path = folder.path().join("model.safetensors.index.json");
        let opened = std::fs::write(&path, index).is_ok() && ballast_client::safetensors::open(folder.path()).is_ok();
        std::fs::remove_file(&path).is_ok() && opened
    })
}

/// As a reader presents it, and claims with a signature that fits.
fn token(bytes: &[u8]) -> bool {
    let key = TokenKey::new(&KEY).expect("a key of the right length");
    let presented = std::str::from_utf8(bytes).is_ok_and(|token| key.verify(token, 0).is_ok());
    let signed = ballast_schemas::from_messagepack::<TokenClaims>(bytes)
        .is_ok_and(|claims| key.verify(&key.sign(&claims), 0).is_ok());
    presented || signed
}

/// What processes say to each other.
fn messages() -> Vec<Target> {
    let instance = instance();
    let effect =
        || UnitEffect { instance: instance.clone(), fence: position(12), units: vec![UnitRange { start: 0, end: 7 }] };
    let session_id = SessionId::new("s1").expect("a session");
    let requests = [
        NodeRequest::Inventory { instance: instance.clone() },
        NodeRequest::Receipt { instance: instance.clone(), session_id: session_id.clone() },
        NodeRequest::RaiseFence { instance: instance.clone(), fence: position(3) },
        NodeRequest::CopyToCold(effect()),
        NodeRequest::ReleaseMemory(effect()),
        NodeRequest::DeleteInstance { instance: instance.clone(), fence: position(4) },
    ];
    let claims = TokenClaims {
        instance: instance.clone(),
        right: TokenRight::Import,
        subject: session_id.to_string(),
        part: None,
        holders: None,
        expires_unix_ms: 60_000,
    };
    let of_part = TokenClaims { part: Some(TokenPart { participant: participant(0), epoch: 3 }), ..claims.clone() };
    let key = TokenKey::new(&KEY).expect("a key of the right length");
    vec![
        Target {
            name: "node_request",
            corpus: requests.iter().map(encode).collect(),
            shape: Shape::Binary,
            run: |bytes| {
                let others = rmp::<NodeReply>(bytes)
                    | rmp::<NodeInventory>(bytes)
                    | json_of::<NodeStatus>(bytes)
                    | json_of::<NodeHello>(bytes)
                    | json_of::<Event>(bytes);
                rmp::<NodeRequest>(bytes) || others
            },
        },
        Target {
            name: "object",
            corpus: [
                json!({"op": "put", "key": "a/b"}),
                json!({"op": "list", "after": ""}),
                json!({"op": "clear", "dry_run": true}),
            ]
            .iter()
            .map(|head| [&text(head)[..], b"\nbytes"].concat())
            .collect(),
            shape: Shape::Binary,
            run: |bytes| object_head::<ObjectRequest>(bytes).is_ok_and(|(_, at)| at <= bytes.len()),
        },
        Target {
            name: "frame",
            corpus: frames(),
            shape: Shape::Binary,
            run: |bytes| rmp::<frame::RequestHeader>(bytes) | rmp::<frame::ResponseHeader>(bytes),
        },
        Target {
            name: "token",
            corpus: [claims, of_part]
                .iter()
                .flat_map(|claims| [encode(claims), key.sign(claims).into_bytes()])
                .collect(),
            shape: Shape::Binary,
            run: token,
        },
        Target {
            name: "offers",
            corpus: vec![rmp_serde::to_vec(&offers()).expect("offers of ours encode")],
            shape: Shape::Binary,
            run: |bytes| rmp::<frame::Offers>(bytes),
        },
        Target { name: "delta", corpus: vec![text(&sparse_object())], shape: Shape::Json, run: sparse_delta },
        Target {
            name: "name",
            corpus: vec![b"team:models/chat@main#12".to_vec(), b"chat".to_vec()],
            shape: Shape::Binary,
            run: |bytes| std::str::from_utf8(bytes).is_ok_and(|text| LineageKey::parse_short_name(text).is_ok()),
        },
    ]
}

/// The metadata of a sparse object of two entries.
fn sparse_object() -> Value {
    json!({
        "schema": "mooncake.sparse_object", "version": 1, "coordinate_space": "global", "tensor_id": "w",
        "global_shape": [4, 6], "global_offset": [0, 0], "local_shape": [4, 6], "tile_shape": [2, 3], "nnz": 2,
        "base_generation": 1, "delta_generation": 2, "index_dtype": "uint16", "value_dtype": "bfloat16",
        "apply": "scatter_add", "source_placement": [],
        "members": {
            "indices": {"dtype": "uint16", "shape": [2, 2]}, "values": {"dtype": "bfloat16", "shape": [2]},
            "tile_coords": {"dtype": "uint16", "shape": [2, 2]}, "tile_ptr": {"dtype": "uint64", "shape": [3]},
        },
    })
}

/// Metadata with the members of [`sparse_object`].
fn sparse_delta(bytes: &[u8]) -> bool {
    let words = |numbers: &[u16]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let members = Members {
        indices: &words(&[1, 1, 3, 5]),
        values: &words(&[0x3f80, 0x4000]),
        tile_coords: &words(&[0, 0, 1, 1]),
        tile_ptr: &[0_u64, 1, 2].map(u64::to_le_bytes).concat(),
    };
    std::str::from_utf8(bytes).is_ok_and(|text| SparseDelta::new(text, &members).is_ok())
}

fn position(seq: u64) -> LogPosition {
    LogPosition { seq, index: 0 }
}

fn instance() -> InstanceId {
    InstanceId {
        group_id: ballast_schemas::RevisionIdentity::new("t", "n", "m", "main", 1).expect("an identity").group_id(),
        position: position(9),
    }
}

fn frames() -> Vec<Vec<u8>> {
    let range = || frame::ByteRange { unit: 3, offset: 0, bytes: 4096 };
    let requests = [
        frame::Request::Hello { protocol: 1, token: "blt1.00.00".into() },
        frame::Request::Allocate { unit_count: 3, layout_digest: Digest::of(b"layout") },
        frame::Request::Write { ranges: vec![range(), range()] },
        frame::Request::OpenBase { token: "blt1.00.00".into(), holders: Vec::new() },
        frame::Request::Derive {
            ranges: vec![frame::DerivedRange {
                unit: 3,
                base_unit: 3,
                offset: 0,
                bytes: 4096,
                blake3: Some(Digest::of(b"unit")),
                patch: Some(frame::Patch {
                    rule: frame::PatchRule::Add { number: frame::Number::BF16 },
                    entries: 8,
                    index_bytes: 8,
                }),
            }],
        },
        frame::Request::Offer { fragments: offers().fragments.iter().map(|own| own.fragment).collect() },
        frame::Request::ReadOffers { conflicts: true },
        frame::Request::Seal,
        frame::Request::MapSegments { memory: true, cold: false },
    ];
    let header = |body| encode(&frame::RequestHeader { payload_bytes: 24, descriptors: 0, body });
    let offered = frame::Response::Offered { wanted: Bitmap::full(11) };
    let offered = encode(&frame::ResponseHeader { payload_bytes: 0, descriptors: 0, body: offered });
    requests.map(header).into_iter().chain([offered]).collect()
}

fn participant(rank: u32) -> ParticipantId {
    ParticipantId::new(format!("rank{rank}")).expect("a participant")
}

/// What two participants have offered: they do not agree on the second fragment.
fn offers() -> frame::Offers {
    let fragment = |offset| frame::OfferedFragment { unit: 3, offset, bytes: 4096, crc64: 0x9a1b_2c3d_4e5f_6071 };
    frame::Offers {
        participants: vec![participant(0), participant(1)],
        fragments: vec![
            frame::FragmentOffer { fragment: fragment(0), participant: 1, held: true, differs: None },
            frame::FragmentOffer { fragment: fragment(4096), participant: 0, held: false, differs: Some(1) },
        ],
    }
}
