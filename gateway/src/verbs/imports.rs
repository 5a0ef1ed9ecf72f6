//! Import sessions: begin (and place), renew, commit, abort. The client moves the bytes to the node by itself; the gateway
//! takes the proof that they are there from the node, never from the client.

use std::time::{Duration, Instant};

use ballast_schemas::{
    AbortImport, Availability, BallastError, BeginImport, BeginImportReply, BeginImportRequest, BeginSharedImport,
    ClaimPhase, Command, CommitImport, CommitImportRequest, Digest, ErrorCode, ImportSession, ManifestRef,
    NodeEndpoint, NodeId, Receipt, RenewImport, Reply, RequestOptions, RevisionIdentity, RevisionReply, SessionReply,
    SessionRequest, UpsertMode, WeightRevisionMetadata,
};
use ballast_workflows::State;
use futures::future::try_join_all;
use serde_json::json;

use super::{answer_with, checks, unexpected};
use crate::context::Context;
use crate::placement::{NoPlace, place, takes};
use crate::request::{Answer, Call};
use crate::room::{self, Room};

/// How long a node is waited for that should be there: two of its statuses.
const NODE_PATIENCE: Duration = Duration::from_secs(3);
/// How long a begin waits while room is made, within what a caller waits for an answer.
const ROOM_PATIENCE: Duration = Duration::from_secs(6);
const LOOK_FOR_ROOM_EVERY: Duration = Duration::from_millis(500);

pub(super) async fn begin(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<BeginImportRequest>()?;
    call.check_tenant(&request.body.identity)?;
    checks::begin_import(&request.body)?;
    // Before the log: whoever waits for a session of somebody else asks again and again, with all its participants.
    let free = |state: &State| state.expect_no_other_import(&request.body.identity, &request.body.session_id);
    context.decide(&request.options, free).await?;
    let placement = placement_of(context, &request.body).await?;
    let BeginImportRequest {
        identity,
        session_id,
        ttl_ms,
        policy,
        placement_digest,
        logical_bytes,
        reserved_bytes: _,
        unit_count,
        participants,
        writer_id,
    } = request.body;
    let import =
        BeginImport { identity, session_id, ttl_ms, policy, placement_digest, placement, logical_bytes, unit_count };
    let command = match writer_id {
        None => Command::BeginImport(import),
        Some(writer_id) => Command::BeginSharedImport(BeginSharedImport { import, participants, writer_id }),
    };
    // The session id makes it safe to repeat; the placement may differ then, so the caller's request id would only be in the way.
    let (position, reply) = context.submit_afresh(&request.options, command).await?;
    let Reply::Import(session) = reply else { return Err(unexpected(&reply)) };
    let endpoints = endpoints_of(context, &session).await?;
    let token = context.tokens.issue_import(&session);
    Answer::new(position.seq, &BeginImportReply { session: *session, endpoints, token })
}

/// The nodes that take the import. What the fold refuses anyway is not held up by a lack of room: then its own placement will do.
async fn placement_of(context: &Context, request: &BeginImportRequest) -> Result<Vec<NodeId>, BallastError> {
    let identity = &request.identity;
    let (refused_anyway, watermark, preferred) = context.replica.read(|state| {
        (standing_placement(state, identity), state.watermark(&identity.lineage()), beside_base(state, identity))
    });
    if let Some(placement) = refused_anyway {
        return Ok(placement);
    }
    // A watermark never goes back, so no later state would take this generation either.
    if identity.weight_generation <= watermark {
        let message = format!(
            "generation {} of lineage {} is not above the watermark {watermark}; publish a higher generation",
            identity.weight_generation,
            identity.lineage()
        );
        return Err(BallastError::new(ErrorCode::Conflict, message).with_details(json!({ "watermark": watermark })));
    }
    context.directory.settled().await;
    let shared = !request.participants.is_empty();
    let choose = || {
        place(
            &context.directory.nodes(),
            &context.cluster_id,
            &identity.group_id(),
            request.reserved_bytes,
            shared,
            preferred.as_ref(),
            &context.promises,
        )
    };
    let no_place = match choose() {
        Ok(node) => return Ok(vec![node]),
        Err(no_place) => no_place,
    };
    // Before a lack of room is the answer, this gateway must know what all others have answered.
    context.barrier().await?;
    if let Some(placement) = context.replica.read(|state| standing_placement(state, identity)) {
        return Ok(placement);
    }
    if !no_place.may_pass {
        return Err(no_place.error);
    }
    wait_for_room(context, request, &choose).await.map(|node| vec![node])
}

/// Nodes fall silent together when the server restarts, memory that was freed shows with the next status, and AUTO revisions can
/// be demoted. What takes longer is told, with `making_room` in its details, and asked again.
async fn wait_for_room(
    context: &Context,
    request: &BeginImportRequest,
    choose: &impl Fn() -> Result<NodeId, NoPlace>,
) -> Result<NodeId, BallastError> {
    let began = Instant::now();
    loop {
        let refusal = match choose() {
            Ok(node) => return Ok(node),
            Err(no_place) if no_place.error.code == ErrorCode::CapacityExhausted && no_place.may_pass => no_place.error,
            Err(no_place) if began.elapsed() >= NODE_PATIENCE => return Err(no_place.error),
            Err(_) => {
                context.directory.wait_for(LOOK_FOR_ROOM_EVERY, |_| choose().ok()).await;
                continue;
            }
        };
        let mut nodes = context.directory.nodes();
        nodes.retain(|status| takes(status, !request.participants.is_empty()));
        let look = |state: &State| room::look_for(state, &nodes, &context.cluster_id, request.reserved_bytes, refusal);
        match context.replica.read(look) {
            Room::Never { error } if began.elapsed() >= NODE_PATIENCE => return Err(error),
            Room::Soon { error, .. } if began.elapsed() >= ROOM_PATIENCE => return Err(error),
            Room::Soon { command: Some(command), .. } => {
                drop(context.submit_afresh(&RequestOptions::default(), *command).await?);
            }
            Room::Soon { command: None, .. } | Room::Never { .. } => {}
        }
        context.directory.wait_for(LOOK_FOR_ROOM_EVERY, |_| choose().ok()).await;
    }
}

/// Nodes for an import that finds its own session, or that the fold refuses as the state is now: because of what stands there,
/// or of a replacement under way. Room matters to neither, and a lack of it must not hide the answer.
fn standing_placement(state: &State, identity: &RevisionIdentity) -> Option<Vec<NodeId>> {
    let placement = |identity: &RevisionIdentity| state.revision(identity).map(|record| record.placement.clone());
    if state.revision(identity).is_some_and(|record| record.availability != Availability::Deleted) {
        return placement(identity);
    }
    let claim = state.claim(&identity.lineage()).filter(|claim| !claim.phase.is_terminal())?;
    let has_to_wait =
        claim.target != *identity || (claim.mode == UpsertMode::DeleteFirst && claim.phase == ClaimPhase::DeletingBase);
    if has_to_wait { placement(&claim.base) } else { None }
}

/// The node that holds the base of the replacement that this import is the target of.
fn beside_base(state: &State, identity: &RevisionIdentity) -> Option<NodeId> {
    let claim = state.claim(&identity.lineage())?;
    let is_target = claim.target == *identity && !claim.phase.is_terminal() && claim.mode == UpsertMode::PutFirst;
    state.revision(&claim.base).filter(|_| is_target)?.placement.first().cloned()
}

/// Where the session's nodes listen; every one of them must live.
pub(super) async fn endpoints_of(
    context: &Context,
    session: &ImportSession,
) -> Result<Vec<NodeEndpoint>, BallastError> {
    let all = |endpoints: &Vec<NodeEndpoint>| endpoints.len() == session.placement.len();
    let found = context
        .directory
        .wait_for(NODE_PATIENCE, |directory| Some(directory.endpoints(&session.placement)).filter(all))
        .await;
    found.ok_or_else(|| {
        let silent: Vec<&str> = session.placement.iter().filter(|node| context.directory.node(node).is_none()).map(NodeId::as_str).collect();
        let message = format!(
            "session {} of {} goes to {}, which does not answer: start its transfer worker, or abort the import and begin another",
            session.session_id,
            session.identity,
            silent.join(", ")
        );
        BallastError::new(ErrorCode::Unavailable, message)
    })
}

pub(super) async fn renew(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<SessionRequest>()?;
    let SessionRequest { identity, session_id, coordinator } = request.body;
    call.check_tenant(&identity)?;
    // Not under the caller's id: every renewal counts from its own entry.
    let command = Command::RenewImport(RenewImport { identity, session_id, coordinator });
    let (position, reply) = context.submit_afresh(&request.options, command).await?;
    let Reply::Import(session) = reply else { return Err(unexpected(&reply)) };
    Answer::new(position.seq, &SessionReply { session: *session })
}

pub(super) async fn abort(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<SessionRequest>()?;
    let SessionRequest { identity, session_id, coordinator } = request.body;
    call.check_tenant(&identity)?;
    let command = Command::AbortImport(AbortImport { identity, session_id, coordinator });
    let (position, reply) = context.submit(call, &request.options, command).await?;
    answer_with(position, reply)
}

pub(super) async fn commit(context: &Context, call: &Call) -> Result<Answer, BallastError> {
    let request = call.read::<CommitImportRequest>()?;
    call.check_tenant(&request.body.identity)?;
    let session = match context.decide(&request.options, |state| before_commit(state, &request.body)).await? {
        BeforeCommit::Committed { log_seq, revision } => {
            return Answer::new(log_seq, &RevisionReply { revision: *revision });
        }
        BeforeCommit::Open(session) => session,
    };
    let CommitImportRequest { identity, session_id, manifest_sha256, coordinator } = request.body;
    let asked = session.placement.iter().map(async |node| {
        let receipt = context.nodes.receipt(node, &session.instance, &session_id).await?;
        check_receipt(&receipt, node, &session, manifest_sha256)?;
        Ok::<Receipt, BallastError>(receipt)
    });
    let receipts = try_join_all(asked).await?;
    let manifest = agreed(&receipts)?;
    let command = CommitImport { identity, session_id, manifest, receipts, coordinator };
    // The receipts may differ between repeats (a node restarted), so the caller's request id would only be in the way.
    let (position, reply) = context.submit_afresh(&request.options, Command::CommitImport(command)).await?;
    answer_with(position, reply)
}

/// What a commit finds.
enum BeforeCommit {
    /// A repeat: the result is there.
    Committed { log_seq: u64, revision: Box<WeightRevisionMetadata> },
    /// The caller's session.
    Open(Box<ImportSession>),
}

fn before_commit(state: &State, request: &CommitImportRequest) -> Result<BeforeCommit, BallastError> {
    let CommitImportRequest { identity, session_id, manifest_sha256: sha256, coordinator } = request;
    if let Some((record, manifest)) = state.revision(identity).and_then(|it| Some((it, it.manifest.as_ref()?))) {
        return match manifest.sha256 == *sha256 && record.availability == Availability::Ready {
            true => Ok(BeforeCommit::Committed { log_seq: state.log_seq(), revision: Box::new(record.clone()) }),
            false => Err(committed_otherwise(identity, record.availability, manifest.sha256, *sha256)),
        };
    }
    let session = state.coordinated_import(identity, session_id, coordinator.as_ref())?;
    // Before nodes are asked: whoever is missing says more than what is.
    state.expect_parts(identity)?;
    Ok(BeforeCommit::Open(Box::new(session.clone())))
}

fn committed_otherwise(
    identity: &RevisionIdentity,
    availability: Availability,
    expected: Digest,
    found: Digest,
) -> BallastError {
    let message = match availability {
        Availability::Ready | Availability::Degraded => {
            format!(
                "{identity} is published with manifest {expected}, not {found}: a revision never changes, import the next generation"
            )
        }
        other => format!("{identity} is {other}: its import was committed before; import the next generation"),
    };
    BallastError::new(ErrorCode::Conflict, message)
        .with_details(json!({ "expected_sha256": expected, "found_sha256": found }))
}

/// Whether the receipt is the node's own, of this import, and for the manifest that the importer means.
fn check_receipt(
    receipt: &Receipt,
    node: &NodeId,
    session: &ImportSession,
    sha256: Digest,
) -> Result<(), BallastError> {
    let ImportSession { session_id, identity, instance, .. } = session;
    let wrong = |what: &str, expected: &dyn std::fmt::Display, found: &dyn std::fmt::Display| {
        let message =
            format!("the receipt of node {node} names {what} {found}, expected {expected}: seal the import again");
        Err(BallastError::new(ErrorCode::ChecksumMismatch, message))
    };
    let manifest = &receipt.manifest;
    if receipt.node != *node {
        return wrong("node", node, &receipt.node);
    }
    if receipt.instance != *instance {
        return wrong("instance", instance, &receipt.instance);
    }
    if receipt.session_id != *session_id {
        return wrong("session", session_id, &receipt.session_id);
    }
    if manifest.sha256 != sha256 {
        return wrong("manifest", &sha256, &manifest.sha256);
    }
    if manifest.key != identity.manifest_key() {
        return wrong("manifest key", &identity.manifest_key(), &manifest.key);
    }
    if manifest.group_id != instance.group_id {
        return wrong("group", &instance.group_id, &manifest.group_id);
    }
    Ok(())
}

/// The manifest reference that every receipt names.
fn agreed(receipts: &[Receipt]) -> Result<ManifestRef, BallastError> {
    let Some(first) = receipts.first() else {
        return Err(BallastError::new(ErrorCode::NotReady, "the import was placed on no node: begin it again"));
    };
    match receipts.iter().find(|other| other.manifest != first.manifest || other.layout_digest != first.layout_digest) {
        Some(other) => {
            let message = format!(
                "nodes {} and {} sealed different manifests: abort the import and begin it again",
                first.node, other.node
            );
            Err(BallastError::new(ErrorCode::Conflict, message))
        }
        None => Ok(first.manifest.clone()),
    }
}
