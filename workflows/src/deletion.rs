//! Whole-group deletion as the log sees it: its start, its end, and the tombstone's (RFC, Delete and Ordinary Eviction).
//! How it is carried out is in `machines/deletion.rs`.

use ballast_schemas::{
    Availability, DeletionFinished, ErrorCode, EventBody, NodeId, OperationKind, OperationStatus, Outcome,
    PurgeTombstone, Reply, Residency, RevisionIdentity,
};

use crate::fold::{Fold, reject};
use crate::operation::{End, NewOperation};
use crate::revision::{claim_busy, not_ready};

impl Fold<'_> {
    /// DELETING with its operation, in one change. The caller has checked that nothing protects the revision.
    pub fn start_deletion(&mut self, identity: &RevisionIdentity) {
        let Some(revision) = self.state.record.revisions.get(identity) else { return };
        let manifest = revision.metadata.manifest.as_ref();
        let operation = NewOperation {
            total_units: manifest.map_or(0, |manifest| manifest.affinity_count.into()),
            total_bytes: manifest.map_or(0, |manifest| manifest.logical_bytes),
            ..NewOperation::on(&revision.metadata, OperationKind::Deleting)
        };
        let operation_id = self.add_operation(operation);
        self.change_revision(identity, |revision| {
            revision.metadata.availability = Availability::Deleting;
            revision.metadata.operation_id = Some(operation_id.clone());
            revision.import = None;
        });
        self.emit_revision(identity, |revision| EventBody::RevisionDeleting { revision });
        self.emit_started(Some(&operation_id));
    }

    pub fn deletion_finished(&mut self, command: &DeletionFinished) -> Outcome {
        let id = &command.operation_id;
        let (_, operation) = self.operation(id)?;
        let identity = operation.view.identity.clone();
        if operation.view.kind != OperationKind::Deleting {
            return reject(
                ErrorCode::Conflict,
                format!("operation {id} is {}; DeletionFinished ends only a DELETING one", operation.view.kind),
            );
        }
        if operation.view.status == OperationStatus::Succeeded && operation.view.epoch == command.epoch {
            // A repeat.
            return self.revision_reply(&identity);
        }
        let (key, _) = self.claimed(id, command.epoch)?;
        self.end_operation(key, End::new(OperationStatus::Succeeded), |revision| {
            revision.metadata.availability = Availability::Deleted;
            revision.metadata.residency = Residency::Absent;
            revision.metadata.observed_hot_ppm = 0;
            revision.owed = command.owed.clone();
        });
        self.emit_revision(&identity, |revision| EventBody::RevisionDeleted { revision });
        self.base_deleted(&identity);
        self.revision_reply(&identity)
    }

    pub fn purge_tombstone(&mut self, command: &PurgeTombstone) -> Outcome {
        let identity = &command.identity;
        let revision = self.revision(identity)?;
        if revision.metadata.availability != Availability::Deleted {
            return Err(not_ready(identity, revision.metadata.availability, "DELETED"));
        }
        if !revision.owed.is_empty() {
            // Their bytes must still be recognised when they come back.
            let nodes: Vec<&str> = revision.owed.iter().map(NodeId::as_str).collect();
            let message = format!(
                "lost nodes still owe the deletion of {identity}: {}; its tombstone must stay to recognise their bytes",
                nodes.join(", ")
            );
            return reject(ErrorCode::NotReady, message);
        }
        let claim = self.open_claim(identity).filter(|claim| claim.base == *identity || claim.target == *identity);
        if let Some(claim) = claim {
            return Err(claim_busy(claim, "wait for its end or abort it"));
        }
        if let Some(revision) = self.state.record.revisions.remove(identity) {
            self.state.index.remove_revision(&revision);
        }
        Ok(Reply::Done)
    }
}
