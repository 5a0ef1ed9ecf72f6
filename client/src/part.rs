//! Puts of several participants (ARCHITECTURE.md, Import sessions): each sends the boxes that it holds, one coordinator opens
//! and commits the import. Nobody ever holds the whole model: what the others have sent is known to the coordinator by
//! its checksums.

use std::time::{Duration, Instant};

use ballast_schemas::frame::{ByteRange, OfferedFragment};
use ballast_schemas::manifest::ManifestPlan;
use ballast_schemas::{
    BallastError, ErrorCode, ImportPart, ImportReply, JoinImportReply, JoinImportRequest, PartReply, PartRequest,
    ParticipantId, RevisionIdentity, SessionId, WriterId, human_ms, missing_parts,
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
/// How often a participant looks again for what has not arrived, before it says so.
const LOOKS_AGAIN: u32 = 3;
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// Why a node refuses an offer: another participant's bytes differ.
const OTHER_BYTES: &str = "OTHER_BYTES";
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
    /// How long the commit waits, at least, for participants that give no sign of life, or have not joined. One that has joined
    /// counts as silent when its process was not heard of for the session's time to live (30 s). Those that are at work are
    /// waited for as long as their processes live, one that hangs included: a job that has a deadline ends the commit itself.
    pub patience: Duration,
}

impl Sharing {
    pub(crate) fn check(&self) -> Result<(), BallastError> {
        if self.participants.is_empty() {
            return Err(BallastError::invalid("participants is empty; name everyone who brings a part"));
        }
        match self.participant.as_ref().filter(|own| !self.participants.contains(own)) {
            None => Ok(()),
            Some(own) => Err(BallastError::invalid(format!(
                "participant {own} is not among the {} participants",
                self.participants.len()
            ))),
        }
    }
}

/// Gives signs of life until it is dropped, as it also is when a join is given up half-way.
#[derive(Debug)]
struct Renewer(AbortHandle);

impl Drop for Renewer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One participant's part of an import that another put has opened. Dropping it without [`PartWriter::finish`] leaves the
/// import open: another run of the same participant may join and go on.
#[derive(Debug)]
pub struct PartWriter {
    gateway: Gateway,
    request: PartRequest,
    _renewer: Renewer,
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
        let renewer = Renewer(renewer);
        let upload = Upload::begin(gateway, &joined.endpoints, &joined.token, &plan.extents()).await?;
        Ok(Self {
            gateway: gateway.clone(),
            request,
            _renewer: renewer,
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
        if self.gathered.has(fragment.unit, fragment.offset) {
            // A box that is given again comes after what was given before.
            self.send_gathered().await?;
        }
        if bytes.len() < SMALL_BYTES {
            self.gather(fragment, bytes);
            return if self.gathered.is_full() { self.send_gathered().await } else { Ok(()) };
        }
        self.send_gathered().await?;
        self.offer(&[fragment], &[bytes]).await
    }

    /// Sends the small boxes that were gathered. After an error they are kept, but for one that another participant has with
    /// other bytes: the next call sends the others.
    async fn send_gathered(&mut self) -> Result<(), BallastError> {
        let (gathered, offered) = (std::mem::take(&mut self.gathered), std::mem::take(&mut self.offered));
        if offered.is_empty() {
            return Ok(());
        }
        let sent = self.offer(&offered, &gathered.buffers()).await;
        let Err(error) = &sent else { return Ok(()) };
        let place = place_in(error);
        for (fragment, bytes) in offered.iter().zip(gathered.buffers()) {
            if place != Some((fragment.unit, fragment.offset)) {
                self.gather(*fragment, bytes);
            }
        }
        sent
    }

    fn gather(&mut self, fragment: OfferedFragment, bytes: &[u8]) {
        let range = ByteRange { unit: fragment.unit, offset: fragment.offset, bytes: fragment.bytes };
        self.gathered.push(range, bytes, None);
        self.offered.push(fragment);
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
    /// As [`PartWriter::put_tensor`]; `CHECKSUM_MISMATCH` naming boxes that are not on the nodes as they were given.
    pub async fn finish(mut self) -> Result<PartReport, BallastError> {
        self.send_gathered().await?;
        let given = self.pieces.given();
        let mut missing = self.missing(&given).await?;
        for _ in 0..LOOKS_AGAIN {
            if missing.is_empty() {
                break;
            }
            // The last piece of a run that was replaced may still be on its way into memory.
            tokio::time::sleep(LOOK_AGAIN_AFTER).await;
            missing = self.missing(&missing).await?;
        }
        expect_arrived(&self.pieces, &missing)?;
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

    async fn missing(&mut self, given: &[OfferedFragment]) -> Result<Vec<OfferedFragment>, BallastError> {
        let lost = until_lost(self.lost.clone());
        let missing = tokio::select! {
            missing = self.upload.missing(given) => missing,
            error = lost => Err(error),
        };
        missing.map_err(|error| named(&self.pieces, error))
    }
}

fn expect_arrived(pieces: &Pieces, missing: &[OfferedFragment]) -> Result<(), BallastError> {
    let names = missing.iter().filter_map(|fragment| pieces.name_at(fragment.unit, fragment.offset));
    let names: Vec<(&str, String)> = names.collect();
    if missing.is_empty() {
        return Ok(());
    }
    let (shown, tensors) = listed(&names);
    let message = format!(
        "the nodes do not have {shown} as they were given, or another run of the participant that was to bring them does not \
         hold them; another run of this participant puts them again"
    );
    let details = json!({"missing": missing.len(), "tensors": tensors});
    Err(BallastError::new(ErrorCode::ChecksumMismatch, message).with_details(details))
}

/// Boxes in a sentence, and the tensors that they are of.
fn listed<'a>(boxes: &[(&'a str, String)]) -> (String, Vec<&'a str>) {
    let shown: Vec<&str> = boxes.iter().take(NAMES_SHOWN).map(|(_, shown)| shown.as_str()).collect();
    let more = if boxes.len() > NAMES_SHOWN { ", …" } else { "" };
    let mut tensors: Vec<&str> = boxes.iter().map(|(tensor, _)| *tensor).collect();
    tensors.dedup();
    tensors.truncate(NAMES_DETAILED);
    (format!("{}{more}", shown.join(", ")), tensors)
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
        if began.elapsed() >= patience {
            expect_signs_of_life(&found)?;
        }
        progress.waiting(missing.message);
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Nobody is silent whose part is still to come.
fn expect_signs_of_life(found: &ImportReply) -> Result<(), BallastError> {
    let silent_ms = |part: &ImportPart| found.log_clock.since(part.heard_at);
    let is_silent = |part: &&ImportPart| !part.done && (part.epoch == 0 || silent_ms(part) >= found.session.ttl_ms);
    let mut silent: Vec<&ImportPart> = found.participants.iter().filter(is_silent).collect();
    if silent.is_empty() {
        return Ok(());
    }
    silent.sort_by_key(|part| (part.epoch > 0, part.heard_at));
    let describe = |part: &&ImportPart| match part.epoch {
        0 => format!("{} has not joined", part.participant),
        _ => format!("{} was last heard of {} ago", part.participant, human_ms(silent_ms(part))),
    };
    let shown: Vec<String> = silent.iter().take(NAMES_SHOWN).map(describe).collect();
    let more = if silent.len() > NAMES_SHOWN { ", …" } else { "" };
    let at_work = found.participants.iter().filter(|part| !part.done).count() - silent.len();
    let message = format!(
        "{} of {} participants are silent and have not brought their part: {}{more} ({at_work} others are at work); another run \
         of them joins",
        silent.len(),
        found.participants.len(),
        shown.join(", ")
    );
    let names: Vec<&str> = silent.iter().map(|part| part.participant.as_str()).collect();
    Err(BallastError::new(ErrorCode::NotReady, message).with_details(json!({ "participants": names })))
}

async fn expect_agreement(upload: &mut Upload, pieces: &Pieces) -> Result<(), BallastError> {
    for offers in upload.offers(true).await? {
        let Some(offer) = offers.fragments.first() else { continue };
        let name = |at: u32| offers.participants.get(at as usize).map_or("", ParticipantId::as_str);
        let participants = [name(offer.participant), name(offer.differs.unwrap_or_default())];
        let details = json!({"reason": OTHER_BYTES, "unit": offer.fragment.unit, "offset": offer.fragment.offset, "participants": participants});
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
    let (shown, tensors) = listed(&missing);
    let message = format!(
        "all participants are done, and none has brought {shown}; a participant that holds it puts it before it finishes"
    );
    Err(BallastError::invalid(message).with_details(json!({"missing": missing.len(), "tensors": tensors})))
}

/// The unit and the byte in it that an error of a node is about.
fn place_in(error: &BallastError) -> Option<(u32, u64)> {
    Some((error.details["unit"].as_u64()?.try_into().ok()?, error.details["offset"].as_u64()?))
}

/// What nodes say of a unit, with the tensor's name.
fn named(pieces: &Pieces, mut error: BallastError) -> BallastError {
    let Some((tensor, shown)) = place_in(&error).and_then(|(unit, offset)| pieces.name_at(unit, offset)) else {
        return error;
    };
    let participants = error.details["participants"].as_array().map_or(&[][..], Vec::as_slice);
    error.message = match (participants, error.details["reason"].as_str()) {
        ([Value::String(first), Value::String(second)], Some(OTHER_BYTES)) => format!(
            "participants {first} and {second} hold different bytes for {shown}; what several hold has to be equal"
        ),
        _ => format!("{shown}: {}", error.message),
    };
    error.details["tensor"] = tensor.into();
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{TensorData, TensorSource};

    #[test]
    fn what_a_node_says_of_a_byte_names_the_tensor() {
        let tensor = TensorSource {
            name: "w".into(),
            dtype: "U8".into(),
            shape: vec![600],
            aliases: vec![],
            data: TensorData::Later,
        };
        let identity = RevisionIdentity::new("default", "default", "m", "main", 1).unwrap();
        let (plan, units) = Source::from_tensors(vec![tensor]).unwrap().plan(&identity).unwrap();
        let pieces = Pieces::new(&plan, &units);
        let said = |details: Value| {
            let error = named(&pieces, BallastError::new(ErrorCode::Conflict, "they overlap").with_details(details));
            (error.message, error.details["tensor"].clone())
        };
        let both = json!(["rank0", "rank1"]);
        let (message, tensor) = said(json!({"unit": 0, "offset": 0, "participants": both, "reason": "OTHER_BYTES"}));
        assert!(message.starts_with("participants rank0 and rank1 hold different bytes for tensor \"w\""), "{message}");
        assert_eq!(tensor, "w");
        let overlap = said(json!({"unit": 0, "offset": 512, "participants": both}));
        assert_eq!(overlap, ("tensor \"w\": they overlap".to_owned(), "w".into()));
        assert_eq!(said(json!({"unit": 7, "offset": 0})), ("they overlap".to_owned(), Value::Null));
        assert_eq!(said(Value::Null), ("they overlap".to_owned(), Value::Null));
    }
}
