//! A put: open the import, take room, move the bytes, seal, publish (RFC, Import and READY Publication). The bytes of one
//! import are `upload.rs`'s matter; the session's life is `session.rs`'s.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::frame::{ByteRange, OFFERS_MAX};
use ballast_schemas::manifest::{Manifest, ManifestPlan};
use ballast_schemas::{
    BallastError, BeginImportRequest, ClaimPhase, Digest, ErrorCode, IdentityRequest, ReplacementClaim,
    RevisionIdentity, RevisionView, SessionId, WeightRevisionMetadata, WeightStoragePolicy,
};
use ballast_transfer::{GroupLayout, checksum};
use serde_json::json;

use crate::admin::Admin;
use crate::base::BaseUse;
use crate::checksums::{StopOnDrop, of_units};
use crate::gateway::Gateway;
use crate::get::GetOptions;
use crate::nodes::Transport;
use crate::part::{PartWriter, checksums_of_parts, expect_later, share, wait_for_parts};
use crate::pieces::Pieces;
use crate::progress::{Phase, Progress};
use crate::reading::Reading;
use crate::session::{OpenSession, new_session_id, new_writer_id};
use crate::source::{Source, UnitSource};
use crate::store::is_published;
use crate::upload::Upload;

/// Of our sessions. Leaving a server that is cut off from the others takes 20 s until a renewal is heard again.
const IMPORT_TTL_MS: u64 = 30_000;
/// Pieces of fewer bytes are gathered, up to so many bytes or pieces, and sent together.
pub(crate) const SMALL_BYTES: usize = 256 << 10;
const GATHERED_BYTES: usize = 4 << 20;
const GATHERED_RANGES: usize = OFFERS_MAX;
/// How long a failed put tries to abort its import before it tells of its failure.
const ABORT_PATIENCE: Duration = Duration::from_secs(3);
/// A node that has less room than the gateway thought is asked again once its figures are known: then there is room, or the
/// gateway makes some or says why not.
const ROOM_TRIES: u32 = 3;
const FIGURES_AGE: Duration = Duration::from_millis(1_500);
const CLAIM_LOOK_EVERY: Duration = Duration::from_millis(250);

/// What to publish, as which revision.
#[derive(Debug)]
pub(crate) struct PutRequest {
    pub(crate) identity: RevisionIdentity,
    pub(crate) policy: Option<WeightStoragePolicy>,
    pub(crate) claim: Option<ReplacementClaim>,
    pub(crate) wait_completed: bool,
    pub(crate) patience: Duration,
    /// What is taken from another revision.
    pub(crate) base: Option<BaseUse>,
}

/// A revision being published. [`PutWriter::commit`] makes it READY; dropping the writer gives it up, as
/// [`PutWriter::give_up`] does.
#[derive(Debug)]
pub struct PutWriter {
    gateway: Gateway,
    request: PutRequest,
    progress: Progress,
    plan: ManifestPlan,
    units: Vec<UnitSource>,
    /// What comes later.
    pieces: Pieces,
    gathered: Gathered,
    /// By unit, as far as known.
    checksums: Vec<Option<u64>>,
    work: Work,
    started: Instant,
}

/// Small pieces that go together: each by itself would cost a round trip.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    pub(crate) ranges: Vec<ByteRange>,
    bytes: Vec<u8>,
    /// The units of the base that may be the same.
    candidates: Vec<Option<u32>>,
    places: HashSet<(u32, u64)>,
}

impl Gathered {
    pub(crate) fn is_full(&self) -> bool {
        self.bytes.len() >= GATHERED_BYTES || self.ranges.len() >= GATHERED_RANGES
    }

    /// Whether something was gathered for this place.
    pub(crate) fn has(&self, unit: u32, offset: u64) -> bool {
        self.places.contains(&(unit, offset))
    }

    /// `candidate`: the unit of a replacement's base that may be the same.
    pub(crate) fn push(&mut self, range: ByteRange, bytes: &[u8], candidate: Option<u32>) {
        self.places.insert((range.unit, range.offset));
        self.ranges.push(range);
        self.bytes.extend_from_slice(bytes);
        self.candidates.push(candidate);
    }

    pub(crate) fn buffers(&self) -> Vec<&[u8]> {
        let mut rest = self.bytes.as_slice();
        let cut = |range: &ByteRange| {
            // The bytes were appended with their range.
            let (own, after) = rest.split_at((range.bytes as usize).min(rest.len()));
            rest = after;
            own
        };
        self.ranges.iter().map(cut).collect()
    }
}

#[derive(Debug)]
pub(crate) enum Work {
    /// The import is open.
    Importing { session: OpenSession, upload: Upload },
    /// The import is open for several participants, perhaps for one of our own as well.
    Shared { session: OpenSession, upload: Upload, part: Option<Box<PartWriter>>, patience: Duration },
    /// The revision is READY already; the commit compares contents.
    Existing { revision: Box<WeightRevisionMetadata>, manifest: Arc<Manifest> },
}

/// What a put did.
#[derive(Clone, Debug)]
pub struct PutReport {
    /// The published record.
    pub revision: WeightRevisionMetadata,
    /// The replacement that it is the target of.
    pub claim: Option<ReplacementClaim>,
    /// The revision was READY before, with the same content.
    pub existed: bool,
    /// Logical payload bytes.
    pub bytes: u64,
    /// From the begin of the put to READY.
    pub elapsed: Duration,
    /// How the bytes went; `None` when none had to.
    pub transport: Option<Transport>,
    /// Bytes that were not sent because the base of the replacement has them.
    pub reused_bytes: u64,
}

impl PutWriter {
    pub(crate) async fn begin(
        gateway: &Gateway,
        source: Source,
        request: PutRequest,
        progress: Progress,
    ) -> Result<Self, BallastError> {
        let started = Instant::now();
        let sharing = source.sharing.clone();
        let (plan, units) = source.plan(&request.identity)?;
        if let Some(sharing) = &sharing {
            sharing.check()?;
            expect_later(&units)?;
        }
        let layout = GroupLayout::new(&plan.extents()).map_err(|error| BallastError::invalid(error.to_string()))?;
        let mut begin = BeginImportRequest {
            identity: request.identity.clone(),
            session_id: match sharing.as_ref().and_then(|sharing| sharing.session_id.clone()) {
                Some(session_id) => session_id,
                None => new_session_id()?,
            },
            ttl_ms: IMPORT_TTL_MS,
            policy: request.policy,
            placement_digest: plan.placement_digest(),
            logical_bytes: plan.logical_bytes(),
            reserved_bytes: layout.padded_bytes(),
            unit_count: plan.unit_count(),
            participants: sharing.as_ref().map(|sharing| sharing.participants.clone()).unwrap_or_default(),
            writer_id: sharing.is_some().then(new_writer_id).transpose()?,
        };
        // Giving up the import of a replacement's target would end the replacement.
        let again = request.claim.is_none() && sharing.is_none();
        let mut tries = if again { ROOM_TRIES } else { 1 };
        let work = loop {
            match OpenSession::begin(gateway, &begin, &progress, request.patience).await {
                Ok((session, reply)) => {
                    match Upload::begin(gateway, &reply.endpoints, &reply.token, &plan.extents()).await {
                        Ok(mut upload) => {
                            if let Some(sharing) = sharing {
                                break share(gateway, (&plan, &units), &request.identity, sharing, session, upload)
                                    .await?;
                            }
                            if let Some(base) = &request.base
                                && let Err(error) = upload.open_base(gateway, base).await
                            {
                                give_up(session).await;
                                return Err(error);
                            }
                            break Work::Importing { session, upload };
                        }
                        Err(error) => {
                            give_up(session).await;
                            tries -= 1;
                            if error.code != ErrorCode::CapacityExhausted || tries == 0 {
                                return Err(error);
                            }
                            progress.waiting(error.message);
                        }
                    }
                }
                // Of a shared put nobody could compare the whole, and a delta has none.
                Err(conflict)
                    if conflict.code == ErrorCode::Conflict
                        && sharing.is_none()
                        && !matches!(request.base, Some(BaseUse::Derive(..))) =>
                {
                    break existing(gateway, &request.identity, &plan, conflict).await?;
                }
                Err(error) => return Err(error),
            }
            tokio::time::sleep(FIGURES_AGE).await;
            begin.session_id = new_session_id()?;
        };
        let (pieces, checksums) = (Pieces::new(&plan, &units), vec![None; units.len()]);
        let gathered = Gathered::default();
        Ok(Self {
            gateway: gateway.clone(),
            request,
            progress,
            plan,
            units,
            pieces,
            gathered,
            checksums,
            work,
            started,
        })
    }

    /// What is published.
    #[must_use]
    pub fn identity(&self) -> &RevisionIdentity {
        &self.request.identity
    }

    /// Of a put of several participants: what they join with [`PartWriter::join`](crate::PartWriter::join).
    #[must_use]
    pub fn session_id(&self) -> Option<&SessionId> {
        match &self.work {
            Work::Shared { session, .. } => Some(session.session_id()),
            Work::Importing { .. } | Work::Existing { .. } => None,
        }
    }

    /// The replacement that it is the target of.
    #[must_use]
    pub fn claim(&self) -> Option<&ReplacementClaim> {
        self.request.claim.as_ref()
    }

    /// Writes a tensor that was announced as [`TensorData::Later`](crate::TensorData::Later). Again with other bytes
    /// replaces them.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a tensor that was not announced so or has another size; otherwise when a node refuses.
    pub async fn put_tensor(&mut self, name: &str, bytes: &[u8]) -> Result<(), BallastError> {
        self.put_piece(name, None, bytes).await
    }

    /// Writes one box of a tensor that was announced in boxes: its first element, its extent, its bytes row-major.
    ///
    /// # Errors
    /// As [`PutWriter::put_tensor`], and for a box that was not announced.
    pub async fn put_fragment(
        &mut self,
        name: &str,
        offset: &[u64],
        shape: &[u64],
        bytes: &[u8],
    ) -> Result<(), BallastError> {
        self.put_piece(name, Some((offset, shape)), bytes).await
    }

    async fn put_piece(
        &mut self,
        name: &str,
        wanted: Option<(&[u64], &[u64])>,
        bytes: &[u8],
    ) -> Result<(), BallastError> {
        if let Work::Shared { part, .. } = &mut self.work {
            let Some(part) = part else {
                let message = format!(
                    "this put of {} has no participant of its own; tensors come from those that join it",
                    self.request.identity
                );
                return Err(BallastError::invalid(message));
            };
            return part.put_piece(name, wanted, bytes).await;
        }
        let place = self.pieces.find(name, wanted, bytes.len() as u64)?;
        let sum = checksum(bytes);
        let range = ByteRange { unit: place.unit, offset: place.unit_offset, bytes: bytes.len() as u64 };
        let candidate = self.candidate(&range, sum);
        // A tensor that is given again comes after what was given before.
        let again = candidate.is_some() && self.gathered.has(range.unit, range.offset);
        if again || bytes.len() >= SMALL_BYTES {
            self.send_gathered().await?;
        }
        if bytes.len() < SMALL_BYTES {
            self.gathered.push(range, bytes, candidate);
            if self.gathered.is_full() {
                self.send_gathered().await?;
            }
        } else {
            self.send(&[range], &[bytes], &[candidate]).await?;
        }
        self.pieces.note(place, sum);
        Ok(())
    }

    /// The unit of the base that may be the same as one that comes as a whole.
    fn candidate(&self, range: &ByteRange, sum: u64) -> Option<u32> {
        let Work::Importing { upload, .. } = &self.work else { return None };
        let whole = range.offset == 0 && self.units.get(range.unit as usize)?.bytes == range.bytes;
        if whole { upload.candidate(range.bytes, sum) } else { None }
    }

    /// Sends the small pieces that were gathered, in the order in which they came.
    async fn send_gathered(&mut self) -> Result<(), BallastError> {
        if self.gathered.ranges.is_empty() {
            return Ok(());
        }
        let gathered = std::mem::take(&mut self.gathered);
        self.send(&gathered.ranges, &gathered.buffers(), &gathered.candidates).await
    }

    async fn send(
        &mut self,
        ranges: &[ByteRange],
        buffers: &[&[u8]],
        candidates: &[Option<u32>],
    ) -> Result<(), BallastError> {
        let Work::Importing { session, upload } = &mut self.work else { return Ok(()) };
        let lost = session.lost();
        tokio::select! {
            written = upload.write(ranges, buffers, candidates) => written,
            error = lost => Err(error),
        }
    }

    /// Moves the bytes, has them checked, and publishes the revision: READY and HOT when this returns.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` naming tensors that never came or a source that changed; `CHECKSUM_MISMATCH`; `CONFLICT` when
    /// the revision is READY with other content; `LEASE_EXPIRED` when the session was lost. The import is aborted then.
    pub async fn commit(mut self) -> Result<PutReport, BallastError> {
        if !matches!(self.work, Work::Shared { .. }) {
            self.pieces.complete(&mut self.checksums)?;
        }
        self.send_gathered().await?;
        let bytes = self.plan.logical_bytes();
        let (revision, existed, transport, reused_bytes) = match self.work {
            Work::Existing { revision, manifest } => {
                let checksums = compute(self.units, self.checksums, &self.progress, bytes).await?;
                expect_same(&self.request.identity, &manifest, &checksums)?;
                (*revision, true, None, 0)
            }
            Work::Importing { session, mut upload } => {
                let lost = session.lost();
                let moved = async {
                    let checksums = upload.run(&self.units, self.checksums, &self.progress, bytes).await?;
                    seal(&mut upload, self.plan, &checksums, &self.progress).await
                };
                let sealed = tokio::select! {
                    sealed = moved => sealed,
                    error = lost => Err(error),
                };
                // The target has all that it needs of it, or never will.
                upload.release_base().await;
                let transport = upload.transport();
                let published = publish(session, sealed, &self.progress, bytes, None).await;
                let revision = published.map_err(|error| unpublished(error, PUT_AGAIN))?;
                (revision, false, Some(transport), upload.reused_bytes())
            }
            Work::Shared { session, mut upload, part, patience } => {
                let lost = session.lost();
                let gathered = async {
                    if let Some(part) = part {
                        part.finish().await?;
                    }
                    wait_for_parts(&session, &mut upload, &self.pieces, patience, &self.progress).await?;
                    if let Some(sealed) = upload.sealed().await? {
                        // An earlier coordinator has come this far; its session admits no other geometry.
                        return Ok(sealed);
                    }
                    let checksums = checksums_of_parts(&mut upload, &self.pieces, self.checksums).await?;
                    seal(&mut upload, self.plan, &checksums, &self.progress).await
                };
                let sealed = tokio::select! {
                    sealed = gathered => sealed,
                    error = lost => Err(error),
                };
                let transport = upload.transport();
                let parts = Some((&mut upload, &self.pieces, patience));
                let published = publish(session, sealed, &self.progress, bytes, parts).await;
                let revision = published.map_err(|error| unpublished(error, SHARE_AGAIN))?;
                (revision, false, Some(transport), 0)
            }
        };
        let elapsed = self.started.elapsed();
        let claim = match self.request.claim {
            Some(claim) => Some(follow_claim(&self.gateway, claim, self.request.wait_completed, &self.progress).await?),
            None => None,
        };
        Ok(PutReport { revision, claim, existed, bytes, elapsed, transport, reused_bytes })
    }

    /// Gives the import up after an error: as [`PutWriter::abort`], but a session of several participants that another run of
    /// its coordinator has opened, or has taken over since, is left open with what they have brought.
    ///
    /// # Errors
    /// As [`PutWriter::abort`].
    pub async fn give_up(self) -> Result<(), BallastError> {
        match &self.work {
            Work::Shared { session, .. } if !session.is_own() => Ok(()),
            _ => self.abort().await,
        }
    }

    /// Gives the import up; its bytes are deleted.
    ///
    /// # Errors
    /// `UNAVAILABLE` when nobody answers; the session then ends by itself. `CONFLICT` when another run has taken it over.
    pub async fn abort(self) -> Result<(), BallastError> {
        match self.work {
            Work::Importing { session, mut upload } | Work::Shared { session, mut upload, .. } => {
                upload.release_base().await;
                drop(upload);
                session.abort(Duration::from_secs(30)).await
            }
            Work::Existing { .. } => Ok(()),
        }
    }
}

async fn seal(
    upload: &mut Upload,
    plan: ManifestPlan,
    checksums: &[u64],
    progress: &Progress,
) -> Result<Digest, BallastError> {
    let bytes = plan.logical_bytes();
    let manifest = plan.seal(checksums)?;
    progress.tell(Phase::Sealing, 0, bytes);
    upload.seal(&manifest).await?;
    Ok(manifest.sha256())
}

/// Commits what was sealed, or gives the import up. With `parts`, a participant of which another run has joined since the seal
/// is waited for once more: it finds its bytes there, or says that it has others.
async fn publish(
    mut session: OpenSession,
    sealed: Result<Digest, BallastError>,
    progress: &Progress,
    bytes: u64,
    mut parts: Option<(&mut Upload, &Pieces, Duration)>,
) -> Result<WeightRevisionMetadata, BallastError> {
    let published = async {
        let sha256 = sealed?;
        progress.tell(Phase::Committing, bytes, bytes);
        loop {
            match (session.commit(sha256).await, &mut parts) {
                (Err(error), Some((upload, pieces, patience))) if error.details["participants"].is_array() => {
                    progress.waiting(error.message);
                    wait_for_parts(&session, upload, pieces, *patience, progress).await?;
                }
                (published, _) => return published,
            }
        }
    };
    match published.await {
        Ok(revision) => Ok(revision),
        Err(error) => {
            give_up(session).await;
            Err(error)
        }
    }
}

const PUT_AGAIN: &str = "the same put again publishes it, or finds it published";
/// Nobody holds the whole of it, which would have to be compared.
const SHARE_AGAIN: &str =
    "its metadata tells whether the revision is READY all the same; if not, all participants put it again";

/// A fault on the way says what became of the revision.
fn unpublished(mut error: BallastError, then: &str) -> BallastError {
    if error.code == ErrorCode::Unavailable {
        error.message.push_str("; the import was given up: ");
        error.message.push_str(then);
    }
    error
}

/// After an error. What is not this run's own is left to others.
async fn give_up(session: OpenSession) {
    if session.is_own()
        && let Err(error) = session.abort(ABORT_PATIENCE).await
    {
        tracing::warn!(%error, "an import was not aborted; its session ends by itself");
    }
}

/// The import was refused: because the revision is there already, with the same geometry?
async fn existing(
    gateway: &Gateway,
    identity: &RevisionIdentity,
    plan: &ManifestPlan,
    conflict: BallastError,
) -> Result<Work, BallastError> {
    let body = IdentityRequest { identity: identity.clone() };
    let view = gateway.call::<_, RevisionView>(&identity.tenant_id, "get_metadata", &body).await;
    let Ok(view) = view else { return Err(conflict) };
    if !is_published(&view.metadata) || view.metadata.retired {
        return Err(conflict);
    }
    let reading = Reading::open(gateway, identity, &GetOptions::default()).await?;
    let (manifest, revision) = (reading.manifest().clone(), reading.revision().clone());
    reading.release().await?;
    if manifest.placement_digest() != plan.placement_digest() {
        return Err(other_content(identity, "its tensors and files are others"));
    }
    Ok(Work::Existing { revision: Box::new(revision), manifest })
}

fn other_content(identity: &RevisionIdentity, what: &str) -> BallastError {
    let message = format!(
        "{identity} is READY with other content: {what}; a revision never changes, publish the next generation"
    );
    BallastError::new(ErrorCode::Conflict, message)
}

/// Checksums of the whole source, without sending anything.
async fn compute(
    units: Vec<UnitSource>,
    known: Vec<Option<u64>>,
    progress: &Progress,
    bytes: u64,
) -> Result<Vec<u64>, BallastError> {
    let meter = progress.meter(Phase::Comparing, bytes);
    let stop = StopOnDrop::default();
    let flag = stop.0.clone();
    let computed = tokio::task::spawn_blocking(move || of_units(&units, &flag, &meter)).await;
    let computed = computed.map_err(|error| BallastError::invalid(format!("reading the source failed: {error}")))??;
    // What comes later has been put: the commit made sure.
    Ok(computed.into_iter().zip(known).map(|(computed, known)| computed.or(known).unwrap_or_default()).collect())
}

fn expect_same(identity: &RevisionIdentity, manifest: &Manifest, checksums: &[u64]) -> Result<(), BallastError> {
    let differs = manifest.units().iter().zip(checksums).position(|(unit, found)| unit.crc64 != *found);
    match differs {
        None => Ok(()),
        Some(unit) => {
            let groups = manifest.affinity_groups();
            let name = groups
                .get(unit)
                .and_then(|group| group.iter().find(|name| !name.is_empty()))
                .copied()
                .unwrap_or_default();
            Err(other_content(identity, &format!("{name:?} differs")).with_details(json!({"unit": unit, "name": name})))
        }
    }
}

/// The claim as it stands, or as it ends.
async fn follow_claim(
    gateway: &Gateway,
    claim: ReplacementClaim,
    to_its_end: bool,
    progress: &Progress,
) -> Result<ReplacementClaim, BallastError> {
    let admin = Admin::new(gateway.clone());
    loop {
        let now = admin.get_upsert(&claim.target, Some(claim.request_id.clone())).await?;
        if now.phase == ClaimPhase::Aborted && to_its_end {
            let message =
                format!("the replacement of {} by {} was aborted after its target was READY", now.base, now.target);
            return Err(BallastError::new(ErrorCode::Conflict, message));
        }
        if !to_its_end || now.phase.is_terminal() {
            return Ok(now);
        }
        progress.waiting(format!("{} is READY; {} is {}", now.target, now.base, describe(now.phase)));
        tokio::time::sleep(CLAIM_LOOK_EVERY).await;
    }
}

fn describe(phase: ClaimPhase) -> &'static str {
    match phase {
        ClaimPhase::RetiringBase => "read by the holders of older leases",
        ClaimPhase::DeletingBase => "being deleted",
        _ => "about to be retired",
    }
}
