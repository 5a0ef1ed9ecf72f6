//! Safety invariant 5: An active lease prevents deletion and release of existing replicas. Exactly: the replicas that existed
//! when the lease was granted, less the units whose release was already authorised then, stay until the lease ends.

use std::collections::BTreeSet;

use ballast_schemas::{AuthorizeRelease, Command, Digest, InstanceId, Residency, RevisionIdentity, WeightOperation};
use ballast_workflows::plan_hot_units;

use super::{Folded, Watch};
use crate::sim::node::{Cause, Node, Tier};
use crate::sim::world::{W, short};

const NAME: &str = "5, leases protect replicas";

/// What a lease protects.
pub(super) struct Protected {
    identity: RevisionIdentity,
    instance: InstanceId,
    replicas: BTreeSet<(usize, Tier, u32)>,
}

/// A release that the log gave leave for.
pub(super) struct Authorised {
    instance: InstanceId,
    units: BTreeSet<u32>,
}

pub(super) fn check(w: &W, watch: &mut Watch, folded: &Folded<'_>) {
    let after = folded.after;
    for (_, command) in folded.accepted() {
        if let Command::AuthorizeRelease(release) = command
            && let Some(operation) = after.operation(&release.operation_id)
        {
            let units = units_of(w, folded, operation, release);
            let authorised = Authorised { instance: operation.instance.clone(), units };
            watch.authorised.insert(release.operation_id.clone(), authorised);
        }
    }
    watch.authorised.retain(|id, _| after.operation(id).is_some_and(|operation| operation.release_outstanding));
    for (_, command) in folded.accepted() {
        let Command::AcquireLease(acquired) = command else { continue };
        let Some(grant) = after.lease(&acquired.identity, &acquired.lease_id) else { continue };
        if watch.leases.contains_key(&acquired.lease_id) {
            continue;
        }
        let released = |tier: Tier, unit: u32| {
            let authorised = |it: &Authorised| it.instance == grant.instance && it.units.contains(&unit);
            tier == Tier::Memory && watch.authorised.values().any(authorised)
        };
        let existing = w.nodes.iter().flat_map(|node| {
            let replicas = node.disks.borrow().replicas(&grant.instance);
            replicas.into_iter().map(|(tier, unit)| (node.at, tier, unit))
        });
        let replicas = existing.filter(|(_, tier, unit)| !released(*tier, *unit)).collect();
        let protected = Protected { identity: grant.identity, instance: grant.instance, replicas };
        watch.leases.insert(acquired.lease_id.clone(), protected);
    }
    let ended: Vec<_> = watch
        .leases
        .iter()
        .filter(|(id, lease)| after.lease(&lease.identity, id).is_none())
        .map(|(id, _)| id.clone())
        .collect();
    for id in ended {
        watch.leases.remove(&id);
        let released = folded.envelope.commands().iter().zip(folded.outcomes).any(|(record, outcome)| {
            let this = matches!(&record.command, Command::ReleaseLease(release) if release.lease_id == id);
            this && matches!(outcome, Ok(ballast_schemas::Reply::LeaseEnded { lapsed: false }))
        });
        watch.ended.insert(id, !released);
    }
}

/// The units of an authorised batch, counted as the migration machine counts: those to be hot first, then those to be cold.
fn units_of(w: &W, folded: &Folded<'_>, operation: &WeightOperation, release: &AuthorizeRelease) -> BTreeSet<u32> {
    let manifest = folded.after.revision(&operation.identity).and_then(|record| record.manifest.as_ref());
    let Some(content) = manifest.and_then(|manifest| w.content(&manifest.sha256)) else { return BTreeSet::new() };
    let units: Vec<(u64, &Digest)> =
        content.affinity.units.iter().map(|unit| (unit.logical_bytes, &unit.affinity_id)).collect();
    let is_hot: Vec<bool> = match (operation.target, operation.target_hot_ratio) {
        (Some(Residency::Hot), _) => vec![true; units.len()],
        (Some(Residency::Mixed), Some(ratio)) => {
            let hot = plan_hot_units(&units, ratio.ppm());
            (0..content.len()).map(|unit| hot.get(unit)).collect()
        }
        _ => vec![false; units.len()],
    };
    let of = |hot: bool| (0..content.len()).filter(move |unit| is_hot.get(*unit as usize) == Some(&hot));
    let order: Vec<u32> = of.clone()(true).chain(of.clone()(false)).collect();
    let promote = of(true).count();
    let from = usize::try_from(release.cursor).unwrap_or(usize::MAX);
    let count = release.unit_count as usize;
    let range =
        if from < order.len() { from.max(promote)..order.len().min(from + count) } else { promote..order.len() };
    order.get(range).unwrap_or_default().iter().copied().collect()
}

pub(super) fn replica_ends(
    w: &W,
    watch: &Watch,
    node: &Node,
    instance: &InstanceId,
    tier: Tier,
    unit: u32,
    cause: Cause,
) {
    let replica = (node.at, tier, unit);
    let holder =
        watch.leases.iter().find(|(_, lease)| lease.instance == *instance && lease.replicas.contains(&replica));
    if let Some((lease, _)) = holder {
        let message = format!(
            "the {tier:?} replica of unit {unit} of {} on {} ends ({cause:?}) under lease {lease}",
            short(instance),
            node.id
        );
        w.violate(NAME, message);
    }
}
