//! The documents of a placement and of one part, field by field. Canonical form is shared with the manifest, in ASCII
//! (`ascii.rs`); a document that is read writes back as the same bytes.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::Placement;
use super::ascii::{from_ascii, to_ascii};
use super::error::PlacementError;
use super::part::{PlacementFragment, PlacementIdentity, PlacementPart};
use super::topology::{
    Form, PARTICIPANTS_MAX, ParallelRank, ParallelTopology, Participant, TopologyParts, prefixed, text,
};
use crate::digest::Digest;
use crate::manifest::{ManifestError, PARTS_MAX, RANK_MAX, Reader, Tensor, Writer, read_tensor, write_tensor};

const RESOURCE_KIND: &str = "model_weight";
const PART_SCHEMA: &str = "weight-placement-part";

const PLACEMENT_FIELDS: &[&str] = &[
    "parts",
    "placement_id",
    "placement_set_id",
    "resource_id",
    "resource_kind",
    "revision",
    "tensors",
    "topology",
    "weight_generation",
];
const PART_FIELDS: &[&str] = &[
    "fragments",
    "participant_id",
    "placement_set_id",
    "rank",
    "resource_id",
    "resource_kind",
    "revision",
    "schema",
    "tensors",
    "topology_id",
    "weight_generation",
];
const FRAGMENT_FIELDS: &[&str] =
    &["aliases", "global_offset", "local_shape", "nbytes", "placement_fragment_id", "rank", "tensor_id"];

/// A fragment whose tensor is known by name only.
struct FragmentParts {
    tensor_id: String,
    global_offset: Vec<u64>,
    local_shape: Vec<u64>,
    nbytes: u64,
    rank: ParallelRank,
    aliases: Vec<String>,
    placement_fragment_id: String,
}

fn read_fragment(r: &mut Reader<'_>) -> Result<FragmentParts, ManifestError> {
    r.open(FRAGMENT_FIELDS)?;
    r.field("aliases")?;
    let aliases = r.list(PARTS_MAX, Reader::string)?;
    r.field("global_offset")?;
    let global_offset = r.list(RANK_MAX, Reader::number)?;
    r.field("local_shape")?;
    let local_shape = r.list(RANK_MAX, Reader::number)?;
    r.field("nbytes")?;
    let nbytes = r.number()?;
    let placement_fragment_id = text(r, "placement_fragment_id")?;
    r.field("rank")?;
    let rank = ParallelRank::read(r)?;
    let tensor_id = text(r, "tensor_id")?;
    r.close()?;
    Ok(FragmentParts { tensor_id, global_offset, local_shape, nbytes, rank, aliases, placement_fragment_id })
}

fn read_kind(r: &mut Reader<'_>, field: &'static str, expected: &str) -> Result<(), ManifestError> {
    let found = text(r, field)?;
    if found == expected { Ok(()) } else { Err(r.error(format!("found {found:?}, expected {expected:?}"))) }
}

/// Tensors of a document, and which of them fragments have used.
struct Catalogue {
    tensors: Vec<Arc<Tensor>>,
    places: HashMap<String, u32>,
    used: Vec<bool>,
}

impl Catalogue {
    fn new(tensors: Vec<Tensor>) -> Result<Self, PlacementError> {
        check_ascending("tensors", "tensor_id", tensors.iter().map(|tensor| tensor.tensor_id.as_str()))?;
        let places = tensors.iter().map(|tensor| tensor.tensor_id.clone()).zip(0..).collect();
        let used = vec![false; tensors.len()];
        Ok(Self { tensors: tensors.into_iter().map(Arc::new).collect(), places, used })
    }

    /// The fragments of one list with their tensors, ordered by them.
    fn fragments(&mut self, list: &str, parts: Vec<FragmentParts>) -> Result<Vec<PlacementFragment>, PlacementError> {
        check_ascending(list, "placement_fragment_id", parts.iter().map(|own| own.placement_fragment_id.as_str()))?;
        let resolve = |(place, parts): (usize, FragmentParts)| {
            let Some(&at) = self.places.get(&parts.tensor_id) else {
                let reason = format!("{:?} is not in tensors", parts.tensor_id);
                return Err(PlacementError::new(format!("{list}[{place}].tensor_id"), reason));
            };
            self.used[at as usize] = true;
            let fragment = PlacementFragment {
                tensor: self.tensors[at as usize].clone(),
                global_offset: parts.global_offset,
                local_shape: parts.local_shape,
                nbytes: parts.nbytes,
                rank: parts.rank,
                aliases: parts.aliases,
                placement_fragment_id: parts.placement_fragment_id,
            };
            Ok((at, fragment))
        };
        let mut fragments: Vec<_> = parts.into_iter().enumerate().map(resolve).collect::<Result<_, _>>()?;
        // By number and not by name: a part orders them by name, which is fast when they are in order.
        fragments.sort_unstable_by_key(|(tensor, _)| *tensor);
        Ok(fragments.into_iter().map(|(_, fragment)| fragment).collect())
    }

    fn check_used(&self) -> Result<(), PlacementError> {
        match self.used.iter().position(|used| !used) {
            Some(at) => {
                let reason =
                    format!("no fragment is of {:?}; list only the tensors that are used", self.tensors[at].tensor_id);
                Err(PlacementError::new(format!("tensors[{at}]"), reason))
            }
            None => Ok(()),
        }
    }
}

/// Lists stand in one order, so that one content has one document.
fn check_ascending<'a>(
    list: &str,
    field: &str,
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), PlacementError> {
    match names.clone().zip(names.skip(1)).position(|(first, second)| first >= second) {
        Some(at) => {
            let reason = format!("out of order or repeated: {list} ascend by {field}");
            Err(PlacementError::new(format!("{list}[{}]", at + 1), reason))
        }
        None => Ok(()),
    }
}

pub(super) fn parse_placement(bytes: &[u8]) -> Result<Placement, PlacementError> {
    let raw = from_ascii(bytes)?;
    let mut reader = Reader::new(raw.as_bytes())?;
    let r = &mut reader;
    r.open(PLACEMENT_FIELDS)?;
    r.field("parts")?;
    let parts = r.list(PARTICIPANTS_MAX, |r| {
        r.open(&["fragments", "participant_id", "rank"])?;
        r.field("fragments")?;
        let fragments = r.list(PARTS_MAX, read_fragment)?;
        let participant_id = text(r, "participant_id")?;
        r.field("rank")?;
        let rank = ParallelRank::read(r)?;
        r.close()?;
        Ok((Participant { participant_id, rank }, fragments))
    })?;
    let placement_id = text(r, "placement_id")?;
    let placement_set_id = text(r, "placement_set_id")?;
    let resource_id = text(r, "resource_id")?;
    read_kind(r, "resource_kind", RESOURCE_KIND)?;
    let revision = text(r, "revision")?;
    r.field("tensors")?;
    let tensors = r.list(PARTS_MAX, read_tensor)?;
    r.field("topology")?;
    let topology = TopologyParts::read(r)?;
    r.field("weight_generation")?;
    let weight_generation = r.number()?;
    r.close()?;
    r.finish()?;

    check_ascending("topology.participants", "participant_id", topology.names())?;
    let topology = ParallelTopology::from_parts(topology)?;
    check_ascending(
        "parts",
        "participant_id",
        parts.iter().map(|(participant, _)| participant.participant_id.as_str()),
    )?;
    let mut catalogue = Catalogue::new(tensors)?;
    let identity = PlacementIdentity { resource_id, revision, weight_generation, placement_set_id };
    let mut whole = Vec::with_capacity(parts.len());
    for (place, (participant, fragments)) in parts.into_iter().enumerate() {
        let fragments = catalogue.fragments(&format!("parts[{place}].fragments"), fragments)?;
        let part = PlacementPart::new(identity.clone(), topology.topology_id(), participant, fragments);
        whole.push(part.map_err(|error| match error.path.starts_with("fragments") {
            true => PlacementError::new(format!("parts[{place}].{}", error.path), error.reason),
            false => error,
        })?);
    }
    catalogue.check_used()?;
    let placement = Placement::assemble(identity, topology, whole)?;
    // Every list was in order and all else has one form, so these are the bytes that would be written.
    let named = Named::of(bytes);
    if named.placement_id != placement_id {
        let reason = format!("found {placement_id:?}, its content has {:?}", named.placement_id);
        return Err(PlacementError::new("placement_id", reason));
    }
    Ok(placement.named(named))
}

/// The names that follow from a placement's document.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) placement_id: String,
    pub(super) digest: Digest,
}

impl Named {
    /// From the document, whose own `placement_id` (the right one, a wrong one, or none yet) does not matter. What the id
    /// is the digest of has no `placement_id` and no `resource_kind`, but a `schema` before `tensors`.
    pub(super) fn of(document: &[u8]) -> Self {
        const ID: &[u8] = b"\"placement_id\":\"";
        const KIND: &[u8] = b"\"resource_kind\":\"model_weight\",";
        // Quotes inside strings are escaped, so these are found at the top level only; each stands there once.
        let find =
            |what: &[u8], end: usize| document[..end].windows(what.len()).rposition(|part| part == what).unwrap_or(0);
        let tensors = find(b"\"tensors\":[", document.len());
        let kind = find(KIND, tensors);
        let id = find(ID, kind);
        let value = id + ID.len();
        let value_end = value + document[value..].iter().position(|byte| *byte == b'"').unwrap_or(0);
        let mut content = Sha256::new();
        content.update(&document[..id]);
        content.update(&document[value_end + 2..kind]);
        content.update(&document[kind + KIND.len()..tensors]);
        content.update(b"\"schema\":\"complete-weight-placement\",");
        content.update(&document[tensors..]);
        let placement_id = prefixed(Digest::from_bytes(content.finalize().into()));
        let mut whole = Sha256::new();
        whole.update(&document[..value]);
        whole.update(&placement_id);
        whole.update(&document[value_end..]);
        Self { placement_id, digest: Digest::from_bytes(whole.finalize().into()) }
    }
}

/// The document with that id.
pub(super) fn write_placement(placement: &Placement, placement_id: &str) -> Vec<u8> {
    let fragments: usize = placement.parts().iter().map(|part| part.fragments().len()).sum();
    let mut writer = Writer::with_capacity(1024 + 400 * fragments + 300 * placement.tensors().len());
    let w = &mut writer;
    let identity = placement.identity();
    w.open();
    w.field("parts");
    w.list(placement.parts(), |w, part| {
        w.open();
        w.field("fragments");
        w.list(part.fragments_by_name(), |w, fragment| fragment.write(w, Form::Document));
        w.field("participant_id");
        w.string(&part.participant().participant_id);
        w.field("rank");
        part.participant().rank.write(w);
        w.close();
    });
    for (name, value) in [
        ("placement_id", placement_id),
        ("placement_set_id", &identity.placement_set_id),
        ("resource_id", &identity.resource_id),
        ("resource_kind", RESOURCE_KIND),
        ("revision", &identity.revision),
    ] {
        w.field(name);
        w.string(value);
    }
    w.field("tensors");
    w.list(placement.tensors(), |w, tensor| write_tensor(w, tensor));
    w.field("topology");
    placement.topology().write(w, Form::Document);
    w.field("weight_generation");
    w.number(identity.weight_generation);
    w.close();
    to_ascii(writer.into_text()).into_bytes()
}

pub(super) fn parse_part(bytes: &[u8]) -> Result<PlacementPart, PlacementError> {
    let raw = from_ascii(bytes)?;
    let mut reader = Reader::new(raw.as_bytes())?;
    let r = &mut reader;
    r.open(PART_FIELDS)?;
    r.field("fragments")?;
    let fragments = r.list(PARTS_MAX, read_fragment)?;
    let participant_id = text(r, "participant_id")?;
    let placement_set_id = text(r, "placement_set_id")?;
    r.field("rank")?;
    let rank = ParallelRank::read(r)?;
    let resource_id = text(r, "resource_id")?;
    read_kind(r, "resource_kind", RESOURCE_KIND)?;
    let revision = text(r, "revision")?;
    read_kind(r, "schema", PART_SCHEMA)?;
    r.field("tensors")?;
    let tensors = r.list(PARTS_MAX, read_tensor)?;
    let topology_id = text(r, "topology_id")?;
    r.field("weight_generation")?;
    let weight_generation = r.number()?;
    r.close()?;
    r.finish()?;

    let mut catalogue = Catalogue::new(tensors)?;
    let fragments = catalogue.fragments("fragments", fragments)?;
    catalogue.check_used()?;
    let identity = PlacementIdentity { resource_id, revision, weight_generation, placement_set_id };
    PlacementPart::new(identity, topology_id, Participant { participant_id, rank }, fragments)
}

pub(super) fn write_part(part: &PlacementPart) -> Vec<u8> {
    let mut writer = Writer::with_capacity(1024 + 400 * part.fragments().len() + 300 * part.tensors().len());
    let w = &mut writer;
    let identity = part.identity();
    w.open();
    w.field("fragments");
    w.list(part.fragments_by_name(), |w, fragment| fragment.write(w, Form::Document));
    w.field("participant_id");
    w.string(&part.participant().participant_id);
    w.field("placement_set_id");
    w.string(&identity.placement_set_id);
    w.field("rank");
    part.participant().rank.write(w);
    for (name, value) in [
        ("resource_id", identity.resource_id.as_str()),
        ("resource_kind", RESOURCE_KIND),
        ("revision", &identity.revision),
        ("schema", PART_SCHEMA),
    ] {
        w.field(name);
        w.string(value);
    }
    w.field("tensors");
    w.list(part.tensors(), |w, tensor| write_tensor(w, tensor));
    w.field("topology_id");
    w.string(part.topology_id());
    w.field("weight_generation");
    w.number(identity.weight_generation);
    w.close();
    to_ascii(writer.into_text()).into_bytes()
}
