//! Who takes part in a placement: the sizes of the parallel axes and the explicit participants with their coordinates
//! (RFC, Relationship to Reshard, Transfer Engine, and DTensor).

use std::collections::HashSet;

use super::ascii::to_ascii;
use super::error::PlacementError;
use crate::digest::Digest;
use crate::manifest::{AxisKind, ManifestError, Reader, Writer, check_tensor_name};

/// Participants of one topology.
pub const PARTICIPANTS_MAX: usize = 1_000_000;

/// The kinds of parallelism in canonical order.
pub(super) const KINDS: [AxisKind; 4] = [AxisKind::Dp, AxisKind::Pp, AxisKind::Ep, AxisKind::Tp];

/// One number for each kind of parallelism: the coordinates of a participant, or the sizes of the axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParallelRank {
    /// Data parallel.
    pub dp: u32,
    /// Pipeline parallel.
    pub pp: u32,
    /// Expert parallel.
    pub ep: u32,
    /// Tensor parallel.
    pub tp: u32,
}

impl ParallelRank {
    /// The number for one kind.
    #[must_use]
    pub fn along(&self, kind: AxisKind) -> u32 {
        match kind {
            AxisKind::Dp => self.dp,
            AxisKind::Pp => self.pp,
            AxisKind::Ep => self.ep,
            AxisKind::Tp => self.tp,
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, ManifestError> {
        r.open(&["dp", "ep", "pp", "tp"])?;
        let rank = Self { dp: small(r, "dp")?, ep: small(r, "ep")?, pp: small(r, "pp")?, tp: small(r, "tp")? };
        r.close()?;
        Ok(rank)
    }

    pub(super) fn write(&self, w: &mut Writer) {
        w.open();
        for (name, value) in [("dp", self.dp), ("ep", self.ep), ("pp", self.pp), ("tp", self.tp)] {
            w.field(name);
            w.number(u64::from(value));
        }
        w.close();
    }
}

/// How many ranks each kind of parallelism has; each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AxisSizes {
    /// Data parallel.
    pub dp: u32,
    /// Pipeline parallel.
    pub pp: u32,
    /// Expert parallel.
    pub ep: u32,
    /// Tensor parallel.
    pub tp: u32,
}

impl AxisSizes {
    /// The size of one kind.
    #[must_use]
    pub fn along(&self, kind: AxisKind) -> u32 {
        match kind {
            AxisKind::Dp => self.dp,
            AxisKind::Pp => self.pp,
            AxisKind::Ep => self.ep,
            AxisKind::Tp => self.tp,
        }
    }
}

impl Default for AxisSizes {
    fn default() -> Self {
        Self { dp: 1, pp: 1, ep: 1, tp: 1 }
    }
}

/// One process that holds weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Participant {
    /// Its name, unique in the topology.
    pub participant_id: String,
    /// Its coordinates, unique in the topology.
    pub rank: ParallelRank,
}

/// The axes and the participants of one placement. A placement may leave ranks out (one data-parallel replica, say), and
/// axes may share workers: the world size is the number of participants, not the product of the sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelTopology {
    sizes: AxisSizes,
    participants: Vec<Participant>,
    topology_id: String,
}

impl ParallelTopology {
    /// The topology of these participants, in any order.
    ///
    /// # Errors
    /// When a size is 0, there is no participant, a name or coordinates stand twice, or a coordinate is out of range.
    pub fn new(sizes: AxisSizes, mut participants: Vec<Participant>) -> Result<Self, PlacementError> {
        for kind in KINDS {
            if sizes.along(kind) == 0 {
                return Err(PlacementError::new(format!("topology.{}_size", kind.name()), "is 0, expected at least 1"));
            }
        }
        participants.sort_unstable_by(|a, b| a.participant_id.cmp(&b.participant_id));
        if participants.is_empty() || participants.len() > PARTICIPANTS_MAX {
            let reason = format!("found {}, expected 1 to {PARTICIPANTS_MAX}", participants.len());
            return Err(PlacementError::new("topology.participants", reason));
        }
        let mut ranks = HashSet::with_capacity(participants.len());
        for (place, participant) in participants.iter().enumerate() {
            let error = |field: &str, reason: String| {
                PlacementError::new(format!("topology.participants[{place}].{field}"), reason)
            };
            let name = &participant.participant_id;
            check_tensor_name(name).map_err(|reason| error("participant_id", reason))?;
            if place > 0 && participants[place - 1].participant_id == *name {
                return Err(error("participant_id", format!("{name:?} stands twice")));
            }
            for kind in KINDS {
                let (found, size) = (participant.rank.along(kind), sizes.along(kind));
                if found >= size {
                    return Err(error(
                        "rank",
                        format!("{} {found} of {name:?} is not below the size {size}", kind.name()),
                    ));
                }
            }
            if !ranks.insert(participant.rank) {
                return Err(error("rank", format!("{name:?} has the coordinates of another participant")));
            }
        }
        let mut topology = Self { sizes, participants, topology_id: String::new() };
        topology.topology_id = sha256_id(|w| topology.write(w, Form::Identity));
        Ok(topology)
    }

    /// One participant for every combination of coordinates, named `dp0-pp0-ep0-tp0` and so on.
    ///
    /// # Errors
    /// When a size is 0 or there are more than [`PARTICIPANTS_MAX`] combinations.
    pub fn grid(sizes: AxisSizes) -> Result<Self, PlacementError> {
        let count = KINDS.iter().fold(1_u128, |count, kind| count * u128::from(sizes.along(*kind)));
        if count > PARTICIPANTS_MAX as u128 {
            let reason = format!("found {count}, expected 1 to {PARTICIPANTS_MAX}");
            return Err(PlacementError::new("topology.participants", reason));
        }
        let mut participants = Vec::with_capacity(count as usize);
        for dp in 0..sizes.dp {
            for pp in 0..sizes.pp {
                for ep in 0..sizes.ep {
                    for tp in 0..sizes.tp {
                        let participant_id = format!("dp{dp}-pp{pp}-ep{ep}-tp{tp}");
                        participants.push(Participant { participant_id, rank: ParallelRank { dp, pp, ep, tp } });
                    }
                }
            }
        }
        Self::new(sizes, participants)
    }

    /// The sizes of the axes.
    #[must_use]
    pub fn sizes(&self) -> AxisSizes {
        self.sizes
    }

    /// The participants by name.
    #[must_use]
    pub fn participants(&self) -> &[Participant] {
        &self.participants
    }

    /// How many participants there are.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.participants.len()
    }

    /// `sha256:` and the digest of what the topology says.
    #[must_use]
    pub fn topology_id(&self) -> &str {
        &self.topology_id
    }

    /// A participant by its name.
    #[must_use]
    pub fn participant(&self, participant_id: &str) -> Option<&Participant> {
        self.participant_place(participant_id).map(|at| &self.participants[at])
    }

    pub(super) fn participant_place(&self, participant_id: &str) -> Option<usize> {
        self.participants.binary_search_by(|other| other.participant_id.as_str().cmp(participant_id)).ok()
    }

    /// What a document says of itself must be what its content makes.
    pub(super) fn from_parts(parts: TopologyParts) -> Result<Self, PlacementError> {
        let topology = Self::new(parts.sizes, parts.participants)?;
        if topology.topology_id != parts.topology_id {
            let reason = format!("found {:?}, its content has {:?}", parts.topology_id, topology.topology_id);
            return Err(PlacementError::new("topology.topology_id", reason));
        }
        Ok(topology)
    }

    pub(super) fn write(&self, w: &mut Writer, form: Form) {
        w.open();
        for (name, value) in [("dp_size", self.sizes.dp), ("ep_size", self.sizes.ep)] {
            w.field(name);
            w.number(u64::from(value));
        }
        w.field("participants");
        w.list(&self.participants, |w, participant| {
            w.open();
            w.field("participant_id");
            w.string(&participant.participant_id);
            w.field("rank");
            participant.rank.write(w);
            w.close();
        });
        w.field("pp_size");
        w.number(u64::from(self.sizes.pp));
        match form {
            Form::Identity => {
                w.field("schema");
                w.string("weight-parallel-topology");
            }
            Form::Document => {
                w.field("topology_id");
                w.string(&self.topology_id);
            }
        }
        w.field("tp_size");
        w.number(u64::from(self.sizes.tp));
        w.close();
    }
}

/// The fields of a topology, not yet checked.
#[derive(Debug)]
pub(super) struct TopologyParts {
    sizes: AxisSizes,
    participants: Vec<Participant>,
    topology_id: String,
}

impl TopologyParts {
    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.participants.iter().map(|participant| participant.participant_id.as_str())
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, ManifestError> {
        r.open(&["dp_size", "ep_size", "participants", "pp_size", "topology_id", "tp_size"])?;
        let (dp, ep) = (small(r, "dp_size")?, small(r, "ep_size")?);
        r.field("participants")?;
        let participants = r.list(PARTICIPANTS_MAX, |r| {
            r.open(&["participant_id", "rank"])?;
            let participant_id = text(r, "participant_id")?;
            r.field("rank")?;
            let rank = ParallelRank::read(r)?;
            r.close()?;
            Ok(Participant { participant_id, rank })
        })?;
        let pp = small(r, "pp_size")?;
        let topology_id = text(r, "topology_id")?;
        let tp = small(r, "tp_size")?;
        r.close()?;
        Ok(Self { sizes: AxisSizes { dp, pp, ep, tp }, participants, topology_id })
    }
}

/// What is being written: a document, or the text whose digest is its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Document,
    Identity,
}

/// `sha256:` and the digest of the ASCII canonical JSON.
pub(super) fn sha256_id(write: impl FnOnce(&mut Writer)) -> String {
    let mut writer = Writer::with_capacity(512);
    write(&mut writer);
    prefixed(Digest::of(to_ascii(writer.into_text()).as_bytes()))
}

/// `sha256:` and the digest. Every fragment has one, so it is written without the formatter.
pub(super) fn prefixed(digest: Digest) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(7 + 64);
    text.push_str("sha256:");
    for byte in digest.as_bytes() {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

pub(super) fn text(r: &mut Reader<'_>, name: &'static str) -> Result<String, ManifestError> {
    r.field(name)?;
    r.string()
}

pub(super) fn small(r: &mut Reader<'_>, name: &'static str) -> Result<u32, ManifestError> {
    r.field(name)?;
    let value = r.number()?;
    u32::try_from(value).map_err(|_| r.error(format!("{value} does not fit in 32 bits")))
}
