//! The loss watch of a workflow worker: asks the nodes of a published revision what they hold, and tells the log what follows,
//! as the product's does. What follows is the product's own `verdict`. A repair that came to nothing on the same look is not
//! asked for again for a while.

use std::collections::BTreeMap;
use std::rc::Rc;

use ballast_schemas::{
    Availability, BallastError, Bitmap, Command, GroupInventory, InstanceId, LogPosition, NodeEvidence, NodeId,
    NodeReply, NodeRequest, OperationId, OperationStatus, Reply, WeightRevisionMetadata,
};
use ballast_workflows::verdict;

use super::bugs::Bug;
use super::gateway::call_node;
use super::invariants::{every_revision, looked_at};
use super::replica::Replica;
use super::runtime::SECOND;
use super::world::W;

const EVERY: u64 = 6 * SECOND;
const REPAIR_AGAIN: u64 = 600 * SECOND;

/// What a group looked like.
type Look = Vec<(NodeId, Bitmap, Bitmap)>;
/// What repairs began, on which look, and when.
type Tried = BTreeMap<InstanceId, (OperationId, Look, u64)>;

/// Watches for as long as its process lives.
pub(crate) async fn watch_losses(w: W, replica: Rc<Replica>) {
    let mut tried = Tried::new();
    loop {
        w.work(EVERY).await;
        let published = |record: &WeightRevisionMetadata| {
            matches!(record.availability, Availability::Ready | Availability::Degraded)
        };
        let records: Vec<WeightRevisionMetadata> = replica.read(every_revision).into_iter().filter(published).collect();
        let first = w.draw(|rng| rng.index(records.len().max(1)));
        for record in records.iter().cycle().skip(first).take(records.len()) {
            look_at(&replica, record, &mut tried).await;
        }
    }
}

async fn look_at(replica: &Replica, record: &WeightRevisionMetadata, tried: &mut Tried) {
    let w = &replica.w;
    let looked = w.now();
    let fence = replica.read(|state| state.effect_fence(&record.identity));
    let mut held = GroupInventory::default();
    let mut evidence = Vec::new();
    for node in &record.placement {
        match ask(replica, node, &record.instance, fence).await {
            Ok(NodeReply::Inventory(found)) => {
                let (incarnation, fence) = (found.incarnation.clone(), found.fence);
                evidence.push(NodeEvidence { node: node.clone(), incarnation, fence });
                held.nodes.insert(node.clone(), *found);
            }
            Ok(NodeReply::Absent) => {
                evidence.push(NodeEvidence { node: node.clone(), incarnation: String::new(), fence });
            }
            _ => return,
        }
    }
    let Some(command) = replica.read(|state| verdict(state, record, &held, evidence, None)) else { return };
    let look = look_of(&held);
    let repairs = matches!(command, Command::StartRepair(_));
    if repairs {
        if w.bug(Bug::LossNotRepaired) {
            return;
        }
        let succeeded = |id| {
            let status = replica.read(|state| state.operation(id).map(|operation| operation.status));
            status == Some(OperationStatus::Succeeded)
        };
        let came_to_nothing = tried.get(&record.instance).is_some_and(|(operation_id, last, at)| {
            *last == look && w.now() < at + REPAIR_AGAIN && !succeeded(operation_id)
        });
        if came_to_nothing {
            return;
        }
    }
    let id = w.command_id();
    looked_at(w, &id, Some(looked));
    let told = replica.submit_as(id, None, command).await;
    if let (true, Some((_, Ok(Reply::Operation(begun))))) = (repairs, told) {
        tried.insert(record.instance.clone(), (begun.operation_id.clone(), look, w.now()));
    }
}

/// Under the last effect that the log authorised: an older one that is still under way is refused from then on.
async fn ask(
    replica: &Replica,
    node: &NodeId,
    instance: &InstanceId,
    fence: LogPosition,
) -> Result<NodeReply, BallastError> {
    let asked = call_node(replica, node, NodeRequest::Inventory { instance: instance.clone() }).await?;
    match asked {
        NodeReply::Inventory(held) if held.fence < fence => {
            call_node(replica, node, NodeRequest::RaiseFence { instance: instance.clone(), fence }).await
        }
        other => Ok(other),
    }
}

fn look_of(held: &GroupInventory) -> Look {
    held.nodes.iter().map(|(node, held)| (node.clone(), held.hot.clone(), held.cold.clone())).collect()
}
