//! What operators ask beside the eleven operations: the cluster's state, operations and claims, tombstones.

use ballast_schemas::{
    BallastError, ClaimReply, IdentityRequest, ListOperationsRequest, OperationId, OperationReply, OperationRequest,
    OperationsReply, RepairReply, RepairRequest, ReplacementClaim, RevisionIdentity, StatusReply, StatusRequest,
    TenantId, UpsertIdRequest, VerifyReply, VerifyRequest, WeightOperation,
};
use serde_json::Value;

use crate::gateway::Gateway;

/// The operator's side of a gateway. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Admin {
    gateway: Gateway,
}

impl Admin {
    /// Asks through this gateway.
    #[must_use]
    pub fn new(gateway: Gateway) -> Self {
        Self { gateway }
    }

    /// The cluster, the answering replica, its nodes, and how many of everything there are.
    ///
    /// # Errors
    /// `UNAVAILABLE` when nobody answers.
    pub async fn status(&self) -> Result<StatusReply, BallastError> {
        self.gateway.call(self.gateway.tenant(), "status", &StatusRequest {}).await
    }

    /// Operations of a tenant, newest first; `all`: also those that have ended.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a limit outside 1 to 1000.
    pub async fn list_operations(
        &self,
        tenant: &TenantId,
        all: bool,
        limit: u32,
    ) -> Result<Vec<WeightOperation>, BallastError> {
        let reply: OperationsReply =
            self.gateway.call(tenant, "list_operations", &ListOperationsRequest { all, limit }).await?;
        Ok(reply.operations)
    }

    /// Has what a revision lacks made again from what it has. `None`: nothing is missing.
    ///
    /// # Errors
    /// `NOT_FOUND`, `BUSY` while another operation is at work, `STALE_GENERATION`.
    pub async fn repair(
        &self,
        identity: &RevisionIdentity,
        expected_metadata_generation: Option<u64>,
    ) -> Result<Option<WeightOperation>, BallastError> {
        let body = RepairRequest { identity: identity.clone(), expected_metadata_generation };
        let reply: RepairReply = self.gateway.call(&identity.tenant_id, "repair", &body).await?;
        Ok(reply.operation)
    }

    /// Has a round of a revision's units read back on every node that holds some, from unit `from` on.
    ///
    /// # Errors
    /// `NOT_FOUND`, `NOT_READY` when it is not published, `UNAVAILABLE` when a node does not answer.
    pub async fn verify(&self, identity: &RevisionIdentity, from: u32) -> Result<VerifyReply, BallastError> {
        let body = VerifyRequest { identity: identity.clone(), from };
        self.gateway.call(&identity.tenant_id, "verify", &body).await
    }

    /// Ends an operation at its next step boundary.
    ///
    /// # Errors
    /// `NOT_FOUND`, or `CONFLICT` when it can not be ended that way.
    pub async fn cancel_operation(&self, tenant: &TenantId, id: &OperationId) -> Result<WeightOperation, BallastError> {
        self.steer(tenant, "cancel_operation", id).await
    }

    /// Stops an operation until it is resumed.
    ///
    /// # Errors
    /// `NOT_FOUND`, or `CONFLICT` when it has ended.
    pub async fn pause_operation(&self, tenant: &TenantId, id: &OperationId) -> Result<WeightOperation, BallastError> {
        self.steer(tenant, "pause_operation", id).await
    }

    /// Lets a paused operation go on.
    ///
    /// # Errors
    /// `NOT_FOUND`, or `CONFLICT` when it is not paused.
    pub async fn resume_operation(&self, tenant: &TenantId, id: &OperationId) -> Result<WeightOperation, BallastError> {
        self.steer(tenant, "resume_operation", id).await
    }

    /// Lets an operation that waits after a failure try again at once.
    ///
    /// # Errors
    /// `NOT_FOUND`, or `CONFLICT` when there is nothing to retry.
    pub async fn retry_operation(&self, tenant: &TenantId, id: &OperationId) -> Result<WeightOperation, BallastError> {
        self.steer(tenant, "retry_operation", id).await
    }

    async fn steer(&self, tenant: &TenantId, verb: &str, id: &OperationId) -> Result<WeightOperation, BallastError> {
        let reply: OperationReply =
            self.gateway.call(tenant, verb, &OperationRequest { operation_id: id.clone() }).await?;
        Ok(reply.operation)
    }

    /// Forgets a tombstone. The lineage's watermark stays.
    ///
    /// # Errors
    /// `NOT_FOUND`, or `NOT_READY` when the revision is not DELETED.
    pub async fn purge(&self, identity: &RevisionIdentity) -> Result<(), BallastError> {
        let body = IdentityRequest { identity: identity.clone() };
        self.gateway.call::<_, Value>(&identity.tenant_id, "purge", &body).await.map(|_| ())
    }

    /// A replacement of the lineage that `any` belongs to: the one named, or the latest.
    ///
    /// # Errors
    /// `NOT_FOUND` when there is none.
    pub async fn get_upsert(
        &self,
        any: &RevisionIdentity,
        request_id: Option<String>,
    ) -> Result<ReplacementClaim, BallastError> {
        self.claim("get_upsert", any, request_id).await
    }

    /// Gives a replacement up, where that is still possible.
    ///
    /// # Errors
    /// `NOT_FOUND`, or `CONFLICT` when it has gone too far.
    pub async fn abort_upsert(
        &self,
        any: &RevisionIdentity,
        request_id: &str,
    ) -> Result<ReplacementClaim, BallastError> {
        self.claim("abort_upsert", any, Some(request_id.to_owned())).await
    }

    async fn claim(
        &self,
        verb: &str,
        any: &RevisionIdentity,
        request_id: Option<String>,
    ) -> Result<ReplacementClaim, BallastError> {
        let body = UpsertIdRequest { identity: any.clone(), replacement_request_id: request_id };
        let reply: ClaimReply = self.gateway.call(&any.tenant_id, verb, &body).await?;
        Ok(reply.claim)
    }
}
