//! Placements as Python describes them, checked and made into the documents that the planner reads; and names.

use std::sync::Arc;

use ballast_client::reshard::PlanTarget;
use ballast_client::{describe_tensor, user_shape};
use ballast_schemas::manifest::{Manifest, ParallelAxis, Tensor};
use ballast_schemas::placement::{
    AxisSizes, ParallelRank, ParallelTopology, Participant, Placement as Document, PlacementFragment,
    PlacementIdentity, PlacementPart,
};
use ballast_schemas::{BallastError, LineageKey, RevisionIdentity};
use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::json;

use crate::error::{raise, read_json, to_json};

/// A tensor as Python describes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorText {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    #[serde(default)]
    pub(crate) aliases: Vec<String>,
    #[serde(default)]
    pub(crate) layer_id: Option<u64>,
    #[serde(default)]
    pub(crate) expert_id: Option<u64>,
    #[serde(default)]
    pub(crate) parallel_axes: Vec<ParallelAxis>,
    #[serde(default)]
    pub(crate) fragments: Vec<(Vec<u64>, Vec<u64>)>,
}

impl TensorText {
    fn descriptor(&self) -> Result<Tensor, BallastError> {
        let mut tensor = describe_tensor(&self.name, &self.dtype, &self.shape)?;
        let split = self.parallel_axes.iter().filter_map(|axis| match *axis {
            ParallelAxis::Split { dim, .. } => Some(dim),
            ParallelAxis::Replicated { .. } | ParallelAxis::Ownership { .. } => None,
        });
        tensor.shard_dims = split.collect();
        tensor.shard_dims.sort_unstable();
        (tensor.layer_id, tensor.expert_id) = (self.layer_id, self.expert_id);
        tensor.parallel_axes.clone_from(&self.parallel_axes);
        Ok(tensor)
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct RankText {
    dp: u32,
    pp: u32,
    ep: u32,
    tp: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ParticipantText {
    participant_id: String,
    rank: RankText,
    /// Number of the tensor, first element, extent.
    fragments: Vec<(usize, Vec<u64>, Vec<u64>)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlacementText {
    /// Whether the axes describe the layout; otherwise each part stands for itself.
    exact: bool,
    placement_set_id: String,
    sizes: RankText,
    participants: Vec<ParticipantText>,
    tensors: Vec<TensorText>,
}

/// A checked placement of one revision.
#[pyclass(frozen, module = "ballast._native")]
pub(crate) struct Placement {
    layout: Layout,
}

enum Layout {
    Whole(Box<Document>),
    /// Parts by themselves: their axes do not say how they belong together.
    Parts(Vec<PlacementPart>),
}

#[pymethods]
impl Placement {
    /// The placement that `text` describes, of the revision with that identity.
    #[new]
    fn new(py: Python<'_>, identity: &str, text: &str) -> PyResult<Self> {
        py.detach(|| Self::build(identity, text)).map_err(|error| raise(py, &error))
    }

    /// `sha256:` and the digest of what the placement says; `None` for parts that stand for themselves.
    #[getter]
    fn placement_id(&self) -> Option<&str> {
        match &self.layout {
            Layout::Whole(document) => Some(document.placement_id()),
            Layout::Parts(_) => None,
        }
    }

    /// The canonical document; `None` for parts that stand for themselves.
    fn to_json(&self) -> Option<String> {
        match &self.layout {
            Layout::Whole(document) => Some(String::from_utf8_lossy(&document.to_canonical_bytes()).into_owned()),
            Layout::Parts(_) => None,
        }
    }
}

impl Placement {
    fn build(identity: &str, text: &str) -> Result<Self, BallastError> {
        let identity: RevisionIdentity = read_json("the identity", identity)?;
        let text: PlacementText = read_json("the placement", text)?;
        let identity = PlacementIdentity {
            resource_id: identity.resource_id.as_str().to_owned(),
            revision: identity.revision.as_str().to_owned(),
            weight_generation: identity.weight_generation,
            placement_set_id: text.placement_set_id,
        };
        let rank = |rank: RankText| ParallelRank { dp: rank.dp, pp: rank.pp, ep: rank.ep, tp: rank.tp };
        let RankText { dp, pp, ep, tp } = text.sizes;
        let participants = text.participants.iter();
        let participants =
            participants.map(|own| Participant { participant_id: own.participant_id.clone(), rank: rank(own.rank) });
        let topology = ParallelTopology::new(AxisSizes { dp, pp, ep, tp }, participants.collect())?;
        let tensors = text.tensors.iter().map(|tensor| tensor.descriptor().map(Arc::new));
        let tensors = tensors.collect::<Result<Vec<Arc<Tensor>>, _>>()?;
        let mut parts = Vec::with_capacity(text.participants.len());
        for own in text.participants {
            let mut fragments = Vec::with_capacity(own.fragments.len());
            for (tensor, offset, shape) in own.fragments {
                let (Some(descriptor), Some(described)) = (tensors.get(tensor), text.tensors.get(tensor)) else {
                    return Err(BallastError::invalid(format!("there is no tensor number {tensor}")));
                };
                let mut aliases = described.aliases.clone();
                if !aliases.is_empty() {
                    aliases.push(described.name.clone());
                }
                fragments.push(PlacementFragment::new(descriptor.clone(), offset, shape, rank(own.rank), aliases)?);
            }
            let participant = Participant { participant_id: own.participant_id, rank: rank(own.rank) };
            parts.push(PlacementPart::new(identity.clone(), topology.topology_id(), participant, fragments)?);
        }
        let layout = match text.exact {
            true => Layout::Whole(Box::new(Document::assemble(identity, topology, parts)?)),
            false => Layout::Parts(parts),
        };
        Ok(Self { layout })
    }

    /// What is wanted: of one participant, or of all.
    pub(crate) fn target<'a>(&'a self, participant: Option<&'a str>) -> Result<PlanTarget<'a>, BallastError> {
        match (&self.layout, participant) {
            (Layout::Whole(document), None) => Ok(PlanTarget::Whole(document)),
            (Layout::Whole(document), Some(participant)) => Ok(PlanTarget::Local(document, participant)),
            (Layout::Parts(parts), Some(participant)) => {
                let part = parts.iter().find(|part| part.participant().participant_id == participant);
                let part =
                    part.ok_or_else(|| BallastError::invalid(format!("there is no participant {participant:?}")))?;
                Ok(PlanTarget::Part(part))
            }
            (Layout::Parts(_), None) => Err(BallastError::invalid(
                "no parallel axes describe this placement as a whole; read it one participant at a time (placement.local)",
            )),
        }
    }
}

/// The parts of a short name, as JSON: an identity without a generation, or with one.
#[pyfunction]
pub(crate) fn parse_name(py: Python<'_>, text: &str) -> PyResult<String> {
    let parsed = LineageKey::parse_short_name(text).map_err(|error| BallastError::invalid(error.to_string()));
    let text = parsed.and_then(|(lineage, generation)| {
        to_json(&json!({
            "tenant_id": lineage.tenant_id,
            "namespace": lineage.namespace,
            "resource_id": lineage.resource_id,
            "revision": lineage.revision,
            "weight_generation": generation,
        }))
    });
    text.map_err(|error| raise(py, &error))
}

/// The short name of an identity that is given as JSON; refuses one that can not be.
#[pyfunction]
pub(crate) fn identity_name(py: Python<'_>, identity: &str) -> PyResult<String> {
    let identity = read_json::<RevisionIdentity>("the identity", identity);
    identity.map(|identity| identity.to_string()).map_err(|error| raise(py, &error))
}

/// Name, dtype, shape and bytes.
type Described = (String, String, Vec<u64>, u64);

/// The tensors of a manifest's document.
#[pyfunction]
pub(crate) fn manifest_tensors(py: Python<'_>, document: &[u8]) -> PyResult<Vec<Described>> {
    let manifest = Manifest::parse(document).map_err(|error| raise(py, &error.into()))?;
    let describe = |tensor: &Tensor| {
        (tensor.tensor_id.clone(), tensor.dtype.clone(), user_shape(tensor), tensor.nbytes().unwrap_or(0))
    };
    Ok(manifest.tensors().iter().map(describe).collect())
}
