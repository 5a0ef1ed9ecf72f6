//! Replacement: claim the lineage, import the target when the claim allows it; sometimes the same request again after it was
//! aborted.

use ballast_schemas::{
    Availability, BallastError, BeginReplacement, ClaimPhase, Command, ErrorCode, ReplacementClaim, Reply, UpsertMode,
};

use super::publish::at_generation;
use super::{Client, SHORT, next_generation};
use crate::sim::gateway::unavailable;
use crate::sim::runtime::SECOND;

impl Client {
    pub(super) async fn replace(&self, mode: UpsertMode) -> Result<(), BallastError> {
        let w = &self.w;
        let base =
            self.some(|record| matches!(record.availability, Availability::Ready | Availability::Degraded)).await?;
        let next = next_generation(&self.revisions().await?, &base.identity);
        let target = at_generation(&base.identity, next);
        let request = BeginReplacement {
            base: base.identity.clone(),
            target: target.clone(),
            mode,
            expected_metadata_generation: base.metadata_generation,
            request_id: w.name("replace-"),
            policy: w.draw(|rng| rng.chance(5_000)).then(|| self.some_policy()),
        };
        for _ in 0..w.draw(|rng| rng.between(1, 2)) {
            let claim = self.begin(&request).await?;
            self.nap().await;
            let imported = self.import_target(&claim).await;
            if let Err(error) = &imported {
                w.trace(format!("{} target of {}: {}", self.slot.name, request.request_id, error.code));
            } else {
                return Ok(());
            }
            self.wait_until_absent(&target, 40 * SECOND).await?;
        }
        Ok(())
    }

    async fn begin(&self, request: &BeginReplacement) -> Result<ReplacementClaim, BallastError> {
        match self.submit(Command::BeginReplacement(request.clone())).await? {
            Reply::Claim(claim) => Ok(*claim),
            other => Err(unavailable(format!("not a claim: {other:?}"))),
        }
    }

    async fn import_target(&self, claim: &ReplacementClaim) -> Result<(), BallastError> {
        let give_up_at = self.w.now() + 60 * SECOND;
        let lineage = claim.lineage.clone();
        loop {
            let lineage = lineage.clone();
            let found = self.look(move |state| state.claim(&lineage).cloned()).await?;
            let phase = found.filter(|found| found.request_id == claim.request_id).map(|found| found.phase);
            match phase {
                Some(ClaimPhase::DeletingBase) if claim.mode == UpsertMode::DeleteFirst => {}
                // A gateway that lags has not heard of the claim yet.
                None if self.w.now() < give_up_at => {}
                Some(ClaimPhase::PreparingTarget | ClaimPhase::TargetImporting) => break,
                _ => return Err(BallastError::new(ErrorCode::Conflict, format!("the claim is {phase:?}"))),
            }
            if self.w.now() > give_up_at {
                return Err(BallastError::new(ErrorCode::Busy, "the base is not deleted yet"));
            }
            self.w.work(SHORT * 5).await;
        }
        self.put(&claim.target, None).await
    }
}
