//! The fold is total: whatever commands come in whatever order, with whatever epochs, cursors, generations and clocks, every
//! one gets an outcome, every invariant holds after every entry, and the same log gives the same state again, through a
//! snapshot at any point.

use ballast_schemas::*;
use ballast_workflows::{State, check_step, fold};

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize].clone()
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

fn tenant(dice: &mut Dice) -> &'static str {
    if dice.one_in(12) { "acme" } else { "default" }
}

/// Around the lineage's watermark, where things happen.
fn identity(dice: &mut Dice, state: &State) -> RevisionIdentity {
    let resource = if dice.one_in(4) { "b" } else { "a" };
    let first = RevisionIdentity::new(tenant(dice), "ns", resource, "main", 1).unwrap();
    let weight_generation = (state.watermark(&first.lineage()) + dice.pick(&[0, 0, 0, 1, 1, 1, 2])).max(1);
    first.with_generation(weight_generation)
}

fn generation(dice: &mut Dice, state: &State, identity: &RevisionIdentity) -> u64 {
    let current = state.revision(identity).map_or(1, |revision| revision.metadata_generation);
    match dice.below(6) {
        0 => current.saturating_sub(1),
        1 => dice.below(20),
        _ => current,
    }
}

fn residency(dice: &mut Dice) -> Residency {
    dice.pick(Residency::ALL)
}

fn policy(dice: &mut Dice) -> WeightStoragePolicy {
    let preferred = dice.pick(&[Residency::Hot, Residency::Cold, Residency::Mixed]);
    WeightStoragePolicy::new(preferred, HotRatio::HALF, dice.pick(MigrationMode::ALL)).unwrap()
}

fn some_operation(dice: &mut Dice, state: &State) -> WeightOperation {
    let tenant = TenantId::new(tenant(dice)).unwrap();
    let all = dice.one_in(15);
    let operations = state.operations(&tenant, all, 20);
    if operations.is_empty() || dice.one_in(20) {
        let id = OperationId::new(format!("op-{}.{}", dice.below(50), dice.below(3))).unwrap();
        if let Some(operation) = state.operation(&id) {
            return operation.clone();
        }
    }
    if operations.is_empty() {
        let mut operation = bogus();
        operation.operation_id = OperationId::new("nothing").unwrap();
        return operation;
    }
    dice.pick(&operations)
}

/// An operation that the log does not know.
fn bogus() -> WeightOperation {
    let identity = RevisionIdentity::new("default", "ns", "a", "main", 1).unwrap();
    let instance = InstanceId { group_id: identity.group_id(), position: LogPosition::ZERO };
    serde_json::from_value(serde_json::json!({
        "operation_id": "op-0.0", "kind": "MIGRATING", "identity": identity, "instance": instance, "target": null,
        "target_hot_ratio": null, "trigger": null, "fenced_generation": 1, "status": "RUNNABLE", "park_reason": null, "wake_at": null,
        "worker": null, "epoch": 1, "claim_expires_at": null, "fence": LogPosition::ZERO, "release_outstanding": false, "cursor": 0,
        "processed_units": 0, "total_units": 0, "processed_bytes": 0, "total_bytes": 0, "observed_hot_ppm": 0, "attempts": 0,
        "last_error": null, "started_unix_ms": 0, "updated_unix_ms": 0
    }))
    .unwrap()
}

fn epoch(dice: &mut Dice, operation: &WeightOperation) -> u64 {
    if dice.one_in(6) { dice.below(5) } else { operation.epoch }
}

fn evidence(dice: &mut Dice, state: &State, fence: LogPosition) -> Vec<NodeEvidence> {
    let fence = match dice.below(5) {
        0 => LogPosition { seq: dice.below(state.log_seq() + 1), index: 0 },
        1 => LogPosition { seq: state.log_seq(), index: 9 },
        _ => fence,
    };
    let node = NodeId::new("n1").unwrap();
    if dice.one_in(10) { Vec::new() } else { vec![NodeEvidence { node, incarnation: "i".into(), fence }] }
}

fn commit(dice: &mut Dice, state: &State, identity: RevisionIdentity) -> Command {
    let session = state.import(&identity).cloned();
    let instance = match &session {
        Some(session) => session.instance.clone(),
        None => InstanceId { group_id: identity.group_id(), position: LogPosition { seq: dice.below(40), index: 0 } },
    };
    let coordinator = coordinator(dice, session.as_ref());
    let session_id = session.map_or_else(|| SessionId::new("s1").unwrap(), |session| session.session_id);
    let manifest = ManifestRef {
        key: identity.manifest_key(),
        sha256: Digest::of(&[dice.below(2) as u8]),
        group_id: identity.group_id(),
        payload_keys_sha256: Digest::of(b"keys"),
        payload_count: 4,
        logical_bytes: 400,
        affinity_count: if dice.one_in(10) { 5 } else { 4 },
        affinity_digest: Digest::of(b"affinity"),
    };
    let receipt = Receipt {
        node: NodeId::new(if dice.one_in(10) { "n2" } else { "n1" }).unwrap(),
        incarnation: "i".into(),
        instance,
        session_id: session_id.clone(),
        layout_digest: Digest::of(b"layout"),
        checksums_digest: Digest::of(b"checksums"),
        manifest: manifest.clone(),
    };
    Command::CommitImport(CommitImport { identity, session_id, manifest, receipts: vec![receipt], coordinator })
}

/// Mostly the one that speaks for the session.
fn coordinator(dice: &mut Dice, session: Option<&ImportSession>) -> Option<Coordinator> {
    let found = session.and_then(ImportSession::coordinator)?;
    match dice.below(8) {
        0 => None,
        1 => Some(Coordinator { epoch: found.epoch + 1, ..found }),
        2 => Some(Coordinator { epoch: found.epoch - 1, ..found }),
        _ => Some(found),
    }
}

fn participant(n: u64) -> ParticipantId {
    ParticipantId::new(format!("rank{n}")).unwrap()
}

/// What a participant of an import says, mostly of one that is open.
fn part(dice: &mut Dice, state: &State, identity: RevisionIdentity) -> Command {
    let open = state.revisions().find(|revision| !state.import_parts(&revision.identity).is_empty());
    let identity = open.filter(|_| !dice.one_in(5)).map_or(identity, |revision| revision.identity.clone());
    let known = state.import(&identity).filter(|_| !dice.one_in(8)).map(|session| session.session_id.clone());
    let session_id = known.unwrap_or_else(|| SessionId::new("s1").unwrap());
    let participant = participant(dice.below(3));
    let parts = state.import_parts(&identity);
    let epoch = parts.iter().find(|part| part.participant == participant).map_or(1, |part| part.epoch);
    let epoch = epoch + u64::from(dice.one_in(6));
    let instance = state.import(&identity).map(|session| session.instance.clone());
    let instance = instance.unwrap_or_else(|| InstanceId {
        group_id: identity.group_id(),
        position: LogPosition { seq: 1 + dice.below(9), index: 0 },
    });
    match dice.below(3) {
        0 => Command::JoinImport(JoinImport {
            identity,
            session_id,
            participant,
            writer_id: WriterId::new(format!("w{}", dice.below(3))).unwrap(),
            placement_digest: Digest::of(if dice.one_in(9) { b"other".as_slice() } else { b"geometry" }),
        }),
        1 => Command::RenewPart(PartWriter { identity, session_id, participant, instance, epoch }),
        _ => Command::FinishPart(PartWriter { identity, session_id, participant, instance, epoch }),
    }
}

fn command(dice: &mut Dice, state: &State) -> Command {
    let identity = identity(dice, state);
    let expected_metadata_generation = generation(dice, state, &identity);
    let session_id = SessionId::new(format!("s{}", dice.below(3))).unwrap();
    let lease_id = LeaseId::new(format!("l{}", dice.below(12))).unwrap();
    let operation = some_operation(dice, state);
    let operation_id = operation.operation_id.clone();
    let epoch = epoch(dice, &operation);
    let wants =
        matches!(operation.status, OperationStatus::Runnable | OperationStatus::Claimed | OperationStatus::Paused);
    if wants && operation_id.as_str() != "nothing" && dice.one_in(2) {
        return likely(dice, state, &operation);
    }
    match dice.below(48) {
        43..48 => part(dice, state, identity),
        0..4 => {
            let import = BeginImport {
                identity,
                session_id,
                ttl_ms: dice.pick(&[0, 5_000, 15_000, 15_000, 15_000, 60_000]),
                policy: if dice.one_in(3) { None } else { Some(policy(dice)) },
                placement_digest: Digest::of(b"geometry"),
                placement: vec![NodeId::new("n1").unwrap()],
                logical_bytes: 400,
                unit_count: 4,
            };
            match dice.below(3) {
                0 => {
                    let participants = (0..dice.below(4)).map(participant).collect();
                    let writer_id = WriterId::new(format!("w{}", dice.below(3))).unwrap();
                    Command::BeginSharedImport(BeginSharedImport { import, participants, writer_id })
                }
                _ => Command::BeginImport(import),
            }
        }
        4..8 => commit(dice, state, identity),
        8 => {
            let coordinator = coordinator(dice, state.import(&identity));
            Command::RenewImport(RenewImport { identity, session_id, coordinator })
        }
        9 => {
            let coordinator = coordinator(dice, state.import(&identity));
            Command::AbortImport(AbortImport { identity, session_id, coordinator })
        }
        10 => Command::UpdatePolicy(UpdatePolicy { identity, policy: policy(dice), expected_metadata_generation }),
        11 => Command::Remove(Remove { identity, expected_metadata_generation }),
        12 | 13 => {
            let instance = state
                .revision(&identity)
                .map_or_else(|| operation.instance.clone(), |revision| revision.instance.clone());
            let fence = LogPosition { seq: state.log_seq(), index: 0 };
            let evidence = evidence(dice, state, fence);
            if dice.one_in(2) {
                Command::RevisionDegraded(RevisionDegraded { identity, instance, evidence, reason: "lost".into() })
            } else {
                let residency = residency(dice);
                Command::RevisionRecovered(RevisionRecovered {
                    identity,
                    instance,
                    evidence,
                    residency,
                    observed_hot_ppm: 7,
                })
            }
        }
        14 | 15 => {
            let ttl_ms = dice.pick(&[0, 1, 3_000, 60_000]);
            Command::AcquireLease(AcquireLease { identity, lease_id, holder: "h".into(), ttl_ms })
        }
        16 => Command::RenewLease(RenewLease { identity, lease_id, ttl_ms: 1 + dice.below(9_000) }),
        17 => Command::ReleaseLease(ReleaseLease { identity, lease_id }),
        18 => Command::StartMigration(StartMigration {
            identity,
            target: if dice.one_in(5) {
                residency(dice)
            } else {
                dice.pick(&[Residency::Hot, Residency::Cold, Residency::Mixed])
            },
            target_hot_ratio: if dice.one_in(4) { Some(HotRatio::HALF) } else { None },
            expected_metadata_generation,
            trigger: dice.pick(MigrationTrigger::ALL),
        }),
        19 => {
            let (node, trigger) = (NodeId::new("n1").unwrap(), dice.pick(MigrationTrigger::ALL));
            let bytes = dice.below(900);
            let round = state.plan_round(&node, trigger, bytes, 400).round + u64::from(dice.one_in(5));
            Command::RelievePressure(RelievePressure { node, round, trigger, bytes, cold_free_bytes: dice.below(900) })
        }
        20..23 => {
            let worker = WorkerId::new(format!("w{}", dice.below(2))).unwrap();
            Command::ClaimOperation(ClaimOperation {
                operation_id,
                worker,
                ttl_ms: dice.pick(&[0, 6_000, 6_000, 6_000]),
            })
        }
        23 => Command::RenewClaim(RenewClaim { operation_id, epoch, ttl_ms: 6_000 }),
        24 | 25 => Command::OperationAdvanced(OperationAdvanced {
            operation_id,
            epoch,
            from_cursor: operation.cursor.saturating_sub(dice.below(2)),
            to_cursor: operation.cursor + dice.below(3),
            processed_units: dice.below(6),
            total_units: dice.below(6),
            processed_bytes: dice.below(500),
            total_bytes: 400,
            observed_hot_ppm: dice.below(2_000_000) as u32,
            released: dice.one_in(2),
        }),
        26 => Command::OperationAttemptFailed(OperationAttemptFailed {
            operation_id,
            epoch,
            error: OperationError { code: ErrorCode::DurabilityFailed, message: "x".into() },
            permanent: dice.one_in(4),
        }),
        27 => {
            let wake_after_ms = if dice.one_in(2) { None } else { Some(dice.below(5_000)) };
            Command::ParkOperation(ParkOperation {
                operation_id,
                epoch,
                reason: dice.pick(ParkReason::ALL),
                wake_after_ms,
            })
        }
        28 | 29 => {
            let cursor = operation.cursor + u64::from(dice.one_in(8));
            Command::AuthorizeRelease(AuthorizeRelease {
                operation_id,
                epoch,
                cursor,
                unit_count: dice.below(3) as u32,
            })
        }
        30 => Command::OperationFinished(OperationFinished {
            operation_id,
            epoch,
            residency: if dice.one_in(3) { residency(dice) } else { operation.target.unwrap_or(Residency::Hot) },
            observed_hot_ppm: 500_000,
            evidence: evidence(dice, state, operation.fence),
            note: None,
        }),
        31 => dice.pick(&[
            Command::PauseOperation,
            Command::ResumeOperation,
            Command::CancelOperation,
            Command::RetryOperation,
        ])(operation_id),
        32 => Command::DeletionFinished(DeletionFinished { operation_id, epoch, owed: vec![] }),
        33 if dice.one_in(4) => Command::PurgeTombstone(PurgeTombstone { identity }),
        33..36 => Command::BeginReplacement(BeginReplacement {
            target: identity.with_generation(identity.weight_generation + dice.pick(&[0, 1, 1, 1, 2])),
            base: identity,
            mode: dice.pick(UpsertMode::ALL),
            expected_metadata_generation,
            request_id: format!("r{}", dice.below(4)),
            policy: None,
        }),
        36 | 37 => {
            Command::ReplacementAdvanced(ReplacementAdvanced { operation_id, epoch, to: dice.pick(ClaimPhase::ALL) })
        }
        38 => Command::AbortReplacement(AbortReplacement {
            lineage: identity.lineage(),
            request_id: format!("r{}", dice.below(4)),
        }),
        39 | 40 => Command::StartRepair(StartRepair { identity, expected_metadata_generation }),
        41 => cluster_wide(dice),
        _ => Command::Tick,
    }
}

/// What no revision is named in.
fn cluster_wide(dice: &mut Dice) -> Command {
    let replica_id = ReplicaId::new(format!("g{}", dice.below(3))).unwrap();
    match dice.below(4) {
        0 => Command::AnnounceReplica(AnnounceReplica {
            replica_id,
            families: dice.pick(&[vec![0, 8, 9, 10, 11, 12], vec![0, 8, 9, 10, 11], vec![]]),
            version: "any".into(),
            fold_version: dice.below(3) as u32,
        }),
        1 => Command::ConfirmCapability(ConfirmCapability { capability: dice.pick(Capability::ALL) }),
        // A newer one than this build knows would stop it, as it should; that is another test's matter.
        2 => Command::RaiseFoldVersion(RaiseFoldVersion { fold_version: dice.below(2) as u32 }),
        _ => Command::SetConfig(ClusterConfig {
            migration_cooldown_ms: dice.pick(&[0, 1, 30_000]),
            migration_max_members_per_round: dice.below(3) as u32,
            memory_low_watermark_ppm: dice.below(1_000_001) as u32,
            ..ClusterConfig::default()
        }),
    }
}

/// What a worker would do with this operation.
fn likely(dice: &mut Dice, state: &State, operation: &WeightOperation) -> Command {
    let (operation_id, epoch) = (operation.operation_id.clone(), operation.epoch);
    if operation.status == OperationStatus::Paused {
        return Command::ResumeOperation(operation_id);
    }
    if operation.status != OperationStatus::Claimed {
        let worker = WorkerId::new("w0").unwrap();
        return Command::ClaimOperation(ClaimOperation { operation_id, worker, ttl_ms: 6_000 });
    }
    match operation.kind {
        OperationKind::Deleting => Command::DeletionFinished(DeletionFinished { operation_id, epoch, owed: vec![] }),
        OperationKind::Replacing => {
            let to = dice.pick(&[ClaimPhase::RetiringBase, ClaimPhase::DeletingBase]);
            Command::ReplacementAdvanced(ReplacementAdvanced { operation_id, epoch, to })
        }
        _ if operation.release_outstanding || dice.one_in(3) => Command::OperationAdvanced(OperationAdvanced {
            operation_id,
            epoch,
            from_cursor: operation.cursor,
            to_cursor: operation.cursor + 1,
            processed_units: operation.processed_units + 1,
            total_units: 9,
            processed_bytes: operation.processed_bytes + 1,
            total_bytes: 400,
            observed_hot_ppm: 1,
            released: operation.release_outstanding,
        }),
        _ if dice.one_in(2) => {
            Command::AuthorizeRelease(AuthorizeRelease { operation_id, epoch, cursor: operation.cursor, unit_count: 1 })
        }
        _ => Command::OperationFinished(OperationFinished {
            operation_id,
            epoch,
            residency: operation.target.unwrap_or(Residency::Hot),
            observed_hot_ppm: 500_000,
            evidence: evidence(dice, state, operation.fence),
            note: None,
        }),
    }
}

fn create() -> Command {
    Command::CreateCluster(CreateCluster {
        cluster_id: ClusterId::new("c").unwrap(),
        incarnation: 1,
        config: ClusterConfig::default(),
        capabilities: Capability::ALL.to_vec(),
    })
}

/// A log of random commands, folded and checked entry by entry; returns how many were accepted.
fn random_log(seed: u64, entries: u64) -> (State, Vec<(u64, Envelope)>, u64) {
    let mut dice = Dice(seed);
    let mut state = State::new();
    let (mut log, mut old, mut accepted) = (Vec::new(), Vec::<CommandRecord>::new(), 0);
    let mut ns = 1_800_000_000_000_000_000;
    for seq in 1..=entries {
        let count = if seq == 1 { 1 } else { dice.below(4) };
        let mut commands = Vec::new();
        for n in 0..count {
            if !old.is_empty() && dice.one_in(12) {
                commands.push(dice.pick(&old));
                continue;
            }
            let record = CommandRecord {
                id: CommandId::new(format!("c{seq}.{n}")).unwrap(),
                not_after: state.log_clock().plus_ms(if dice.one_in(10) {
                    dice.pick(&[0, 1_000, 500_000])
                } else {
                    60_000
                }),
                command: if seq == 1 { create() } else { command(&mut dice, &state) },
            };
            old.push(record.clone());
            commands.push(record);
        }
        ns = match dice.below(30) {
            0 => ns - 2_000_000_000,
            1 => ns + 60_000_000_000,
            2..6 => ns + dice.below(3_000_000_000),
            _ => ns + dice.below(1_000_000),
        };
        let (envelope, _) = Envelope::seal(format!("e{seq}"), commands).unwrap();
        let before = state.clone();
        let applied = fold(&mut state, seq, ns, &envelope).unwrap();
        let context = || format!("seed {seed}, entry {seq}: {envelope:?}");
        state.check_invariants().unwrap_or_else(|violation| panic!("{violation}\n{}", context()));
        check_step(&before, &state).unwrap_or_else(|violation| panic!("{violation}\n{}", context()));
        assert!(state.log_clock() >= before.log_clock());
        assert_eq!(applied.outcomes.len(), envelope.commands().len());
        let mut positions: Vec<(LogPosition, u32)> =
            applied.events.iter().map(|event| (event.position, event.n)).collect();
        positions.dedup();
        assert!(positions.is_sorted() && positions.len() == applied.events.len(), "{}", context());
        accepted += applied.outcomes.iter().filter(|outcome| outcome.is_ok()).count() as u64;
        log.push((ns, envelope));
    }
    (state, log, accepted)
}

#[test]
fn every_invariant_holds_after_every_entry_whatever_comes() {
    for seed in 0..24 {
        let (state, log, accepted) = random_log(seed, 600);
        assert!(accepted > 150, "seed {seed}: only {accepted} commands were accepted");
        let mut again = State::new();
        for (seq, (ns, envelope)) in (1..).zip(&log) {
            fold(&mut again, seq, *ns, envelope).unwrap();
        }
        assert_eq!((again.chain(), again.digest()), (state.chain(), state.digest()), "seed {seed}");
    }
}

#[test]
fn a_snapshot_at_any_point_leads_to_the_same_end() {
    let (end, log, _) = random_log(1_000, 250);
    let mut state = State::new();
    for (seq, (ns, envelope)) in (1..).zip(&log) {
        fold(&mut state, seq, *ns, envelope).unwrap();
        let bytes = rmp_serde::to_vec_named(&state).unwrap();
        let restored: State = rmp_serde::from_slice(&bytes).unwrap();
        assert_eq!(restored, state, "entry {seq}");
        assert_eq!(restored.digest(), state.digest());
        state = restored;
    }
    assert_eq!(state, end);
    assert_eq!(state.digest(), end.digest());
}

#[test]
fn an_entry_survives_its_encoding() {
    let (_, log, _) = random_log(2_000, 300);
    for (_, envelope) in log {
        let (again, bytes) = Envelope::seal(envelope.id().to_owned(), envelope.commands().to_vec()).unwrap();
        assert_eq!((&Envelope::decode(&bytes).unwrap(), &again), (&envelope, &envelope));
    }
}
