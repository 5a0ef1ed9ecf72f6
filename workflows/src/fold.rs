//! `fold`: one log entry onto the state. Sequence and first-command checks, the log clock, what time ends, repeats and late
//! commands, gates, and the way to each aggregate (see ARCHITECTURE.md, The log and the fold; RFC, HA and Upgrade).
//!
//! Total: whatever an entry holds, every command gets an outcome. Only what must stop a replica is a [`FoldHalt`].

use ballast_schemas::{
    CLOCK_STEP_MS_MAX, COMMAND_WINDOW_MS, Capability, Command, CommandRecord, Digest, Envelope, ErrorCode, Event,
    EventBody, LogPosition, LogTime, Outcome, Rejection, Reply, RevisionIdentity, hash_list,
};
use serde_json::{Map, Value};

use crate::index::Deadline;
use crate::operation::{Operation, OperationKey};
use crate::revision::Revision;
use crate::state::{FOLD_VERSION, State};

/// How far ahead of the log clock a command's `not_after` may lie. Gateways use one command window; what is remembered
/// against repeats must cover every command that could still be accepted.
pub(crate) const NOT_AFTER_AHEAD_MS_MAX: u64 = COMMAND_WINDOW_MS * 2;

/// What an entry did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// One per command, in order.
    pub outcomes: Vec<Outcome>,
    /// What orchestrators hear of it, in order.
    pub events: Vec<Event>,
}

/// Why a replica must stop. The state is as it was before the entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FoldHalt {
    /// An entry is missing or came twice.
    #[error(
        "log sequence {found} follows {folded}; expected {expected}: an entry is missing or repeated, restore from a snapshot"
    )]
    NotContinuous {
        /// The last folded sequence.
        folded: u64,
        /// What should have come.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// The log does not begin as every log of Ballast does.
    #[error(
        "the first command of the log is not CreateCluster; this stream holds something else, or its beginning is lost"
    )]
    NoCluster,
    /// The log went on under rules that this build does not know.
    #[error(
        "the cluster's fold version is {found}, this build knows up to {FOLD_VERSION}: run the build that the cluster was raised for"
    )]
    FoldVersion {
        /// The cluster's.
        found: u32,
    },
    /// The cluster's own settings would stop it.
    #[error("the cluster's first entry is wrong: {reason}")]
    BadCluster {
        /// Which setting, and why.
        reason: String,
    },
}

/// Folds the entry at stream sequence `seq`, stored at `unix_ns` (stream timestamp), onto `state`.
///
/// # Errors
/// Only what must stop a replica; the state is untouched then.
pub fn fold(state: &mut State, seq: u64, unix_ns: u64, envelope: &Envelope) -> Result<Applied, FoldHalt> {
    let folded = state.record.log_seq;
    let expected = folded.saturating_add(1);
    if seq != expected {
        return Err(FoldHalt::NotContinuous { folded, expected, found: seq });
    }
    if state.record.fold_version > FOLD_VERSION {
        return Err(FoldHalt::FoldVersion { found: state.record.fold_version });
    }
    if state.record.cluster.is_none() {
        match envelope.commands().first().map(|record| &record.command) {
            Some(Command::CreateCluster(command)) => {
                command.config.validate().map_err(|reason| FoldHalt::BadCluster { reason })?;
            }
            _ => return Err(FoldHalt::NoCluster),
        }
    }
    advance_clock(state, unix_ns);
    state.record.log_seq = seq;
    let unix_ms = unix_ns.checked_div(1_000_000).unwrap_or_default();
    let mut fold = Fold {
        state,
        position: LogPosition { seq, index: 0 },
        unix_ms,
        events: Vec::new(),
        events_here: 0,
        operations_here: 0,
        scratch: Vec::new(),
    };
    fold.forget();
    fold.expire();
    let mut outcomes = Vec::with_capacity(envelope.commands().len());
    for (index, record) in envelope.commands().iter().enumerate() {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        if index > 0 {
            fold.position.index = index;
            fold.events_here = 0;
            fold.operations_here = 0;
        }
        outcomes.push(fold.command(record));
    }
    let Fold { events, mut scratch, .. } = fold;
    state.record.chain = chain(state.record.chain, seq, unix_ns, envelope, &outcomes, &mut scratch);
    Ok(Applied { outcomes, events })
}

/// `clock += clamp(timestamp − last timestamp, 0, 5 s)`: a server with a wrong clock can neither expire every lease nor
/// freeze time, and an outage does not expire what nobody could renew.
fn advance_clock(state: &mut State, unix_ns: u64) {
    let record = &mut state.record;
    // Nothing is measured before the first entry.
    let last = if record.cluster.is_none() { unix_ns } else { record.last_unix_ns };
    let step = unix_ns.saturating_sub(last).min(CLOCK_STEP_MS_MAX.saturating_mul(1_000_000));
    record.clock_ns = record.clock_ns.saturating_add(step);
    record.last_unix_ns = unix_ns;
}

/// The envelope by its checksum, which decoding has compared with its bytes; the outcomes by theirs.
fn chain(
    before: Digest,
    seq: u64,
    unix_ns: u64,
    envelope: &Envelope,
    outcomes: &[Outcome],
    scratch: &mut Vec<u8>,
) -> Digest {
    let numbers = [seq.to_be_bytes(), unix_ns.to_be_bytes()].concat();
    hash_list([
        before.as_bytes().as_slice(),
        numbers.as_slice(),
        envelope.digest().as_bytes().as_slice(),
        content_digest(outcomes, scratch).as_bytes().as_slice(),
    ])
}

/// SHA-256 of a value's MessagePack form, which is written into `scratch`.
fn content_digest<T: serde::Serialize + ?Sized>(value: &T, scratch: &mut Vec<u8>) -> Digest {
    scratch.clear();
    // Writing into a vector can not fail, and every schema type has a MessagePack form.
    let written = rmp_serde::encode::write(scratch, value);
    debug_assert!(written.is_ok(), "no MessagePack form: {written:?}");
    Digest::of(scratch)
}

/// One entry being folded.
pub(crate) struct Fold<'a> {
    pub state: &'a mut State,
    /// Of the command at hand; of the first one while time's own effects are applied.
    pub position: LogPosition,
    /// Stream timestamp of the entry, for display.
    pub unix_ms: u64,
    events: Vec<Event>,
    events_here: u32,
    /// Operations created at this position so far: they number its operation ids.
    pub operations_here: u32,
    /// What is hashed is written here first.
    scratch: Vec<u8>,
}

impl Fold<'_> {
    /// The log clock of this entry.
    pub fn clock(&self) -> LogTime {
        self.state.log_clock()
    }

    /// Tells orchestrators.
    pub fn emit(&mut self, body: EventBody) {
        self.events.push(Event { position: self.position, n: self.events_here, unix_ms: self.unix_ms, body });
        self.events_here = self.events_here.saturating_add(1);
    }

    /// Drops what no acceptable command can ask for any more.
    fn forget(&mut self) {
        let clock = self.clock();
        self.state.record.recent.forget_before(clock);
        self.state.record.ended_leases.forget_before(clock);
    }

    /// Applies what time alone ends, in order of (moment, kind, name), before the entry's first command.
    fn expire(&mut self) {
        let clock = self.clock();
        while let Some((at, deadline)) = self.state.index.deadlines.first().cloned() {
            if at > clock {
                break;
            }
            match &deadline {
                Deadline::Lease(position, lease_id) => {
                    if let Some(identity) = self.state.index.instances.get(position).cloned() {
                        self.expire_lease(&identity, lease_id, at);
                    }
                }
                Deadline::Import(position) => {
                    if let Some(identity) = self.state.index.instances.get(position).cloned() {
                        self.expire_import(&identity);
                    }
                }
                Deadline::Operation(key) => self.operation_timer(*key, at),
            }
            // Each of the above removes its own deadline; this makes the loop's end certain.
            self.state.index.deadlines.remove(&(at, deadline));
        }
    }

    /// A command with its repeat, window and gate checks.
    fn command(&mut self, record: &CommandRecord) -> Outcome {
        let command = &record.command;
        if matches!(command, Command::Tick | Command::Barrier) {
            return Ok(Reply::Clock(self.clock()));
        }
        if let (Command::CreateCluster(cluster), None) = (command, self.state.cluster()) {
            // The first command of a log takes effect whatever its window says: there is no log without it.
            return self.create_cluster(cluster);
        }
        let clock = self.clock();
        if clock > record.not_after {
            return Err(State::too_late(clock, record.not_after));
        }
        if record.not_after > clock.plus_ms(NOT_AFTER_AHEAD_MS_MAX) {
            return reject(
                ErrorCode::InvalidArgument,
                format!(
                    "not_after is {} ms ahead of the log clock; at most {NOT_AFTER_AHEAD_MS_MAX} ms are allowed",
                    record.not_after.since(clock)
                ),
            );
        }
        // Lease commands are idempotent by their lease id and need no table.
        if command.family() == 9 {
            return self.gated(command);
        }
        let content = content_digest(command, &mut self.scratch);
        if let Some((before, outcome)) = self.state.record.recent.get(&record.id) {
            if *before == content {
                return outcome.clone();
            }
            return reject(ErrorCode::Conflict, "this request id was used for another command; choose a new id");
        }
        let outcome = self.gated(command);
        // Not only until its own `not_after`: a repeat that another gateway received meanwhile is good for longer than that.
        let until = clock.plus_ms(NOT_AFTER_AHEAD_MS_MAX);
        self.state.record.recent.push(record.id.clone(), (content, outcome.clone()), until);
        outcome
    }

    /// Refuses a family whose gate is closed (RFC, HA and Upgrade).
    fn gated(&mut self, command: &Command) -> Outcome {
        let needed = match command.family() {
            0 => None,
            12 => Some(Capability::WeightLineage),
            13 => Some(Capability::WeightSharing),
            _ => Some(Capability::WeightManagement),
        };
        if let Some(capability) = needed.filter(|capability| !self.state.has_capability(*capability)) {
            return Err(Rejection::new(
                ErrorCode::NotReady,
                format!("{capability} is not confirmed in this cluster; confirm it once every replica can fold command family {}", command.family()),
            )
            .with_details(details([("capability", capability.name().into())])));
        }
        self.dispatch(command)
    }

    fn dispatch(&mut self, command: &Command) -> Outcome {
        match command {
            Command::CreateCluster(c) => self.create_cluster(c),
            Command::Tick | Command::Barrier => Ok(Reply::Clock(self.clock())),
            Command::SetConfig(c) => self.set_config(c),
            Command::AnnounceReplica(c) => self.announce_replica(c),
            Command::ConfirmCapability(c) => self.confirm_capability(c),
            Command::SnapshotCommitted(c) => self.snapshot_committed(c),
            Command::RaiseFoldVersion(c) => self.raise_fold_version(c),
            Command::BeginImport(c) => self.begin_import(c, None),
            Command::BeginSharedImport(c) => self.begin_shared_import(c),
            Command::JoinImport(c) => self.join_import(c),
            Command::RenewPart(c) => self.renew_part(c),
            Command::FinishPart(c) => self.finish_part(c),
            Command::RenewImport(c) => self.renew_import(c),
            Command::CommitImport(c) => self.commit_import(c),
            Command::AbortImport(c) => self.abort_import(c),
            Command::UpdatePolicy(c) => self.update_policy(c),
            Command::Remove(c) => self.remove(c),
            Command::RevisionDegraded(c) => self.revision_degraded(c),
            Command::RevisionRecovered(c) => self.revision_recovered(c),
            Command::AcquireLease(c) => self.acquire_lease(c),
            Command::RenewLease(c) => self.renew_lease(c),
            Command::ReleaseLease(c) => self.release_lease(c),
            Command::StartMigration(c) => self.start_migration(c),
            Command::StartRepair(c) => self.start_repair(c),
            Command::RelievePressure(c) => self.relieve_pressure(c),
            Command::ClaimOperation(c) => self.claim_operation(c),
            Command::RenewClaim(c) => self.renew_claim(c),
            Command::OperationAdvanced(c) => self.operation_advanced(c),
            Command::OperationAttemptFailed(c) => self.operation_attempt_failed(c),
            Command::ParkOperation(c) => self.park_operation(c),
            Command::AuthorizeRelease(c) => self.authorize_release(c),
            Command::OperationFinished(c) => self.operation_finished(c),
            Command::PauseOperation(id) => self.pause_operation(id),
            Command::ResumeOperation(id) => self.resume_operation(id),
            Command::CancelOperation(id) => self.cancel_operation(id),
            Command::RetryOperation(id) => self.retry_operation(id),
            Command::DeletionFinished(c) => self.deletion_finished(c),
            Command::PurgeTombstone(c) => self.purge_tombstone(c),
            Command::BeginReplacement(c) => self.begin_replacement(c),
            Command::ReplacementAdvanced(c) => self.replacement_advanced(c),
            Command::AbortReplacement(c) => self.abort_replacement(c),
        }
    }

    /// The revision, or NOT_FOUND.
    pub fn revision(&self, identity: &RevisionIdentity) -> Result<&Revision, Rejection> {
        self.state.existing(identity)
    }

    /// Changes a revision without changing its record's generation, and keeps the index true.
    pub fn edit_revision(&mut self, identity: &RevisionIdentity, edit: impl FnOnce(&mut Revision)) {
        let index = &mut self.state.index;
        if let Some(revision) = self.state.record.revisions.get_mut(identity) {
            let before = revision.place();
            edit(revision);
            index.move_revision(revision, &before);
        }
    }

    /// Changes a revision's record: its metadata generation grows by one.
    pub fn change_revision(&mut self, identity: &RevisionIdentity, change: impl FnOnce(&mut Revision)) {
        let unix_ms = self.unix_ms;
        self.edit_revision(identity, |revision| {
            change(revision);
            revision.metadata.metadata_generation = revision.metadata.metadata_generation.saturating_add(1);
            revision.metadata.updated_unix_ms = unix_ms;
        });
    }

    /// Changes an operation and keeps the index true.
    pub fn edit_operation(&mut self, key: OperationKey, edit: impl FnOnce(&mut Operation)) {
        let index = &mut self.state.index;
        let Some(operation) = self.state.record.operations.get_mut(&key) else { return };
        let before = operation.place();
        edit(operation);
        operation.view.updated_unix_ms = self.unix_ms;
        operation.next_look = match (operation.next_look, operation.deadline()) {
            (Some(at), Some(end)) if at <= end => Some(at),
            (_, end) => end,
        };
        index.move_operation(key, operation, &before);
        if let Some(node) = before.moves_on.filter(|_| operation.moves_on().is_none()) {
            self.came_to_rest(&node);
        }
    }

    /// The record as a reply.
    pub fn revision_reply(&self, identity: &RevisionIdentity) -> Outcome {
        Ok(Reply::Revision(Box::new(self.revision(identity)?.metadata.clone())))
    }

    /// Tells orchestrators about a revision.
    pub fn emit_revision(
        &mut self,
        identity: &RevisionIdentity,
        body: impl FnOnce(Box<ballast_schemas::WeightRevisionMetadata>) -> EventBody,
    ) {
        let metadata = self.state.revision(identity).cloned();
        if let Some(metadata) = metadata {
            self.emit(body(Box::new(metadata)));
        }
    }
}

/// A rejection without details.
pub(crate) fn reject(code: ErrorCode, message: impl Into<String>) -> Outcome {
    Err(Rejection::new(code, message))
}

/// Facts by name.
pub(crate) fn details<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    Value::Object(pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests;
