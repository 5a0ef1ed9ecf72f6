//! Puts of several participants (ARCHITECTURE.md, Import sessions): each sends the boxes that it holds, one coordinator opens
//! and commits the import. Nobody ever holds the whole model: what the others have sent is known to the coordinator by
//! its checksums.

use std::time::{Duration, Instant};

use ballast_schemas::frame::{ByteRange, OfferedFragment};
use ballast_schemas::manifest::ManifestPlan;
use ballast_schemas::{
    BallastError, ErrorCode, ImportPart, JoinImportReply, JoinImportRequest, PartReply, PartRequest, ParticipantId,
    RevisionIdentity, SessionId, WriterId, missing_parts,
};
use ballast_transfer::checksum;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use uuid::Uuid;

use crate::gateway::Gateway;
use crate::nodes::Transport;
use crate::pieces::Pieces;
use crate::progress::Progress;
use crate::put::{Gathered, SMALL_BYTES, Work};
use crate::session::{OpenSession, keep_alive, until_lost};
use crate::source::{Data, Source, UnitSource};
use crate::store::WeightStore;
use crate::upload::Upload;

/// How often the coordinator looks how far the participants are, and whether they contradict each other.
const LOOK_EVERY: Duration = Duration::from_millis(250);
const CONFLICTS_EVERY: Duration = Duration::from_secs(2);
/// Boxes listed in one error's sentence, and in its details.
const NAMES_SHOWN: usize = 3;
const NAMES_DETAILED: usize = 100;

/// How a put is shared among participants.
#[derive(Clone, Debug)]
pub struct Sharing {
    /// Everyone who has to bring a part before the commit.
    pub participants: Vec<ParticipantId>,
    /// The one among them that this put is itself, if it is one.
    pub participant: Option<ParticipantId>,
    /// The session's name; a new one otherwise. A coordinator that comes again under the same name goes on with its session.
    pub session_id: Option<SessionId>,
    /// How long the commit waits for participants that give no sign of life, or have not joined. Those that are at work are
    /// waited for as long as they are.
    pub patience: Duration,
}

/// One participant's part of an import that another put has opened. Dropping it without [`PartWriter::finish`] leaves the
/// import open: another run of the same participant may join and go on.
#[derive(Debug)]
pub struct PartWriter {
    gateway: Gateway,
    request: PartRequest,
    renewer: AbortHandle,
    lost: watch::Receiver<Option<BallastError>>,
    upload: Upload,
    pieces: Pieces,
    gathered: Gathered,
    /// Of the gathered pieces, in their order.
    offered: Vec<OfferedFragment>,
    sent_bytes: u64,
    started: Instant,
}

/// What a participant did.
#[derive(Clone, Debug)]
pub struct PartReport {
    /// What it is a part of.
    pub identity: RevisionIdentity,
    /// Who.
    pub participant: ParticipantId,
    /// Bytes of its boxes.
    pub bytes: u64,
    /// Of these, the bytes that this run has sent: other participants, or an earlier run, brought the others.
    pub sent_bytes: u64,
    /// From the join to the end.
    pub elapsed: Duration,
    /// How the bytes went.
    pub transport: Transport,
}

impl PartWriter {
    /// Joins the session that a put of several participants has opened. `source` describes the whole model, the same for
    /// everyone, and gives no bytes.
    ///
    /// # Errors
    /// At once, for a participant that comes too late or from elsewhere: `CONFLICT` when another session imports the
    /// revision, it is published, or the geometry is another; `LEASE_EXPIRED` when the session has ended; `NOT_FOUND`;
    /// `INVALID_ARGUMENT` for a participant that was not declared.
    pub async fn join(
        store: &WeightStore,
        source: Source,
        identity: &RevisionIdentity,
        session_id: &SessionId,
        participant: &ParticipantId,
    ) -> Result<Self, BallastError> {
        let (plan, units) = source.plan(identity)?;
        expect_later(&units)?;
        Self::begin(store.gateway(), (&plan, &units), identity, session_id, participant).await
    }

    async fn begin(
        gateway: &Gateway,
        (plan, units): (&ManifestPlan, &[UnitSource]),
        identity: &RevisionIdentity,
        session_id: &SessionId,
        participant: &ParticipantId,
    ) -> Result<Self, BallastError> {
        let started = Instant::now();
        let writer_id = WriterId::new(Uuid::new_v4().to_string());
        let body = JoinImportRequest {
            identity: identity.clone(),
            session_id: session_id.clone(),
            participant: participant.clone(),
            writer_id: writer_id.map_err(|error| BallastError::invalid(error.to_string()))?,
            placement_digest: plan.placement_digest(),
        };
        let tenant = &identity.tenant_id;
        let joined: JoinImportReply = gateway.call(tenant, "join_import", &body).await?;
        let request = PartRequest {
            identity: identity.clone(),
            session_id: session_id.clone(),
            participant: participant.clone(),
            instance: joined.part.instance,
            epoch: joined.part.epoch,
        };
        let (send_lost, lost) = watch::channel(None);
        let ttl_ms = joined.session.ttl_ms;
        let renewer = keep_alive(gateway.clone(), tenant.clone(), "renew_part", request.clone(), ttl_ms, send_lost);
        let upload = Upload::begin(gateway, &joined.endpoints, &joined.token, &plan.extents()).await;
        let upload = upload.inspect_err(|_| renewer.abort())?;
        Ok(Self {
            gateway: gateway.clone(),
            request,
            renewer,
            lost,
            upload,
            pieces: Pieces::new(plan, units),
            gathered: Gathered::default(),
            offered: Vec::new(),
            sent_bytes: 0,
            started,
        })
    }

    /// What it is a part of.
    #[must_use]
    pub fn identity(&self) -> &RevisionIdentity {
        &self.request.identity
    }

    /// The session that was joined.
    #[must_use]
    pub fn session_id(&self) -> &SessionId {
        &self.request.session_id
    }

    /// Brings a tensor that is one box. Again with other bytes replaces them.
    ///
    /// # Errors
    /// `CONFLICT` naming both participants when another one holds other bytes; `CONFLICT` when another run of this
    /// participant has joined; `INVALID_ARGUMENT` for a tensor that was not announced so or has another size.
    pub async fn put_tensor(&mut self, name: &str, bytes: &[u8]) -> Result<(), BallastError> {
        self.put_piece(name, None, bytes).await
    }

    /// Brings one box of a tensor: its first element, its extent, its bytes row-major.
    ///
    /// # Errors
    /// As [`PartWriter::put_tensor`].
    pub async fn put_fragment(
        &mut self,
        name: &str,
        offset: &[u64],
        shape: &[u64],
        bytes: &[u8],
    ) -> Result<(), BallastError> {
        self.put_piece(name, Some((offset, shape)), bytes).await
    }

    pub(crate) async fn put_piece(
        &mut self,
        name: &str,
        wanted: Option<(&[u64], &[u64])>,
        bytes: &[u8],
    ) -> Result<(), BallastError> {
        let place = self.pieces.find(name, wanted, bytes.len() as u64)?;
        let crc64 = checksum(bytes);
        self.pieces.note(place, crc64);
        if bytes.is_empty() {
            return Ok(());
        }
        let fragment =
            OfferedFragment { unit: place.unit, offset: place.unit_offset, bytes: bytes.len() as u64, crc64 };
        if bytes.len() < SMALL_BYTES {
            let range = ByteRange { unit: fragment.unit, offset: fragment.offset, bytes: fragment.bytes };
            self.gathered.push(range, bytes, None);
            self.offered.push(fragment);
            return if self.gathered.is_full() { self.send_gathered().await } else { Ok(()) };
        }
        self.send_gathered().await?;
        self.offer(&[fragment], &[bytes]).await
    }

    async fn send_gathered(&mut self) -> Result<(), BallastError> {
        let (gathered, offered) = (std::mem::take(&mut self.gathered), std::mem::take(&mut self.offered));
        if offered.is_empty() {
            return Ok(());
        }
        self.offer(&offered, &gathered.buffers()).await
    }

    async fn offer(&mut self, fragments: &[OfferedFragment], buffers: &[&[u8]]) -> Result<(), BallastError> {
        let lost = until_lost(self.lost.clone());
        let sent = tokio::select! {
            sent = self.upload.offer(fragments, buffers) => sent,
            error = lost => Err(error),
        };
        self.sent_bytes += sent.map_err(|error| named(&self.pieces, error))?;
        Ok(())
    }

    /// Sends what is left, has the nodes compare what they got, and says that the part is there. The revision is READY once
    /// the coordinator has committed it.
    ///
    /// # Errors
    /// As [`PartWriter::put_tensor`]; `CHECKSUM_MISMATCH` naming a box that arrived otherwise than it was given.
    pub async fn finish(mut self) -> Result<PartReport, BallastError> {
        self.send_gathered().await?;
        let given = self.pieces.given();
        let lost = until_lost(self.lost.clone());
        let missing = tokio::select! {
            missing = self.upload.missing(&given) => missing,
            error = lost => Err(error),
        };
        if let Some(at) = missing.map_err(|error| named(&self.pieces, error))? {
            let found = self.pieces.name_at(given[at].unit, given[at].offset);
            let (tensor, shown) = found.unwrap_or_default();
            let message = format!("{shown} arrived otherwise than it was given; put it again");
            return Err(BallastError::new(ErrorCode::ChecksumMismatch, message).with_details(json!({"tensor": tensor})));
        }
        let tenant = self.request.identity.tenant_id.clone();
        let _: PartReply = self.gateway.call(&tenant, "finish_part", &self.request).await?;
        Ok(PartReport {
            identity: self.request.identity.clone(),
            participant: self.request.participant.clone(),
            bytes: given.iter().map(|fragment| fragment.bytes).sum(),
            sent_bytes: self.sent_bytes,
            elapsed: self.started.elapsed(),
            transport: self.upload.transport(),
        })
    }
}

impl Drop for PartWriter {
    fn drop(&mut self) {
        self.renewer.abort();
    }
}

/// A put of several participants sends what is given to it, and nothing by itself.
pub(crate) fn expect_later(units: &[UnitSource]) -> Result<(), BallastError> {
    match units.iter().find(|unit| !matches!(unit.data, Data::Later)) {
        None => Ok(()),
        Some(unit) => Err(BallastError::invalid(format!(
            "{:?} comes with its bytes; where several participants put, tensors are announced and come later, and extra files are not possible",
            unit.name
        ))),
    }
}

/// Joins a put's own participant to the session that it has opened.
pub(crate) async fn share(
    gateway: &Gateway,
    planned: (&ManifestPlan, &[UnitSource]),
    identity: &RevisionIdentity,
    sharing: Sharing,
    session: OpenSession,
    upload: Upload,
) -> Result<Work, BallastError> {
    let part = match &sharing.participant {
        None => None,
        Some(own) => Some(Box::new(PartWriter::begin(gateway, planned, identity, session.session_id(), own).await?)),
    };
    Ok(Work::Shared { session, upload, part, patience: sharing.patience })
}

/// Waits until every participant has brought its part: as long as they give signs of life, and for `patience` otherwise.
pub(crate) async fn wait_for_parts(
    session: &OpenSession,
    upload: &mut Upload,
    pieces: &Pieces,
    patience: Duration,
    progress: &Progress,
) -> Result<(), BallastError> {
    let began = Instant::now();
    let mut looked_at = None::<Instant>;
    loop {
        let found = session.look().await?;
        let Some(missing) = missing_parts(&found.participants, found.log_clock) else { return Ok(()) };
        if looked_at.is_none_or(|at| at.elapsed() >= CONFLICTS_EVERY) {
            expect_agreement(upload, pieces).await?;
            looked_at = Some(Instant::now());
        }
        let is_silent = |part: &ImportPart| {
            !part.done && (part.epoch == 0 || found.log_clock.since(part.heard_at) >= found.session.ttl_ms)
        };
        if began.elapsed() >= patience && found.participants.iter().any(is_silent) {
            return Err(missing.into());
        }
        progress.waiting(missing.message);
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn expect_agreement(upload: &mut Upload, pieces: &Pieces) -> Result<(), BallastError> {
    for offers in upload.offers(true).await? {
        let Some(offer) = offers.fragments.first() else { continue };
        let name = |at: u32| offers.participants.get(at as usize).map_or("", ParticipantId::as_str);
        let participants = [name(offer.participant), name(offer.differs.unwrap_or_default())];
        let details =
            json!({"unit": offer.fragment.unit, "offset": offer.fragment.offset, "participants": participants});
        return Err(named(pieces, BallastError::new(ErrorCode::Conflict, "").with_details(details)));
    }
    Ok(())
}

/// The checksum of every unit, from what each node holds of the participants' boxes.
pub(crate) async fn checksums_of_parts(
    upload: &mut Upload,
    pieces: &Pieces,
    known: Vec<Option<u64>>,
) -> Result<Vec<u64>, BallastError> {
    expect_agreement(upload, pieces).await?;
    let mut agreed: Option<Vec<u64>> = None;
    for offers in upload.offers(false).await? {
        let mut pieces = pieces.clone();
        pieces.note_held(&offers);
        expect_all_given(&pieces)?;
        let mut checksums = known.clone();
        pieces.complete(&mut checksums)?;
        let found: Vec<u64> = checksums.into_iter().map(Option::unwrap_or_default).collect();
        if agreed.get_or_insert_with(|| found.clone()) != &found {
            return Err(BallastError::new(
                ErrorCode::Conflict,
                "the nodes hold different bytes of this import; put it again",
            ));
        }
    }
    agreed.ok_or_else(|| BallastError::new(ErrorCode::Unavailable, "the import was placed on no node; begin it again"))
}

/// Every box was brought by somebody.
fn expect_all_given(pieces: &Pieces) -> Result<(), BallastError> {
    let missing = pieces.missing();
    if missing.is_empty() {
        return Ok(());
    }
    let shown: Vec<&str> = missing.iter().take(NAMES_SHOWN).map(|(_, shown)| shown.as_str()).collect();
    let more = if missing.len() > NAMES_SHOWN { ", …" } else { "" };
    let message = format!(
        "all participants are done, and none has brought {}{more}; a participant that holds it puts it before it finishes",
        shown.join(", ")
    );
    let mut tensors: Vec<&str> = missing.iter().map(|(tensor, _)| *tensor).collect();
    tensors.dedup();
    tensors.truncate(NAMES_DETAILED);
    Err(BallastError::invalid(message).with_details(json!({"missing": missing.len(), "tensors": tensors})))
}

/// What nodes say of a unit, with the tensor's name.
fn named(pieces: &Pieces, mut error: BallastError) -> BallastError {
    let (unit, offset) = (&error.details["unit"], &error.details["offset"]);
    let (Some(unit), Some(offset)) = (unit.as_u64().and_then(|unit| unit.try_into().ok()), offset.as_u64()) else {
        return error;
    };
    let Some((tensor, shown)) = pieces.name_at(unit, offset) else { return error };
    if let [Value::String(first), Value::String(second)] =
        error.details["participants"].as_array().map_or(&[][..], Vec::as_slice)
    {
        error.message = format!(
            "participants {first} and {second} hold different bytes for {shown}; what several hold has to be equal"
        );
    }
    error.details["tensor"] = tensor.into();
    error
}
