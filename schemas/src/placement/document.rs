//! The documents of a placement and of one part, field by field. Canonical form is shared with the manifest, in ASCII
//! (`ascii.rs`); a document that is read writes back as the same bytes.

use std::sync::Arc;

use super::Placement;
use super::ascii::{from_ascii, to_ascii};
use super::error::PlacementError;
use super::part::{PlacementFragment, PlacementIdentity, PlacementPart};
use super::topology::{Form, PARTICIPANTS_MAX, ParallelRank, ParallelTopology, Participant, TopologyParts, text};
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

/// Tensors of a document by name, and which of them fragments have used.
struct Catalogue {
    tensors: Vec<Arc<Tensor>>,
    used: Vec<bool>,
}

impl Catalogue {
    fn new(tensors: Vec<Tensor>) -> Result<Self, PlacementError> {
        if let Some(at) = tensors.windows(2).position(|pair| pair[0].tensor_id >= pair[1].tensor_id) {
            let reason = "out of order or repeated: tensors ascend by tensor_id";
            return Err(PlacementError::new(format!("tensors[{}]", at + 1), reason));
        }
        let used = vec![false; tensors.len()];
        Ok(Self { tensors: tensors.into_iter().map(Arc::new).collect(), used })
    }

    fn fragments(
        &mut self,
        parts: Vec<FragmentParts>,
        path: &dyn Fn(usize) -> String,
    ) -> Result<Vec<PlacementFragment>, PlacementError> {
        let resolve = |(place, parts): (usize, FragmentParts)| {
            let Ok(at) = self.tensors.binary_search_by(|tensor| tensor.tensor_id.cmp(&parts.tensor_id)) else {
                let reason = format!("{:?} is not in tensors", parts.tensor_id);
                return Err(PlacementError::new(format!("{}.tensor_id", path(place)), reason));
            };
            self.used[at] = true;
            Ok(PlacementFragment {
                tensor: self.tensors[at].clone(),
                global_offset: parts.global_offset,
                local_shape: parts.local_shape,
                nbytes: parts.nbytes,
                rank: parts.rank,
                aliases: parts.aliases,
                placement_fragment_id: parts.placement_fragment_id,
            })
        };
        parts.into_iter().enumerate().map(resolve).collect()
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

/// What was read must be what would be written: the order of lists has no other place to be checked.
fn check_canonical(read: &[u8], written: &[u8]) -> Result<(), PlacementError> {
    match read == written {
        true => Ok(()),
        false => {
            let at = read.iter().zip(written).take_while(|(a, b)| a == b).count();
            let reason = format!("not canonical from byte {at}: parts ascend by participant, fragments by their names");
            Err(PlacementError::new("document", reason))
        }
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

    let topology = ParallelTopology::from_parts(topology)?;
    let mut catalogue = Catalogue::new(tensors)?;
    let identity = PlacementIdentity { resource_id, revision, weight_generation, placement_set_id };
    let mut whole = Vec::with_capacity(parts.len());
    for (place, (participant, fragments)) in parts.into_iter().enumerate() {
        let fragments = catalogue.fragments(fragments, &|at| format!("parts[{place}].fragments[{at}]"))?;
        let part = PlacementPart::new(identity.clone(), topology.topology_id(), participant, fragments);
        whole.push(part.map_err(|error| match error.path.starts_with("fragments") {
            true => PlacementError::new(format!("parts[{place}].{}", error.path), error.reason),
            false => error,
        })?);
    }
    catalogue.check_used()?;
    let placement = Placement::assemble(identity, topology, whole)?;
    if placement.placement_id() != placement_id {
        let reason = format!("found {placement_id:?}, its content has {:?}", placement.placement_id());
        return Err(PlacementError::new("placement_id", reason));
    }
    check_canonical(bytes, &placement.to_canonical_bytes())?;
    Ok(placement)
}

/// The document, or the text whose digest is the placement's id.
pub(super) fn write_placement(placement: &Placement, form: Form) -> Vec<u8> {
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
    let placement_id = if form == Form::Document { placement.placement_id() } else { "" };
    for (name, value) in [
        ("placement_id", placement_id),
        ("placement_set_id", &identity.placement_set_id),
        ("resource_id", &identity.resource_id),
        ("resource_kind", if form == Form::Document { RESOURCE_KIND } else { "" }),
        ("revision", &identity.revision),
        ("schema", if form == Form::Identity { "complete-weight-placement" } else { "" }),
    ] {
        if !value.is_empty() {
            w.field(name);
            w.string(value);
        }
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
    let fragments = catalogue.fragments(fragments, &|at| format!("fragments[{at}]"))?;
    catalogue.check_used()?;
    let identity = PlacementIdentity { resource_id, revision, weight_generation, placement_set_id };
    let part = PlacementPart::new(identity, topology_id, Participant { participant_id, rank }, fragments)?;
    check_canonical(bytes, &part.to_canonical_bytes())?;
    Ok(part)
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
