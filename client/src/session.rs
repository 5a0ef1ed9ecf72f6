//! An import session: begun (waiting for whoever is in the way), renewed while it is open, aborted when it is dropped
//! without a commit (RFC, Import and READY Publication; ARCHITECTURE.md, Import sessions).

use std::time::{Duration, Instant};

use ballast_schemas::{
    BallastError, BeginImportReply, BeginImportRequest, CommitImportRequest, Digest, ErrorCode, ImportReply,
    RevisionReply, SessionId, SessionRequest, TenantId, WeightRevisionMetadata, WriterId,
};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use uuid::Uuid;

use crate::gateway::Gateway;
use crate::progress::Progress;

/// How long the background abort after a cancellation tries.
const ABORT_PATIENCE: Duration = Duration::from_secs(10);
/// How often somebody in the way is looked at again.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a put into full memory waits for others to be demoted: a few cooldowns.
const MAKING_ROOM_PATIENCE: Duration = Duration::from_secs(150);

pub(crate) fn new_session_id() -> Result<SessionId, BallastError> {
    SessionId::new(Uuid::new_v4().to_string()).map_err(|error| BallastError::invalid(error.to_string()))
}

pub(crate) fn new_writer_id() -> Result<WriterId, BallastError> {
    WriterId::new(Uuid::new_v4().to_string()).map_err(|error| BallastError::invalid(error.to_string()))
}

/// An open session. Dropping it aborts the import in the background, if it is this run's own.
#[derive(Debug)]
pub(crate) struct OpenSession {
    gateway: Gateway,
    request: SessionRequest,
    /// It has several writers: another run of their coordinator finds it by its name.
    shared: bool,
    renewer: Option<AbortHandle>,
    lost: watch::Receiver<Option<BallastError>>,
    ended: bool,
}

impl OpenSession {
    /// Opens a session, waiting up to `patience` while another session or the remains of one are in the way, and longer while
    /// room is being made for it.
    pub(crate) async fn begin(
        gateway: &Gateway,
        request: &BeginImportRequest,
        progress: &Progress,
        patience: Duration,
    ) -> Result<(Self, BeginImportReply), BallastError> {
        let identity = &request.identity;
        let (send_lost, lost) = watch::channel(None);
        // Made before the request is sent: a session that opens while its caller gives up is aborted all the same.
        let mut session = Self {
            gateway: gateway.clone(),
            request: SessionRequest {
                identity: identity.clone(),
                session_id: request.session_id.clone(),
                coordinator: None,
            },
            shared: request.writer_id.is_some(),
            renewer: None,
            lost,
            ended: false,
        };
        let begin = || gateway.call::<_, BeginImportReply>(&identity.tenant_id, "begin_import", request);
        let undisturbed = || wait_while(progress, patience, in_the_way, &begin);
        let reply =
            wait_while(progress, MAKING_ROOM_PATIENCE, is_making_room, undisturbed).await.inspect_err(|error| {
                session.ended = error.code != ErrorCode::Unavailable;
            })?;
        session.request.coordinator = reply.session.coordinator();
        let (tenant, body) = (identity.tenant_id.clone(), session.request.clone());
        session.renewer = Some(keep_alive(gateway.clone(), tenant, "renew_import", body, request.ttl_ms, send_lost));
        Ok((session, reply))
    }

    /// Its name, for the participants that join it.
    pub(crate) fn session_id(&self) -> &SessionId {
        &self.request.session_id
    }

    /// The session as it stands, and how far its participants are.
    pub(crate) async fn look(&self) -> Result<ImportReply, BallastError> {
        self.gateway.call(&self.request.identity.tenant_id, "get_import", &self.request).await
    }

    /// Whether the import ends with this run. Not one with several writers that another run has begun or taken over, nor one
    /// whose begin was not answered and that may be such a one: their bytes are in it, and it ends by itself when nobody comes.
    pub(crate) fn is_own(&self) -> bool {
        let is_first = self.request.coordinator.as_ref().is_some_and(|own| own.epoch == 1);
        !self.shared || (is_first && self.lost.borrow().is_none())
    }

    /// Ends with the reason once the session is lost; never before.
    pub(crate) fn lost(&self) -> impl Future<Output = BallastError> + Send + use<> {
        until_lost(self.lost.clone())
    }

    /// Publishes what was sealed with this manifest.
    pub(crate) async fn commit(&mut self, manifest_sha256: Digest) -> Result<WeightRevisionMetadata, BallastError> {
        let SessionRequest { identity, session_id, coordinator } = self.request.clone();
        let tenant = identity.tenant_id.clone();
        let body = CommitImportRequest { identity, session_id, manifest_sha256, coordinator };
        let reply: RevisionReply = self.gateway.call(&tenant, "commit_import", &body).await?;
        self.ended = true;
        self.stop_renewing();
        Ok(reply.revision)
    }

    /// Gives the import up; its bytes are deleted. Tried for no longer than `patience`: the session ends by itself as well.
    pub(crate) async fn abort(mut self, patience: Duration) -> Result<(), BallastError> {
        self.stop_renewing();
        self.ended = true;
        let tenant = self.request.identity.tenant_id.clone();
        self.gateway.call_within::<_, Value>(&tenant, "abort_import", &self.request, patience).await.map(|_| ())
    }

    fn stop_renewing(&mut self) {
        if let Some(renewer) = self.renewer.take() {
            renewer.abort();
        }
    }
}

/// Gives a sign of life again and again, and says when it is refused.
pub(crate) fn keep_alive(
    gateway: Gateway,
    tenant: TenantId,
    verb: &'static str,
    body: impl Serialize + Send + Sync + 'static,
    ttl_ms: u64,
    lost: watch::Sender<Option<BallastError>>,
) -> AbortHandle {
    let ttl = Duration::from_millis(ttl_ms);
    let task = async move {
        loop {
            tokio::time::sleep(ttl / 3).await;
            match gateway.call_within::<_, Value>(&tenant, verb, &body, ttl).await {
                Ok(_) => {}
                // Nobody answers: the log's clock may stand still as well. What the session is worth shows at the commit.
                Err(error) if error.code == ErrorCode::Unavailable => {
                    tracing::warn!(%error, "an import session was not renewed")
                }
                Err(error) => {
                    lost.send_replace(Some(error));
                    return;
                }
            }
        }
    };
    tokio::spawn(task).abort_handle()
}

/// Ends with the reason once there is one; never before.
pub(crate) async fn until_lost(mut lost: watch::Receiver<Option<BallastError>>) -> BallastError {
    loop {
        if let Some(error) = lost.borrow_and_update().clone() {
            return error;
        }
        if lost.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        self.stop_renewing();
        if self.ended || !self.is_own() {
            return;
        }
        let (gateway, body) = (self.gateway.clone(), self.request.clone());
        self.gateway.in_background(async move {
            let tenant = body.identity.tenant_id.clone();
            if let Err(error) = gateway.call_within::<_, Value>(&tenant, "abort_import", &body, ABORT_PATIENCE).await {
                tracing::warn!(identity = %body.identity, %error, "an import was not aborted; its session ends by itself");
            }
        });
    }
}

/// What a session of our own may wait for: another session, the remains of one, or the base of a DELETE_FIRST.
fn in_the_way(error: &BallastError) -> bool {
    let has = |name: &str| error.details.get(name).is_some();
    match error.code {
        // A claim names its request; that is somebody's replacement and not about to pass.
        ErrorCode::Busy => has("session_id") || (has("operation_id") && !has("request_id")),
        ErrorCode::NotReady => error.details.get("phase").and_then(Value::as_str) == Some("DELETING_BASE"),
        _ => false,
    }
}

/// A gateway has AUTO revisions demoted, so that there will be room.
fn is_making_room(error: &BallastError) -> bool {
    error.code == ErrorCode::CapacityExhausted && error.details["making_room"] == true
}

/// Repeats `attempt` while it fails with something that passes, for up to `patience`.
pub(crate) async fn wait_while<T, F: Future<Output = Result<T, BallastError>>>(
    progress: &Progress,
    patience: Duration,
    passes: impl Fn(&BallastError) -> bool,
    mut attempt: impl FnMut() -> F,
) -> Result<T, BallastError> {
    let deadline = Instant::now() + patience;
    loop {
        match attempt().await {
            Err(error) if passes(&error) && Instant::now() + LOOK_EVERY < deadline => {
                progress.waiting(error.message);
                tokio::time::sleep(LOOK_EVERY).await;
            }
            other => return other,
        }
    }
}

/// Whether a revision stands in nobody's way but will soon be gone: an import in progress or the remains of one.
pub(crate) fn is_passing(metadata: &WeightRevisionMetadata) -> bool {
    use ballast_schemas::Availability::{Deleting, Importing};
    metadata.manifest.is_none() && matches!(metadata.availability, Importing | Deleting)
}
