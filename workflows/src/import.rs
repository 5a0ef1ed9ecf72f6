//! Import sessions: begin, renew, commit, abort, expiry (RFC, Import and READY Publication). A session that ends without a
//! commit becomes a deletion; its tombstone was never READY and does not block the next import.

use std::collections::BTreeSet;

use ballast_schemas::{
    AbortImport, Availability, BallastError, BeginImport, BeginSharedImport, ClaimPhase, CommitImport, Coordinator,
    Digest, ErrorCode, EventBody, IMPORT_TTL_MS_MAX, ImportSession, InstanceId, ManifestRef, MigrationTrigger, NodeId,
    Outcome, Receipt, Rejection, RenewImport, Reply, Residency, RevisionIdentity, SessionId, UNITS_MAX, UpsertMode,
    WeightRevisionMetadata, WeightStoragePolicy,
};

use crate::fold::{Fold, details, reject};
use crate::participants;
use crate::revision::{Import, Revision, Settled, claim_busy};
use crate::state::State;

/// Nodes that one import may be placed on.
const PLACEMENT_NODES_MAX: usize = 256;

impl State {
    /// The open import session of a revision, if it is this one.
    ///
    /// # Errors
    /// `NOT_FOUND`, `CONFLICT` when another session is open or the revision is published, `LEASE_EXPIRED` when the session
    /// has ended: whoever asks hears the same, before the log and from it.
    pub fn open_import(
        &self,
        identity: &RevisionIdentity,
        session_id: &SessionId,
    ) -> Result<&ImportSession, BallastError> {
        Ok(&self.open(identity, session_id)?.session)
    }

    /// As [`State::open_import`], for whoever is about to speak for the session.
    ///
    /// # Errors
    /// Also those of a run that is not the session's coordinator any more.
    pub fn coordinated_import(
        &self,
        identity: &RevisionIdentity,
        session_id: &SessionId,
        coordinator: Option<&Coordinator>,
    ) -> Result<&ImportSession, BallastError> {
        Ok(&self.coordinated(identity, session_id, coordinator)?.session)
    }

    /// No session but this one is open for the revision.
    ///
    /// # Errors
    /// `BUSY` naming the session that is.
    pub fn expect_no_other_import(
        &self,
        identity: &RevisionIdentity,
        session_id: &SessionId,
    ) -> Result<(), BallastError> {
        self.expect_not_busy(identity, session_id).map_err(BallastError::from)
    }

    fn expect_not_busy(&self, identity: &RevisionIdentity, session_id: &SessionId) -> Result<(), Rejection> {
        let Some(session) = self.import(identity).filter(|session| session.session_id != *session_id) else {
            return Ok(());
        };
        let left_ms = session.expires_at.since(self.log_clock());
        let message = format!(
            "revision {identity} is being imported by session {}, which ends in {left_ms} ms unless renewed; begin again then",
            session.session_id
        );
        Err(Rejection::new(ErrorCode::Busy, message).with_details(details([
            ("session_id", session.session_id.as_str().into()),
            ("session_expiry_ms", left_ms.into()),
        ])))
    }

    pub(crate) fn open(&self, identity: &RevisionIdentity, session_id: &SessionId) -> Result<&Import, Rejection> {
        let revision = self.existing(identity)?;
        let Some(import) = &revision.import else {
            let found = revision.metadata.availability;
            if revision.published.is_some() {
                return Err(Rejection::new(
                    ErrorCode::Conflict,
                    format!("revision {identity} is published ({found}); its import is over"),
                ));
            }
            let message = format!("the import session of revision {identity} has ended ({found}); begin a new import");
            return Err(Rejection::new(ErrorCode::LeaseExpired, message));
        };
        if import.session.session_id != *session_id {
            let message = format!(
                "revision {identity} is being imported by session {}, not by {session_id}",
                import.session.session_id
            );
            return Err(Rejection::new(ErrorCode::Conflict, message));
        }
        Ok(import)
    }

    pub(crate) fn coordinated(
        &self,
        identity: &RevisionIdentity,
        session_id: &SessionId,
        coordinator: Option<&Coordinator>,
    ) -> Result<&Import, Rejection> {
        let import = self.open(identity, session_id)?;
        import.expect_coordinator(coordinator)?;
        Ok(import)
    }
}

impl Fold<'_> {
    /// `shared`: the same import's, where there are several writers.
    pub fn begin_import(&mut self, command: &BeginImport, shared: Option<&BeginSharedImport>) -> Outcome {
        let before = self.state.record.revisions.before(&command.identity);
        let identity = &before.map_or_else(|| command.identity.clone(), |before| command.identity.sharing(before));
        expect_announcement(command)?;
        let mut generation = 1;
        if let Some(revision) = self.state.record.revisions.get(identity) {
            if revision.import.is_some() {
                return self.begun_before(command, shared);
            }
            match revision.metadata.availability {
                Availability::Deleting => {
                    let operation =
                        revision.metadata.operation_id.as_ref().map(ToString::to_string).unwrap_or_default();
                    let message = format!(
                        "the remains of revision {identity} are being deleted by operation {operation}; begin again when it has ended"
                    );
                    return Err(Rejection::new(ErrorCode::Busy, message)
                        .with_details(details([("operation_id", operation.into())])));
                }
                // Its remains are gone and nobody ever read it: it may be imported anew.
                Availability::Deleted if revision.published.is_none() => {
                    generation = revision.metadata.metadata_generation.saturating_add(1);
                }
                found => {
                    let message = format!("revision {identity} exists ({found}); publish a higher generation instead");
                    return Err(Rejection::new(ErrorCode::Conflict, message)
                        .with_details(details([("availability", found.name().into())])));
                }
            }
        }
        self.expect_above_watermark(identity)?;
        let policy = self.enter_lineage(command)?;
        let instance = InstanceId { group_id: identity.group_id(), position: self.position };
        let session = ImportSession {
            session_id: command.session_id.clone(),
            identity: identity.clone(),
            instance: instance.clone(),
            placement: command.placement.clone(),
            placement_digest: command.placement_digest,
            ttl_ms: command.ttl_ms,
            expires_at: self.clock().plus_ms(command.ttl_ms),
            epoch: u64::from(shared.is_some()),
        };
        let metadata = WeightRevisionMetadata {
            identity: identity.clone(),
            instance,
            manifest: None,
            availability: Availability::Importing,
            residency: Residency::Unknown,
            observed_hot_ppm: 0,
            policy,
            operation_id: None,
            retired: false,
            metadata_generation: generation,
            placement: command.placement.clone(),
            created_unix_ms: self.unix_ms,
            updated_unix_ms: self.unix_ms,
            last_accessed_unix_ms: 0,
        };
        let import = Import {
            session: session.clone(),
            policy: command.policy,
            logical_bytes: command.logical_bytes,
            unit_count: command.unit_count,
            parts: shared.map(|shared| participants::declared(shared, self.clock())).unwrap_or_default(),
            coordinators: shared.map(|shared| shared.writer_id.clone()).into_iter().collect(),
        };
        let revision = Revision {
            metadata,
            import: Some(Box::new(import)),
            published: None,
            leases: Default::default(),
            converged: false,
            settled: None,
            last_migration: None,
            last_access: self.clock(),
            pressed: false,
            stays_hot: false,
            on_disk: false,
            effect_fence: self.position,
            owed: Vec::new(),
        };
        if let Some(before) = self.state.record.revisions.remove(identity) {
            self.state.index.remove_revision(&before);
        }
        self.state.index.add_revision(&revision);
        self.state.record.revisions.insert(identity.clone(), revision);
        self.emit_revision(identity, |revision| EventBody::RevisionImporting { revision });
        self.target_begun(identity);
        Ok(Reply::Import(Box::new(session)))
    }

    /// Somebody's session is open already: the caller's own, or another one's.
    fn begun_before(&mut self, command: &BeginImport, shared: Option<&BeginSharedImport>) -> Outcome {
        self.state.expect_not_busy(&command.identity, &command.session_id)?;
        let import = self.state.open(&command.identity, &command.session_id)?;
        let session = &import.session;
        let participants = shared.map_or(&[][..], |shared| &shared.participants);
        // Where it was placed is the gateway's choice, so a repeat may name other nodes: the first choice stands.
        let same = session.placement_digest == command.placement_digest
            && session.ttl_ms == command.ttl_ms
            && import.policy == command.policy
            && import.logical_bytes == command.logical_bytes
            && import.unit_count == command.unit_count
            && import.parts.len() == participants.len()
            && participants.iter().all(|participant| import.parts.contains_key(participant));
        if !same {
            return reject(
                ErrorCode::Conflict,
                format!("session {} was begun for other content; choose a new session id", session.session_id),
            );
        }
        match shared {
            None => Ok(Reply::Import(Box::new(session.clone()))),
            Some(shared) => self.coordinate(shared),
        }
    }

    fn expect_above_watermark(&self, identity: &RevisionIdentity) -> Result<(), Rejection> {
        let watermark = self.state.watermark(&identity.lineage());
        if identity.weight_generation > watermark {
            return Ok(());
        }
        let message = format!(
            "generation {} of lineage {} is not above the watermark {watermark}; publish a higher generation",
            identity.weight_generation,
            identity.lineage()
        );
        Err(Rejection::new(ErrorCode::Conflict, message).with_details(details([("watermark", watermark.into())])))
    }

    /// While a replacement is under way only its target enters, and in DELETE_FIRST only after the base is gone
    /// (RFC, safety invariant 12). The policy: the caller's, else the replacement's, else the base's, else the cluster's.
    fn enter_lineage(&self, command: &BeginImport) -> Result<WeightStoragePolicy, Rejection> {
        let identity = &command.identity;
        let Some(claim) = self.open_claim(identity) else {
            return Ok(command.policy.unwrap_or(self.state.config().default_policy));
        };
        if claim.target != *identity {
            return Err(claim_busy(claim, "only its target may be imported until it has ended"));
        }
        if claim.mode == UpsertMode::DeleteFirst && claim.phase == ClaimPhase::DeletingBase {
            let message =
                format!("base {} is not deleted yet; begin the import when the claim is TARGET_IMPORTING", claim.base);
            return Err(Rejection::new(ErrorCode::NotReady, message).with_details(details([
                ("phase", claim.phase.name().into()),
                ("operation_id", claim.operation_id.as_str().into()),
            ])));
        }
        let of_base = || self.state.revision(&claim.base).map(|base| base.policy);
        Ok(command.policy.or(claim.policy).or_else(of_base).unwrap_or(self.state.config().default_policy))
    }

    pub fn renew_import(&mut self, command: &RenewImport) -> Outcome {
        let RenewImport { identity, session_id, coordinator } = command;
        let ttl_ms = self.state.coordinated(identity, session_id, coordinator.as_ref())?.session.ttl_ms;
        let expires_at = self.clock().plus_ms(ttl_ms);
        self.edit_revision(identity, |revision| {
            if let Some(import) = &mut revision.import {
                import.session.expires_at = import.session.expires_at.max(expires_at);
            }
        });
        let session = &self.state.open(identity, session_id)?.session;
        Ok(Reply::Import(Box::new(session.clone())))
    }

    pub fn commit_import(&mut self, command: &CommitImport) -> Outcome {
        let identity = &command.identity;
        let revision = self.revision(identity)?;
        if let Some(manifest) = &revision.metadata.manifest {
            if *manifest == command.manifest && revision.metadata.availability != Availability::Deleted {
                return self.revision_reply(identity);
            }
            let message = format!(
                "revision {identity} is {} with manifest {}, not {}; publish other content under a higher generation",
                revision.metadata.availability, manifest.sha256, command.manifest.sha256
            );
            return reject(ErrorCode::Conflict, message);
        }
        let import = self.state.coordinated(identity, &command.session_id, command.coordinator.as_ref())?;
        import.expect_all_done(self.clock())?;
        expect_summary(import, command)?;
        expect_receipts(&import.session, command)?;
        self.expect_above_watermark(identity)?;
        let policy = self.revision(identity)?.metadata.policy;
        let goal = Settled::preferred(&policy);
        let published = manifest_digest(&command.manifest);
        // READY + HOT and the initial migration are one durable mutation (RFC, Import and READY Publication). The manifest
        // goes in first, so that the operation knows how much there is to do.
        let group_id = self.revision(identity)?.metadata.instance.group_id.clone();
        let manifest = ManifestRef { group_id, ..command.manifest.clone() };
        self.edit_revision(identity, |revision| revision.metadata.manifest = Some(manifest));
        let operation_id =
            (goal.target != Residency::Hot).then(|| self.add_migration(identity, goal, MigrationTrigger::Initial));
        self.change_revision(identity, |revision| {
            revision.import = None;
            revision.published = Some(published);
            revision.metadata.availability = Availability::Ready;
            revision.metadata.residency = Residency::Hot;
            revision.metadata.observed_hot_ppm = 1_000_000;
            revision.metadata.operation_id = operation_id.clone();
            revision.settled = Some(Settled { target: Residency::Hot, ratio: None });
            revision.converged = operation_id.is_none();
        });
        self.emit_revision(identity, |revision| EventBody::RevisionReady { revision });
        self.emit_started(operation_id.as_ref());
        self.published(identity);
        self.revision_reply(identity)
    }

    pub fn abort_import(&mut self, command: &AbortImport) -> Outcome {
        let identity = &command.identity;
        let revision = self.revision(identity)?;
        let ended = matches!(revision.metadata.availability, Availability::Deleting | Availability::Deleted);
        if ended && revision.published.is_none() {
            return self.revision_reply(identity);
        }
        self.state.coordinated(identity, &command.session_id, command.coordinator.as_ref())?;
        self.end_import(identity, "its importer aborted it");
        self.revision_reply(identity)
    }

    /// A session whose time has come.
    pub fn expire_import(&mut self, identity: &RevisionIdentity) {
        self.end_import(identity, "its session expired");
    }

    /// The bytes go; a replacement that waited for them hears of it.
    pub fn end_import(&mut self, identity: &RevisionIdentity, why: &str) {
        self.start_deletion(identity);
        self.target_given_up(identity, why);
    }
}

/// Digest of a manifest reference: what is immutable after READY.
pub(crate) fn manifest_digest(manifest: &ballast_schemas::ManifestRef) -> Digest {
    let numbers = [
        manifest.payload_count.to_be_bytes(),
        manifest.logical_bytes.to_be_bytes(),
        u64::from(manifest.affinity_count).to_be_bytes(),
    ]
    .concat();
    ballast_schemas::hash_list([
        manifest.key.as_bytes(),
        manifest.sha256.as_bytes().as_slice(),
        manifest.group_id.as_str().as_bytes(),
        manifest.payload_keys_sha256.as_bytes().as_slice(),
        numbers.as_slice(),
        manifest.affinity_digest.as_bytes().as_slice(),
    ])
}

fn expect_announcement(command: &BeginImport) -> Result<(), Rejection> {
    let invalid = |message: String| Err(Rejection::new(ErrorCode::InvalidArgument, message));
    if !(1..=IMPORT_TTL_MS_MAX).contains(&command.ttl_ms) {
        return invalid(format!(
            "an import session of {} ms is not possible; give 1 to {IMPORT_TTL_MS_MAX} ms",
            command.ttl_ms
        ));
    }
    if !(1..=UNITS_MAX).contains(&command.unit_count) {
        return invalid(format!("an import of {} units is not possible; 1 to {UNITS_MAX} are", command.unit_count));
    }
    let nodes: BTreeSet<&NodeId> = command.placement.iter().collect();
    if nodes.is_empty() || nodes.len() != command.placement.len() || nodes.len() > PLACEMENT_NODES_MAX {
        return invalid(format!(
            "the placement names {} nodes, {} of them different; give 1 to {PLACEMENT_NODES_MAX} different ones",
            command.placement.len(),
            nodes.len()
        ));
    }
    Ok(())
}

/// The manifest is this revision's, and of what was announced.
fn expect_summary(import: &Import, command: &CommitImport) -> Result<(), Rejection> {
    let (identity, manifest) = (&command.identity, &command.manifest);
    if manifest.key != identity.manifest_key() || manifest.group_id != identity.group_id() {
        let message = format!(
            "the manifest reference names {} in {}, expected {} in {}",
            manifest.key,
            manifest.group_id,
            identity.manifest_key(),
            identity.group_id()
        );
        return Err(Rejection::new(ErrorCode::InvalidArgument, message));
    }
    if manifest.affinity_count != import.unit_count || manifest.logical_bytes != import.logical_bytes {
        let message = format!(
            "the manifest has {} units of {} bytes, the import announced {} of {}; begin an import for what is to be published",
            manifest.affinity_count, manifest.logical_bytes, import.unit_count, import.logical_bytes
        );
        return Err(Rejection::new(ErrorCode::Conflict, message));
    }
    Ok(())
}

/// Every node of the placement has sealed this session with this manifest. What is missing or different is named.
fn expect_receipts(session: &ImportSession, command: &CommitImport) -> Result<(), Rejection> {
    let given: BTreeSet<&NodeId> = command.receipts.iter().map(|receipt| &receipt.node).collect();
    let missing: Vec<&str> =
        session.placement.iter().filter(|node| !given.contains(node)).map(NodeId::as_str).collect();
    if !missing.is_empty() {
        let message =
            format!("no receipt from {}; every node of the placement must seal before the commit", missing.join(", "));
        return Err(Rejection::new(ErrorCode::NotReady, message).with_details(details([("missing", missing.into())])));
    }
    let wrong = |receipt: &Receipt| {
        if !session.placement.contains(&receipt.node) {
            Some("the node is not in the placement".to_owned())
        } else if receipt.instance != session.instance {
            Some(format!("it is of instance {}, expected {}", receipt.instance, session.instance))
        } else if receipt.session_id != session.session_id {
            Some(format!("it is of session {}, expected {}", receipt.session_id, session.session_id))
        } else if receipt.manifest != command.manifest {
            Some(format!("it is of manifest {}, expected {}", receipt.manifest.sha256, command.manifest.sha256))
        } else {
            None
        }
    };
    if command.receipts.len() != given.len() {
        return Err(Rejection::new(ErrorCode::InvalidArgument, "a node's receipt is given twice; give one per node"));
    }
    match command.receipts.iter().find_map(|receipt| wrong(receipt).map(|reason| (receipt, reason))) {
        Some((receipt, reason)) => {
            let message = format!("the receipt of node {} does not fit: {reason}; seal again", receipt.node);
            Err(Rejection::new(ErrorCode::Conflict, message)
                .with_details(details([("node", receipt.node.as_str().into())])))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
