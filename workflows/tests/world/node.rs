//! A node that holds bits instead of bytes, and obeys fences and requests as the transfer worker does.

use std::collections::{BTreeMap, BTreeSet};

use ballast_schemas::*;

/// What one node holds of one instance.
#[derive(Clone, Debug)]
pub struct Held {
    pub fence: LogPosition,
    pub sealed: bool,
    pub hot: Bitmap,
    /// In memory, handed out or on its way out.
    pub resident: Bitmap,
    pub cold: Bitmap,
}

/// A node.
#[derive(Clone, Debug, Default)]
pub struct FakeNode {
    pub cold_tier: bool,
    pub up: bool,
    pub held: BTreeMap<InstanceId, Held>,
    /// A reader maps everything of these.
    pub mapped: BTreeSet<InstanceId>,
    /// Refuses that many more promotions for want of memory.
    pub memory_full: u32,
    /// Fails that many more effects half way.
    pub disk_errors: u32,
    /// What it was asked, for tests.
    pub asked: Vec<NodeRequest>,
}

impl FakeNode {
    pub fn inventory(&self, node: &NodeId, instance: &InstanceId) -> Option<NodeInventory> {
        let held = self.held.get(instance)?;
        Some(NodeInventory {
            node: node.clone(),
            incarnation: "i".into(),
            instance: instance.clone(),
            fence: held.fence,
            sealed: held.sealed,
            manifest: held.sealed,
            hot: held.hot.clone(),
            cold: held.cold.clone(),
            cold_lost: Bitmap::empty(held.cold.len()),
        })
    }

    pub fn answer(
        &mut self,
        node: &NodeId,
        indexes: &BTreeMap<InstanceId, AffinityIndex>,
        request: &NodeRequest,
    ) -> NodeReply {
        self.asked.push(request.clone());
        let refuse = |code, text: &str| NodeReply::Failed(BallastError::new(code, text));
        let (instance, fence) = match request {
            NodeRequest::Inventory { instance } => (instance, None),
            NodeRequest::AffinityIndex { instance } => {
                return match (self.held.get(instance).filter(|held| held.sealed), indexes.get(instance)) {
                    (Some(_), Some(index)) => NodeReply::AffinityIndex(Box::new(index.clone())),
                    _ => refuse(ErrorCode::NotReady, "not sealed"),
                };
            }
            NodeRequest::RaiseFence { instance, fence } | NodeRequest::DeleteInstance { instance, fence } => {
                (instance, Some(*fence))
            }
            NodeRequest::CopyToCold(effect)
            | NodeRequest::CopyToMemory(effect)
            | NodeRequest::ReleaseMemory(effect)
            | NodeRequest::DeleteUnits(effect) => (&effect.instance, Some(effect.fence)),
            NodeRequest::Receipt { .. } | NodeRequest::Verify { .. } => {
                return refuse(ErrorCode::InvalidArgument, "not asked in this world");
            }
        };
        let Some(held) = self.held.get_mut(instance) else { return NodeReply::Absent };
        if let Some(fence) = fence {
            if fence < held.fence {
                return refuse(ErrorCode::Conflict, "an older fence");
            }
            held.fence = fence;
        }
        let half_way = |errors: &mut u32, units: Vec<u32>| -> (Vec<u32>, bool) {
            if *errors > 0 && units.len() > 1 {
                *errors -= 1;
                let half = units.len() / 2;
                return (units[..half].to_vec(), true);
            }
            (units, false)
        };
        let units_of = |effect: &UnitEffect| effect.units.iter().flat_map(|range| range.iter()).collect::<Vec<u32>>();
        match request {
            NodeRequest::CopyToCold(effect) => {
                if !self.cold_tier {
                    return refuse(ErrorCode::PolicyUnsatisfiable, "no cold tier");
                }
                let (units, fails) = half_way(&mut self.disk_errors, units_of(effect));
                for unit in units {
                    if !held.cold.get(unit) && !held.hot.get(unit) {
                        return refuse(ErrorCode::Unavailable, "not here");
                    }
                    held.cold.set(unit, true);
                }
                if fails {
                    return refuse(ErrorCode::DurabilityFailed, "i/o error");
                }
            }
            NodeRequest::CopyToMemory(effect) => {
                if self.memory_full > 0 {
                    self.memory_full -= 1;
                    return refuse(ErrorCode::CapacityExhausted, "memory is full");
                }
                let (units, fails) = half_way(&mut self.disk_errors, units_of(effect));
                for unit in units {
                    if !held.cold.get(unit) && !held.resident.get(unit) {
                        return refuse(ErrorCode::Unavailable, "not here");
                    }
                    held.hot.set(unit, true);
                    held.resident.set(unit, true);
                }
                if fails {
                    return refuse(ErrorCode::DurabilityFailed, "i/o error");
                }
            }
            NodeRequest::ReleaseMemory(effect) => {
                let units = units_of(effect);
                if units.iter().any(|unit| held.resident.get(*unit) && !held.cold.get(*unit)) {
                    return refuse(ErrorCode::Conflict, "no witness");
                }
                units.iter().for_each(|unit| held.hot.set(*unit, false));
                if self.mapped.contains(instance) {
                    return refuse(ErrorCode::Busy, "a reader maps it");
                }
                units.iter().for_each(|unit| held.resident.set(*unit, false));
            }
            NodeRequest::DeleteUnits(effect) => {
                for unit in units_of(effect) {
                    held.hot.set(unit, false);
                    held.resident.set(unit, false);
                    held.cold.set(unit, false);
                }
            }
            NodeRequest::DeleteInstance { .. } => {
                self.held.remove(instance);
                return NodeReply::Absent;
            }
            _ => {}
        }
        match self.inventory(node, instance) {
            Some(inventory) => NodeReply::Inventory(Box::new(inventory)),
            None => NodeReply::Absent,
        }
    }
}
