//! `WeightStore`: the eleven operations on managed weight revisions, and nothing else (RFC, Python API). Payload planning,
//! manifests, leases and transfers are means to these ends and live beside it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::{
    Availability, BallastError, ClaimPhase, ClaimReply, ErrorCode, GetSizeReply, HotRatio, IdentityRequest,
    IsExistReply, ListRequest, MigrateRequest, OperationId, OperationReply, OperationRequest, RemoveRequest,
    ReplacementClaim, Residency, RevisionIdentity, RevisionPage, RevisionReply, RevisionView, TenantId,
    UpdatePolicyRequest, UpsertMode, UpsertRequest, WeightOperation, WeightRevisionMetadata, WeightStoragePolicy,
    default_upsert_request_id,
};

use crate::base::BaseUse;
use crate::gateway::Gateway;
use crate::get::{GetOptions, GetReport, GetTarget, get};
use crate::progress::Progress;
use crate::put::{PutRequest, PutWriter};
use crate::session::{is_passing, wait_while};
use crate::source::Source;

/// How long a put waits for the remains of an earlier import, and for another session to end.
const IN_THE_WAY_PATIENCE: Duration = Duration::from_secs(45);
/// How long a DELETE_FIRST waits for its base to be deleted.
const BASE_DELETION_PATIENCE: Duration = Duration::from_secs(600);
const CLAIM_LOOK_EVERY: Duration = Duration::from_millis(200);

/// The managed weights of a cluster. Cheap to clone.
#[derive(Clone, Debug)]
pub struct WeightStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    gateway: Gateway,
    default_policy: Option<WeightStoragePolicy>,
}

/// How a generation is replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpsertOptions {
    /// PUT_FIRST keeps the base until the target is READY; DELETE_FIRST saves its room and can not go back.
    pub mode: UpsertMode,
    /// The target's policy; `None`: the store's default, else the base's.
    pub policy: Option<WeightStoragePolicy>,
    /// Names the replacement; `None`: derived from the other arguments, so that the same call finds its claim again.
    pub request_id: Option<String>,
    /// Whether the commit waits until the base is gone and the lineage's watermark stands at the target.
    pub wait_completed: bool,
}

impl Default for UpsertOptions {
    fn default() -> Self {
        Self { mode: UpsertMode::PutFirst, policy: None, request_id: None, wait_completed: false }
    }
}

impl WeightStore {
    /// A store behind this gateway.
    #[must_use]
    pub fn new(gateway: Gateway) -> Self {
        Self { shared: Arc::new(Shared { gateway, default_policy: None }) }
    }

    /// A store whose puts take `policy` when their caller gives none, before the cluster's default.
    #[must_use]
    pub fn with_default_policy(gateway: Gateway, policy: WeightStoragePolicy) -> Self {
        Self { shared: Arc::new(Shared { gateway, default_policy: Some(policy) }) }
    }

    pub(crate) fn gateway(&self) -> &Gateway {
        &self.shared.gateway
    }

    /// Begins to publish a complete revision: opens the import and takes room for it. Bytes move in
    /// [`PutWriter::commit`], which returns once the revision is READY. Dropping the writer aborts the import.
    ///
    /// While another import of the same identity, or the remains of one, are in the way, this waits for up to 45 s.
    /// A revision that is READY with the same content is found again instead of imported.
    ///
    /// # Errors
    /// `CONFLICT` when the identity holds other content or its generation has passed; `CAPACITY_EXHAUSTED` with numbers
    /// when no node could hold it; `BUSY` when what was in the way stayed; `INVALID_ARGUMENT` naming what is wrong.
    pub async fn weight_put(
        &self,
        source: Source,
        identity: &RevisionIdentity,
        policy: Option<WeightStoragePolicy>,
        progress: Progress,
    ) -> Result<PutWriter, BallastError> {
        let request = PutRequest {
            identity: identity.clone(),
            policy: policy.or(self.shared.default_policy),
            claim: None,
            wait_completed: false,
            patience: IN_THE_WAY_PATIENCE,
            base: None,
        };
        PutWriter::begin(self.gateway(), source, request, progress).await
    }

    /// Reads a revision into a folder or into buffers, under a lease that is renewed while bytes move and released at the
    /// end, whatever that is. A target that was written before the lease was confirmed is only then put in place.
    ///
    /// # Errors
    /// `NOT_FOUND`, `NOT_READY`; `LEASE_EXPIRED` when the lease lapsed on the way; `CHECKSUM_MISMATCH` naming the tensors
    /// that no replica had right; `UNAVAILABLE` naming those that could not be read.
    pub async fn weight_get(
        &self,
        identity: &RevisionIdentity,
        target: GetTarget<'_>,
        options: GetOptions,
    ) -> Result<GetReport, BallastError> {
        get(self.gateway(), identity, target, options).await
    }

    /// Whether exactly this revision is READY and readable.
    ///
    /// # Errors
    /// `UNAVAILABLE` when nobody answers.
    pub async fn weight_is_exist(&self, identity: &RevisionIdentity) -> Result<bool, BallastError> {
        let reply: IsExistReply = self.about("is_exist", identity).await?;
        Ok(reply.exists)
    }

    /// The revision's record, with its active leases counted.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub async fn weight_get_metadata(&self, identity: &RevisionIdentity) -> Result<RevisionView, BallastError> {
        self.about("get_metadata", identity).await
    }

    /// Logical payload bytes that were validated at the commit.
    ///
    /// # Errors
    /// `NOT_FOUND`, or `NOT_READY` before the commit.
    pub async fn weight_get_size(&self, identity: &RevisionIdentity) -> Result<u64, BallastError> {
        let reply: GetSizeReply = self.about("get_size", identity).await?;
        Ok(reply.logical_bytes)
    }

    /// One page of a tenant's revisions, without reading any manifest.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a limit outside 1 to 1000 or a page token that is none.
    pub async fn weight_list(&self, tenant: &TenantId, query: &ListRequest) -> Result<RevisionPage, BallastError> {
        self.gateway().call(tenant, "list", query).await
    }

    /// Changes the policy and nothing else.
    ///
    /// # Errors
    /// `STALE_GENERATION`, `BUSY` while an operation is active, `NOT_READY`.
    pub async fn weight_update_policy(
        &self,
        identity: &RevisionIdentity,
        policy: WeightStoragePolicy,
        expected_metadata_generation: u64,
    ) -> Result<WeightRevisionMetadata, BallastError> {
        let body = UpdatePolicyRequest { identity: identity.clone(), policy, expected_metadata_generation };
        let reply: RevisionReply = self.gateway().call(&identity.tenant_id, "update_policy", &body).await?;
        Ok(reply.revision)
    }

    /// Begins to replace a revision by a higher generation of its lineage. The writer's commit returns once the target is
    /// READY (or, if asked to, once the base is gone). The same call after a failure goes on where it had stopped.
    ///
    /// With PUT_FIRST the base is held under a lease while the target is imported, and units that it has too are not sent.
    ///
    /// # Errors
    /// `STALE_GENERATION`; `BUSY` when another replacement is under way, or in DELETE_FIRST while the base is in use;
    /// `CONFLICT` for a generation that is not higher, or a request id with other arguments; and those of a put.
    pub async fn weight_upsert(
        &self,
        source: Source,
        replacing: &RevisionIdentity,
        target_generation: u64,
        expected_metadata_generation: u64,
        options: UpsertOptions,
        progress: Progress,
    ) -> Result<PutWriter, BallastError> {
        // A base that is deleted before its target is imported has nothing to give.
        let base = (options.mode == UpsertMode::PutFirst).then(|| BaseUse::Reuse(replacing.clone()));
        self.begin_upsert(source, replacing, target_generation, expected_metadata_generation, options, base, progress)
            .await
    }

    #[expect(clippy::too_many_arguments, reason = "those of an upsert, and where its units come from")]
    pub(crate) async fn begin_upsert(
        &self,
        source: Source,
        replacing: &RevisionIdentity,
        target_generation: u64,
        expected_metadata_generation: u64,
        options: UpsertOptions,
        base: Option<BaseUse>,
        progress: Progress,
    ) -> Result<PutWriter, BallastError> {
        let target = replacing
            .lineage()
            .generation(target_generation)
            .map_err(|error| BallastError::invalid(error.to_string()))?;
        let UpsertOptions { mode, policy, request_id, wait_completed } = options;
        let policy = policy.or(self.shared.default_policy);
        let derived = || default_upsert_request_id(replacing, &target, mode, expected_metadata_generation);
        let request_id = request_id.unwrap_or_else(derived);
        // What can not be sent is found before anything is claimed or, in DELETE_FIRST, deleted.
        source.clone().plan(&target)?;
        let body = UpsertRequest {
            base: replacing.clone(),
            target: target.clone(),
            mode,
            expected_metadata_generation,
            replacement_request_id: Some(request_id),
            policy,
        };
        let claim = self.claim(&body, &progress).await?;
        let patience = IN_THE_WAY_PATIENCE;
        let request = PutRequest { identity: target, policy, claim: Some(claim), wait_completed, patience, base };
        PutWriter::begin(self.gateway(), source, request, progress).await
    }

    /// Claims the lineage, waiting while the remains of an earlier attempt at the same target are deleted, and while the
    /// replacement that published the base still retires its own.
    async fn claim(&self, body: &UpsertRequest, progress: &Progress) -> Result<ReplacementClaim, BallastError> {
        let tenant = &body.base.tenant_id;
        let attempt = || async {
            let error = match self.gateway().call::<_, ClaimReply>(tenant, "upsert", body).await {
                Ok(reply) => return Ok(Ok(reply.claim)),
                Err(error) => error,
            };
            // Busy for a while, or for as long as somebody likes? The target's record tells.
            let of_base = error.details["target_generation"] == body.base.weight_generation;
            let record = if of_base { &body.base } else { &body.target };
            let passing = error.code == ErrorCode::Busy
                && matches!(self.weight_get_metadata(record).await, Ok(view) if match of_base {
                    // The claim in the way has published this base, and is over when the base before is gone.
                    true => is_published(&view.metadata),
                    false => is_passing(&view.metadata),
                });
            if passing { Err(error) } else { Ok(Err(error)) }
        };
        let claim = wait_while(progress, IN_THE_WAY_PATIENCE, |_| true, attempt).await??;
        self.await_base_deletion(claim, progress).await
    }

    /// DELETE_FIRST: the target's import may begin once the base is gone.
    async fn await_base_deletion(
        &self,
        mut claim: ReplacementClaim,
        progress: &Progress,
    ) -> Result<ReplacementClaim, BallastError> {
        let deadline = Instant::now() + BASE_DELETION_PATIENCE;
        while claim.mode == UpsertMode::DeleteFirst && claim.phase == ClaimPhase::DeletingBase {
            if Instant::now() >= deadline {
                let message = format!(
                    "base {} is still being deleted by operation {}; the claim stays, the same upsert goes on with it",
                    claim.base, claim.operation_id
                );
                return Err(BallastError::new(ErrorCode::Busy, message));
            }
            progress.waiting(format!("base {} is being deleted", claim.base));
            tokio::time::sleep(CLAIM_LOOK_EVERY).await;
            claim = crate::Admin::new(self.gateway().clone())
                .get_upsert(&claim.target, Some(claim.request_id.clone()))
                .await?;
        }
        Ok(claim)
    }

    /// Starts (or finds) a migration to HOT, COLD or MIXED.
    ///
    /// # Errors
    /// `STALE_GENERATION`, `BUSY` when another operation is active, `POLICY_UNSATISFIABLE` for a PINNED revision,
    /// `NOT_READY`.
    pub async fn weight_migrate(
        &self,
        identity: &RevisionIdentity,
        target: Residency,
        mixed_hot_ratio: Option<HotRatio>,
        expected_metadata_generation: u64,
    ) -> Result<WeightOperation, BallastError> {
        let body = MigrateRequest { identity: identity.clone(), target, mixed_hot_ratio, expected_metadata_generation };
        let reply: OperationReply = self.gateway().call(&identity.tenant_id, "migrate", &body).await?;
        Ok(reply.operation)
    }

    /// An operation's target, progress and error; also after it has ended.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub async fn weight_get_operation(
        &self,
        tenant: &TenantId,
        operation_id: &OperationId,
    ) -> Result<WeightOperation, BallastError> {
        let body = OperationRequest { operation_id: operation_id.clone() };
        let reply: OperationReply = self.gateway().call(tenant, "get_operation", &body).await?;
        Ok(reply.operation)
    }

    /// Starts the deletion of the whole group; a tombstone remains.
    ///
    /// # Errors
    /// `STALE_GENERATION`; `BUSY` while a lease or an operation is active; `NOT_FOUND`.
    pub async fn weight_remove(
        &self,
        identity: &RevisionIdentity,
        expected_metadata_generation: u64,
    ) -> Result<WeightRevisionMetadata, BallastError> {
        let body = RemoveRequest { identity: identity.clone(), expected_metadata_generation };
        let reply: RevisionReply = self.gateway().call(&identity.tenant_id, "remove", &body).await?;
        Ok(reply.revision)
    }

    async fn about<R: serde::de::DeserializeOwned>(
        &self,
        verb: &str,
        identity: &RevisionIdentity,
    ) -> Result<R, BallastError> {
        let body = IdentityRequest { identity: identity.clone() };
        self.gateway().call(&identity.tenant_id, verb, &body).await
    }
}

/// Whether a revision can be found again instead of imported.
pub(crate) fn is_published(metadata: &WeightRevisionMetadata) -> bool {
    metadata.availability == Availability::Ready && metadata.manifest.is_some()
}
