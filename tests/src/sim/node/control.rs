//! A node's answers to control requests.

use std::rc::Rc;

use ballast_schemas::{BallastError, NodeReply, NodeRequest};

use super::store::Store;
use crate::sim::faults::Target;
use crate::sim::world::short;

impl Store {
    pub async fn control(self: Rc<Self>, request: NodeRequest) -> NodeReply {
        let reply = self.carry_out(&request).await.unwrap_or_else(NodeReply::Failed);
        // Done, and nobody has been told.
        self.w.may_die(&self.node.slot, Target::Node(self.node.at)).await;
        let said = match &reply {
            NodeReply::Failed(error) => format!("{}: {}", error.code, error.message),
            NodeReply::Inventory(held) => {
                let units =
                    |bitmap: &ballast_schemas::Bitmap| bitmap.iter().map(|unit| unit.to_string()).collect::<Vec<_>>();
                format!(
                    "fence {} hot [{}] cold [{}]",
                    held.fence,
                    units(&held.hot).join(" "),
                    units(&held.cold).join(" ")
                )
            }
            _ => "done".to_owned(),
        };
        self.trace(&format!("{} -> {said}", name_of(&request)));
        reply
    }

    async fn carry_out(&self, request: &NodeRequest) -> Result<NodeReply, BallastError> {
        let held = |live: &super::Live, asked| NodeReply::Inventory(Box::new(self.inventory_of(live, asked)));
        Ok(match request {
            NodeRequest::Inventory { instance } => match self.find(instance) {
                None => NodeReply::Absent,
                Some(_) => held(&*self.served(instance)?, instance),
            },
            NodeRequest::Receipt { instance, session_id } => {
                NodeReply::Receipt(Box::new(self.receipt(instance, session_id)?))
            }
            NodeRequest::AffinityIndex { instance } => {
                let content = Self::sealed(&*self.served(instance)?)?;
                NodeReply::AffinityIndex(Box::new(content.affinity.clone()))
            }
            NodeRequest::RaiseFence { instance, fence } => match self.find(instance) {
                None => NodeReply::Absent,
                Some(_) => {
                    let live = self.served(instance)?;
                    self.obey(&live, *fence)?;
                    held(&live, instance)
                }
            },
            NodeRequest::CopyToCold(effect) => held(&*self.copy_to_cold(effect).await?, &effect.instance),
            NodeRequest::CopyToMemory(effect) => held(&*self.copy_to_memory(effect).await?, &effect.instance),
            NodeRequest::ReleaseMemory(effect) => held(&*self.release_memory(effect).await?, &effect.instance),
            NodeRequest::DeleteUnits(effect) => match self.delete_units(effect).await? {
                Some(live) => held(&live, &effect.instance),
                None => NodeReply::Absent,
            },
            NodeRequest::DeleteInstance { instance, fence } => {
                self.delete_instance(instance, *fence).await?;
                NodeReply::Absent
            }
            NodeRequest::Verify { instance, .. } => NodeReply::Verified(Box::new(self.verify(instance).await?)),
        })
    }
}

fn name_of(request: &NodeRequest) -> String {
    let (name, instance, fence, units) = match request {
        NodeRequest::Inventory { instance } => ("Inventory", instance, None, None),
        NodeRequest::Receipt { instance, .. } => ("Receipt", instance, None, None),
        NodeRequest::AffinityIndex { instance } => ("AffinityIndex", instance, None, None),
        NodeRequest::RaiseFence { instance, fence } => ("RaiseFence", instance, Some(fence), None),
        NodeRequest::DeleteInstance { instance, fence } => ("DeleteInstance", instance, Some(fence), None),
        NodeRequest::CopyToCold(it) => ("CopyToCold", &it.instance, Some(&it.fence), Some(&it.units)),
        NodeRequest::CopyToMemory(it) => ("CopyToMemory", &it.instance, Some(&it.fence), Some(&it.units)),
        NodeRequest::ReleaseMemory(it) => ("ReleaseMemory", &it.instance, Some(&it.fence), Some(&it.units)),
        NodeRequest::DeleteUnits(it) => ("DeleteUnits", &it.instance, Some(&it.fence), Some(&it.units)),
        NodeRequest::Verify { instance, .. } => ("Verify", instance, None, None),
    };
    let fence = fence.map(|fence| format!(" under {fence}")).unwrap_or_default();
    let units: Vec<String> =
        units.iter().flat_map(|it| it.iter()).map(|it| format!("{}..{}", it.start, it.end)).collect();
    format!("{name} {}{fence} {}", short(instance), units.join(" "))
}
