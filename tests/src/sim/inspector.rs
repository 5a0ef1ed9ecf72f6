//! Looks at revisions on their nodes from time to time and tells the log that one degraded or recovered, with the evidence
//! that the fold asks for. Stands in for the loss detection of the product's workers, and plays by the same rules: every holder
//! must have answered, under a fence that is not older than the last effect.

use std::rc::Rc;

use ballast_schemas::{
    Availability, Command, ErrorCode, GroupInventory, LogPosition, NodeEvidence, NodeReply, NodeRequest,
    RevisionDegraded, RevisionRecovered, WeightRevisionMetadata,
};
use ballast_workflows::State;

use super::gateway::{Gateway, call_node};
use super::invariants::{every_revision, looked_at};
use super::runtime::SECOND;

const EVERY: u64 = 6 * SECOND;

pub(crate) async fn inspect(gateway: Rc<Gateway>) {
    let replica = &gateway.replica;
    let w = &replica.w;
    loop {
        w.work(EVERY).await;
        let idle = |record: &WeightRevisionMetadata| {
            matches!(record.availability, Availability::Ready | Availability::Degraded) && record.operation_id.is_none()
        };
        let (log_seq, records) = replica.read(|state| (state.log_seq(), every_revision(state)));
        let idle: Vec<WeightRevisionMetadata> = records.into_iter().filter(idle).collect();
        let count = if w.calm.get() { idle.len() } else { 1 };
        let first = w.draw(|rng| rng.index(idle.len().max(1)));
        for record in idle.iter().cycle().skip(first).take(count) {
            look_at(&gateway, record, LogPosition { seq: log_seq, index: 0 }).await;
        }
    }
}

/// `asked_under` is the log position up to which whatever the log authorised was known when the nodes were asked.
async fn look_at(gateway: &Gateway, record: &WeightRevisionMetadata, asked_under: LogPosition) {
    let replica = &gateway.replica;
    let w = &replica.w;
    let looked = w.now();
    let instance = &record.instance;
    let mut inventory = GroupInventory::default();
    let mut evidence = Vec::new();
    for node in &record.placement {
        let request = NodeRequest::Inventory { instance: instance.clone() };
        match call_node(replica, node, request).await {
            Ok(NodeReply::Inventory(held)) => {
                evidence.push(NodeEvidence {
                    node: node.clone(),
                    incarnation: held.incarnation.clone(),
                    fence: held.fence,
                });
                inventory.nodes.insert(node.clone(), *held);
            }
            Ok(NodeReply::Absent) => {
                evidence.push(NodeEvidence { node: node.clone(), incarnation: String::new(), fence: asked_under });
            }
            _ => return,
        }
    }
    let units = record.manifest.as_ref().map_or(0, |manifest| manifest.affinity_count);
    let (identity, instance) = (record.identity.clone(), instance.clone());
    let command = match (record.availability, inventory.is_readable(units)) {
        (Availability::Ready, false) => {
            let reason = "an inspection found a unit without a readable replica".to_owned();
            Command::RevisionDegraded(RevisionDegraded { identity, instance, evidence, reason })
        }
        (Availability::Degraded, true) => {
            let residency = inventory.residency(units);
            let hot = inventory.hot(units).count();
            let observed_hot_ppm =
                hot.checked_mul(1_000_000).and_then(|ppm| ppm.checked_div(units)).unwrap_or_default();
            Command::RevisionRecovered(RevisionRecovered { identity, instance, evidence, residency, observed_hot_ppm })
        }
        _ => return,
    };
    let id = w.command_id();
    looked_at(w, &id, Some(looked));
    let told = replica.submit_as(id, None, command).await;
    let stale = matches!(&told, Some((_, Err(rejection))) if rejection.code == ErrorCode::Conflict);
    if stale && replica.read(|state: &State| state.revision(&record.identity) == Some(record)) {
        // An effect was authorised that some holder never heard of: it must not happen any more before the look counts.
        for node in inventory.nodes.keys() {
            let request = NodeRequest::RaiseFence { instance: record.instance.clone(), fence: asked_under };
            let _ = call_node(replica, node, request).await;
        }
    }
}
