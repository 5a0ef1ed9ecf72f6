//! A read lease: acquired under an id of our own, renewed in the background, released on success, error and cancellation
//! (RFC, Get and Revision Lease). Whether a read counted is what the release says, not what a clock here says.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_schemas::{
    AcquireLeaseReply, AcquireLeaseRequest, BallastError, ErrorCode, LeaseId, LeaseReply, ReleaseLeaseReply,
    ReleaseLeaseRequest, RenewLeaseRequest, RevisionIdentity,
};
use tokio::task::AbortHandle;
use uuid::Uuid;

use crate::gateway::Gateway;

/// How long the background release after a cancellation tries.
const RELEASE_PATIENCE: Duration = Duration::from_secs(10);

/// A lease that is held. Dropping it releases it in the background.
#[derive(Debug)]
pub(crate) struct HeldLease {
    gateway: Gateway,
    request: AcquireLeaseRequest,
    lapsed: Arc<AtomicBool>,
    renewer: Option<AbortHandle>,
    released: bool,
}

impl HeldLease {
    /// Acquires a lease and keeps it alive from then on.
    pub(crate) async fn acquire(
        gateway: &Gateway,
        identity: &RevisionIdentity,
        holder: &str,
        ttl_ms: u64,
    ) -> Result<(Self, AcquireLeaseReply), BallastError> {
        let lease_id =
            LeaseId::new(Uuid::new_v4().to_string()).map_err(|error| BallastError::invalid(error.to_string()))?;
        // Made before the request is sent: a lease that is granted while its caller gives up is released all the same.
        let mut lease = Self {
            gateway: gateway.clone(),
            request: AcquireLeaseRequest { identity: identity.clone(), lease_id, holder: holder.to_owned(), ttl_ms },
            lapsed: Arc::new(AtomicBool::new(false)),
            renewer: None,
            released: false,
        };
        let asked = Instant::now();
        let reply = lease.again().await.inspect_err(|error| {
            // A refusal leaves nothing to release.
            lease.released = error.code != ErrorCode::Unavailable;
        })?;
        lease.renewer = Some(lease.keep_alive(asked));
        Ok((lease, reply))
    }

    /// Asks for the same lease again: the same grant, with the nodes that hold the revision by now and a fresh token.
    pub(crate) async fn again(&self) -> Result<AcquireLeaseReply, BallastError> {
        self.gateway.call(&self.request.identity.tenant_id, "acquire_lease", &self.request).await
    }

    fn keep_alive(&self, asked: Instant) -> AbortHandle {
        let (gateway, lapsed) = (self.gateway.clone(), self.lapsed.clone());
        let AcquireLeaseRequest { identity, lease_id, ttl_ms, .. } = self.request.clone();
        let ttl = Duration::from_millis(ttl_ms);
        let every = (ttl / 3).max(Duration::from_millis(1));
        let body = RenewLeaseRequest { identity: identity.clone(), lease_id: lease_id.clone(), ttl_ms };
        let task = async move {
            // Its end as seen from here: no later than the log's, which counts from when the request arrived.
            let mut ends = asked + ttl;
            loop {
                tokio::time::sleep(every).await;
                let asked = Instant::now();
                match gateway.call_within::<_, LeaseReply>(&identity.tenant_id, "renew_lease", &body, ttl).await {
                    Ok(_) => ends = asked + ttl,
                    // Nobody answers: the log's clock may stand still as well. What the lease is worth shows at its release.
                    Err(error) if error.code == ErrorCode::Unavailable => {
                        tracing::debug!(%error, "a lease was not renewed")
                    }
                    Err(error) if error.code == ErrorCode::NotReady => {
                        // The revision is being replaced: no renewals, but the lease runs on to its end.
                        tracing::info!(%identity, %lease_id, "the revision is retired; its lease is not renewed any more");
                        tokio::time::sleep_until(ends.into()).await;
                        break;
                    }
                    Err(error) => {
                        tracing::warn!(%identity, %lease_id, %error, "the lease can not be renewed");
                        break;
                    }
                }
            }
            lapsed.store(true, Ordering::Release);
        };
        tokio::spawn(task).abort_handle()
    }

    /// Whether the lease is known to have ended.
    pub(crate) fn lapsed(&self) -> bool {
        self.lapsed.load(Ordering::Acquire)
    }

    /// Ends the lease. Only after this did what was read count.
    ///
    /// # Errors
    /// `LEASE_EXPIRED` when it had lapsed before; `UNAVAILABLE` when nobody could say.
    pub(crate) async fn release(mut self) -> Result<(), BallastError> {
        self.stop_renewing();
        let AcquireLeaseRequest { identity, lease_id, ttl_ms, .. } = &self.request;
        let body = ReleaseLeaseRequest { identity: identity.clone(), lease_id: lease_id.clone() };
        let reply: ReleaseLeaseReply = self.gateway.call(&identity.tenant_id, "release_lease", &body).await?;
        self.released = true;
        if !reply.lapsed {
            return Ok(());
        }
        let message = format!(
            "lease {lease_id} of {identity} lapsed after {ttl_ms} ms before the read had ended: what was read does not count; read again, with a longer lease if it was replaced meanwhile"
        );
        Err(BallastError::new(ErrorCode::LeaseExpired, message))
    }

    fn stop_renewing(&mut self) {
        if let Some(renewer) = self.renewer.take() {
            renewer.abort();
        }
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.stop_renewing();
        if self.released {
            return;
        }
        let gateway = self.gateway.clone();
        let body =
            ReleaseLeaseRequest { identity: self.request.identity.clone(), lease_id: self.request.lease_id.clone() };
        self.gateway.in_background(async move {
            let tenant = body.identity.tenant_id.clone();
            let released =
                gateway.call_within::<_, ReleaseLeaseReply>(&tenant, "release_lease", &body, RELEASE_PATIENCE).await;
            if let Err(error) = released {
                tracing::warn!(identity = %body.identity, %error, "a lease was not released; it ends by itself");
            }
        });
    }
}
