//! The aggregate root: one weight revision. Its record, and the commands that change it once it is published: policy,
//! removal, loss and recovery, purge (RFC, State Model; Residency Policy; Delete and Ordinary Eviction).

use std::collections::BTreeMap;

use ballast_schemas::{
    Availability, Digest, ErrorCode, EventBody, HotRatio, ImportSession, LeaseGrant, LeaseId, LogPosition, LogTime,
    MigrationMode, MigrationTrigger, NodeEvidence, NodeId, OperationError, OperationKind, OperationStatus, Outcome,
    ParticipantId, Rejection, Remove, Residency, RevisionDegraded, RevisionIdentity, RevisionRecovered, Shared,
    UpdatePolicy, WeightRevisionMetadata, WeightStoragePolicy, WriterId,
};
use serde::{Deserialize, Serialize};

use crate::fold::{Fold, details};
use crate::operation::{End, OperationKey};
use crate::table::Settle;

/// Everything the log says of one revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Revision {
    pub metadata: WeightRevisionMetadata,
    /// IMPORTING only; boxed because few revisions are.
    pub import: Option<Box<Import>>,
    /// Digest of the manifest reference as committed. Set once at READY and never again: a tombstone with it was readable
    /// once, one without never was.
    pub published: Option<Digest>,
    pub leases: BTreeMap<LeaseId, Lease>,
    /// Whether the initial convergence to the preferred residency is over.
    pub converged: bool,
    /// What the last successful migration was asked for: a split that the model can not satisfy exactly is not tried again
    /// on every access.
    pub settled: Option<Settled>,
    /// When the last migration ended, for the cooldown.
    pub last_migration: Option<LogTime>,
    /// When a lease was last granted.
    pub last_access: LogTime,
    /// Memory pressure made it colder, and nobody has asked for anything else since.
    #[serde(default)]
    pub pressed: bool,
    /// Its last demotion by pressure found that it can not be: not tried again until it was moved otherwise.
    #[serde(default)]
    pub stays_hot: bool,
    /// It has been COLD: all of it has a copy on disk.
    #[serde(default)]
    pub on_disk: bool,
    /// The last log position that authorised an effect on these bytes: older evidence does not count.
    pub effect_fence: LogPosition,
    /// Lost nodes that still owe the deletion of their copies.
    pub owed: Vec<NodeId>,
}

impl Settle<RevisionIdentity> for Revision {
    fn settle(&mut self, key: &mut RevisionIdentity, before: Option<&RevisionIdentity>) {
        if let Some(before) = before {
            *key = key.sharing(before);
        }
        let metadata = &mut self.metadata;
        if metadata.identity == *key {
            metadata.identity = key.clone();
        }
        if let Some(manifest) = metadata.manifest.as_mut().filter(|it| it.group_id == metadata.instance.group_id) {
            manifest.group_id = metadata.instance.group_id.clone();
        }
    }
}

/// An open import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Import {
    pub session: ImportSession,
    /// As the caller gave it: a repeated begin must carry the same.
    pub policy: Option<WeightStoragePolicy>,
    pub logical_bytes: u64,
    pub unit_count: u32,
    /// Who has to bring a part; none where there is one writer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parts: BTreeMap<ParticipantId, Part>,
    /// The last runs that have coordinated it, the latest last; none where there is one writer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub coordinators: Vec<WriterId>,
}

/// One participant of an open import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Part {
    /// Of the run that is at work; 0 before the first join.
    pub epoch: u64,
    pub writer_id: Option<WriterId>,
    pub heard_at: LogTime,
    pub done: bool,
}

/// An active lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lease {
    /// As its holder sees it; its length is that of the grant or of the last renewal that moved the end.
    pub grant: Shared<LeaseGrant>,
    /// As acquired: a repeated acquire must carry the same.
    pub acquired_ttl_ms: u64,
    /// Log position of the grant.
    pub granted_at: LogPosition,
    /// When the clock looks at it next: never after its end. A renewal leaves that moment where it was, so that a lease which
    /// is renewed often costs no more than one that is not.
    pub next_look: LogTime,
}

impl Lease {
    pub fn expires_at(&self) -> LogTime {
        self.grant.expires_at
    }
}

/// What a migration was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settled {
    pub target: Residency,
    pub ratio: Option<HotRatio>,
}

impl Settled {
    /// Where a policy wants its revision.
    pub fn preferred(policy: &WeightStoragePolicy) -> Self {
        let mixed = policy.preferred_residency == Residency::Mixed;
        Self { target: policy.preferred_residency, ratio: mixed.then_some(policy.mixed_hot_ratio) }
    }
}

impl Revision {
    /// Log position that names its current bytes.
    pub fn position(&self) -> LogPosition {
        self.metadata.instance.position
    }

    /// The active MIGRATING, REPAIRING or DELETING operation.
    pub fn operation_key(&self) -> Option<OperationKey> {
        OperationKey::of(self.metadata.operation_id.as_ref()?)
    }

    /// Whether observed residency is `goal`, or the nearest to it that the last migration could reach.
    pub fn is_at(&self, goal: Settled) -> bool {
        match goal.target {
            Residency::Mixed => self.settled == Some(goal),
            target => self.metadata.residency == target,
        }
    }

    /// Whether a read finds it colder than the policy prefers.
    pub fn is_colder_than_preferred(&self) -> bool {
        let policy = &self.metadata.policy;
        match policy.preferred_residency {
            Residency::Hot => self.metadata.residency != Residency::Hot,
            Residency::Mixed => {
                !self.is_at(Settled::preferred(policy)) && self.metadata.observed_hot_ppm < policy.mixed_hot_ratio.ppm()
            }
            _ => false,
        }
    }

    /// STALE_GENERATION unless the caller saw the current record.
    pub fn expect_generation(&self, expected: u64) -> Result<(), Rejection> {
        let current = self.metadata.metadata_generation;
        let identity = &self.metadata.identity;
        if current == u64::MAX {
            let message =
                format!("revision {identity} has used up its metadata generations; publish a new generation of it");
            return Err(Rejection::new(ErrorCode::GenerationExhausted, message));
        }
        if expected != current {
            let message = format!(
                "revision {identity} is at metadata generation {current}, expected {expected}; read it again and decide anew"
            );
            return Err(Rejection::new(ErrorCode::StaleGeneration, message)
                .with_details(details([("expected", expected.into()), ("current", current.into())])));
        }
        Ok(())
    }

    /// Whether `expected` is the current generation or the one before: what a repeat of the last change carries.
    pub fn is_repeat_of_last_change(&self, expected: u64) -> bool {
        let current = self.metadata.metadata_generation;
        expected == current || expected.checked_add(1) == Some(current)
    }

    /// BUSY with the active operation named, if there is one.
    pub fn expect_no_operation(&self) -> Result<(), Rejection> {
        let Some(operation_id) = &self.metadata.operation_id else { return Ok(()) };
        let message = format!(
            "revision {} has the active operation {operation_id}; wait for its end or cancel it",
            self.metadata.identity
        );
        Err(Rejection::new(ErrorCode::Busy, message)
            .with_details(details([("operation_id", operation_id.as_str().into())])))
    }

    /// BUSY with the leases counted, if there is one.
    pub fn expect_no_lease(&self, clock: LogTime) -> Result<(), Rejection> {
        let Some(last) = self.leases.values().map(Lease::expires_at).max() else { return Ok(()) };
        let count = self.leases.len();
        let message = format!(
            "revision {} has {count} active leases, the last of which ends in {} ms unless renewed; wait for their release",
            self.metadata.identity,
            last.since(clock)
        );
        Err(Rejection::new(ErrorCode::Busy, message).with_details(details([
            ("active_lease_count", count.into()),
            ("last_lease_expiry_ms", last.since(clock).into()),
        ])))
    }

    /// NOT_READY unless published and whole.
    pub fn expect_ready(&self) -> Result<(), Rejection> {
        let availability = self.metadata.availability;
        if availability == Availability::Ready {
            return Ok(());
        }
        Err(not_ready(&self.metadata.identity, availability, "READY"))
    }
}

/// NOT_READY with the availability found.
pub(crate) fn not_ready(identity: &RevisionIdentity, found: Availability, expected: &str) -> Rejection {
    let advice = match found {
        Availability::Importing => "; commit or abort its import first",
        Availability::Degraded => "; it lost replicas and must be repaired first",
        Availability::Ready | Availability::Deleting | Availability::Deleted => "",
    };
    Rejection::new(ErrorCode::NotReady, format!("revision {identity} is {found}, expected {expected}{advice}"))
        .with_details(details([("availability", found.name().into())]))
}

impl Fold<'_> {
    pub fn update_policy(&mut self, command: &UpdatePolicy) -> Outcome {
        let identity = &command.identity;
        let revision = self.revision(identity)?;
        let metadata = &revision.metadata;
        if !matches!(metadata.availability, Availability::Ready | Availability::Degraded) {
            return Err(not_ready(identity, metadata.availability, "READY or DEGRADED"));
        }
        if metadata.policy == command.policy && revision.is_repeat_of_last_change(command.expected_metadata_generation)
        {
            return self.revision_reply(identity);
        }
        self.expect_not_retired(revision)?;
        self.expect_free(revision)?;
        revision.expect_generation(command.expected_metadata_generation)?;
        self.step_aside(identity);
        let revision = self.revision(identity)?;
        // AUTO converges by itself; the other modes wait to be asked (RFC, Migration Mode).
        let goal = Settled::preferred(&command.policy);
        let converge = command.policy.migration_mode == MigrationMode::Auto
            && revision.metadata.availability == Availability::Ready
            && !revision.is_at(goal);
        let operation_id = converge.then(|| self.add_migration(identity, goal, MigrationTrigger::Policy));
        self.change_revision(identity, |revision| {
            revision.metadata.policy = command.policy;
            revision.metadata.operation_id = operation_id.clone();
        });
        self.emit_revision(identity, |revision| EventBody::PolicyUpdated { revision });
        self.emit_started(operation_id.as_ref());
        self.revision_reply(identity)
    }

    pub fn remove(&mut self, command: &Remove) -> Outcome {
        let identity = &command.identity;
        let revision = self.revision(identity)?;
        match revision.metadata.availability {
            // A retry: what was asked for is done or under way.
            Availability::Deleting | Availability::Deleted => return self.revision_reply(identity),
            Availability::Importing => {
                return Err(not_ready(identity, Availability::Importing, "READY or DEGRADED"));
            }
            Availability::Ready | Availability::Degraded => {}
        }
        if let Some(claim) =
            self.open_claim(identity).filter(|claim| claim.base == *identity || claim.target == *identity)
        {
            return Err(claim_busy(claim, "wait for its end or abort it"));
        }
        let revision = self.revision(identity)?;
        revision.expect_no_lease(self.clock())?;
        self.expect_free(revision)?;
        revision.expect_generation(command.expected_metadata_generation)?;
        self.step_aside(identity);
        self.start_deletion(identity);
        self.revision_reply(identity)
    }

    pub fn revision_degraded(&mut self, command: &RevisionDegraded) -> Outcome {
        let identity = &command.identity;
        let revision = self.revision(identity)?;
        match revision.metadata.availability {
            Availability::Degraded => return self.revision_reply(identity),
            Availability::Ready => {}
            found => return Err(not_ready(identity, found, "READY")),
        }
        expect_evidence(revision, &command.instance, &command.evidence)?;
        let asked = |node: &&NodeId| !command.evidence.iter().any(|evidence| evidence.node == **node);
        if let Some(node) = revision.metadata.placement.iter().find(asked) {
            let message =
                format!("the evidence says nothing of node {node}, which may hold some of it; ask it as well");
            return Err(Rejection::new(ErrorCode::InvalidArgument, message));
        }
        // What it was migrating to can not be reached: repair comes first. A repair does what can be done, and says what
        // can not.
        let repairs = |key: &OperationKey| {
            let operation = self.state.record.operations.get(key);
            operation.is_some_and(|operation| operation.view.kind == OperationKind::Repairing)
        };
        if let Some(key) = revision.operation_key().filter(|key| !repairs(key)) {
            let error = OperationError {
                code: ErrorCode::NotReady,
                message: format!("the revision degraded: {}", command.reason),
            };
            self.end_or_request(key, End { error: Some(error), ..End::new(OperationStatus::Superseded) });
        }
        self.change_revision(identity, |revision| {
            revision.metadata.availability = Availability::Degraded;
            revision.settled = None;
            revision.on_disk = false;
        });
        self.emit_revision(identity, |revision| EventBody::RevisionDegraded {
            revision,
            reason: command.reason.clone(),
        });
        self.target_degraded(identity);
        self.revision_reply(identity)
    }

    pub fn revision_recovered(&mut self, command: &RevisionRecovered) -> Outcome {
        let identity = &command.identity;
        let revision = self.revision(identity)?;
        match revision.metadata.availability {
            Availability::Ready => return self.revision_reply(identity),
            Availability::Degraded => {}
            found => return Err(not_ready(identity, found, "DEGRADED")),
        }
        expect_evidence(revision, &command.instance, &command.evidence)?;
        expect_readable(command.residency)?;
        self.recover(identity, command.residency, command.observed_hot_ppm);
        self.revision_reply(identity)
    }
}

/// BUSY naming the claim.
pub(crate) fn claim_busy(claim: &ballast_schemas::ReplacementClaim, advice: &str) -> Rejection {
    let message = format!(
        "lineage {} is claimed by replacement {:?} of generation {} by {} ({}, {}); {advice}",
        claim.lineage,
        claim.request_id,
        claim.base.weight_generation,
        claim.target.weight_generation,
        claim.mode,
        claim.phase
    );
    Rejection::new(ErrorCode::Busy, message).with_details(details([
        ("request_id", claim.request_id.as_str().into()),
        ("phase", claim.phase.name().into()),
        ("target_generation", claim.target.weight_generation.into()),
        ("operation_id", claim.operation_id.as_str().into()),
    ]))
}

/// Evidence counts only about these bytes and only if it was given under the last authorised effect or a later one.
pub(crate) fn expect_evidence(
    revision: &Revision,
    instance: &ballast_schemas::InstanceId,
    evidence: &[NodeEvidence],
) -> Result<(), Rejection> {
    let metadata = &revision.metadata;
    if *instance != metadata.instance {
        let message = format!(
            "the evidence is about instance {instance}, expected {}; look at the nodes again",
            metadata.instance
        );
        return Err(Rejection::new(ErrorCode::Conflict, message));
    }
    if evidence.is_empty() {
        return Err(Rejection::new(ErrorCode::InvalidArgument, "evidence names no node; ask every holder first"));
    }
    match evidence.iter().find(|evidence| evidence.fence < revision.effect_fence) {
        Some(stale) => {
            let message = format!(
                "the evidence of node {} is under fence {}, older than the last effect at {}; ask it again",
                stale.node, stale.fence, revision.effect_fence
            );
            Err(Rejection::new(ErrorCode::Conflict, message))
        }
        None => Ok(()),
    }
}

/// READY corresponds only to HOT, COLD or MIXED (RFC, State Model).
pub(crate) fn expect_readable(residency: Residency) -> Result<(), Rejection> {
    match residency {
        Residency::Hot | Residency::Cold | Residency::Mixed => Ok(()),
        found => Err(Rejection::new(
            ErrorCode::InvalidArgument,
            format!("residency {found} is not that of a readable revision; expected HOT, COLD or MIXED"),
        )),
    }
}

#[cfg(test)]
mod tests;
