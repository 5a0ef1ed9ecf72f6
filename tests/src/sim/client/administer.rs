//! What people and reconcilers ask for: policies, migrations, removals, pauses, cancellations, aborts, settings.

use ballast_schemas::{
    AbortReplacement, Availability, BallastError, ClusterConfig, Command, HotRatio, MigrationTrigger, OperationId,
    PurgeTombstone, RelievePressure, Remove, Residency, StartMigration, TenantId, UpdatePolicy,
};

use ballast_workflows::State;

use super::Client;
use crate::sim::reconciler::UNIT_BYTES;
use crate::sim::runtime::SECOND;

impl Client {
    pub(super) async fn migrate(&self) -> Result<(), BallastError> {
        let record = self.some_ready().await?;
        let w = &self.w;
        let (target, trigger) = w.draw(|rng| {
            let targets = [Residency::Hot, Residency::Cold, Residency::Cold, Residency::Mixed];
            let triggers = [
                (6, MigrationTrigger::Explicit),
                (2, MigrationTrigger::Pressure),
                (1, MigrationTrigger::PressureRelief),
            ];
            let target = rng.pick(&targets).copied().unwrap_or(Residency::Cold);
            (target, rng.weighted(&triggers).unwrap_or(MigrationTrigger::Explicit))
        });
        let ratio =
            w.draw(|rng| (target == Residency::Mixed && rng.chance(7_000)).then(|| rng.between(1, 999_999) as u32));
        self.nap().await;
        self.submit(Command::StartMigration(StartMigration {
            identity: record.identity,
            target,
            target_hot_ratio: ratio.and_then(|ppm| HotRatio::from_ppm(ppm).ok()),
            expected_metadata_generation: record.metadata_generation,
            trigger,
        }))
        .await
        .map(drop)
    }

    /// A worker that was asleep since it saw a node's memory run short, or be free again.
    pub(super) async fn press(&self) -> Result<(), BallastError> {
        let w = &self.w;
        let Some(node) = w.draw(|rng| rng.pick(&w.nodes).cloned()) else { return Ok(()) };
        let (trigger, bytes) = w.draw(|rng| {
            let trigger = if rng.chance(7_000) { MigrationTrigger::Pressure } else { MigrationTrigger::PressureRelief };
            (trigger, rng.between(1, 12) * UNIT_BYTES)
        });
        let (node, cold_free_bytes) = (node.id.clone(), u64::MAX);
        let asked = node.clone();
        let look = move |state: &State| state.plan_round(&asked, trigger, bytes, cold_free_bytes).round;
        let round = self.look(look).await?;
        self.nap().await;
        let command = RelievePressure { node, round, trigger, bytes, cold_free_bytes };
        self.submit(Command::RelievePressure(command)).await.map(drop)
    }

    pub(super) async fn update_policy(&self) -> Result<(), BallastError> {
        let record = self.some_ready().await?;
        let policy = self.some_policy();
        self.nap().await;
        let expected_metadata_generation = record.metadata_generation;
        self.submit(Command::UpdatePolicy(UpdatePolicy {
            identity: record.identity,
            policy,
            expected_metadata_generation,
        }))
        .await
        .map(drop)
    }

    pub(super) async fn remove(&self) -> Result<(), BallastError> {
        let record =
            self.some(|record| matches!(record.availability, Availability::Ready | Availability::Degraded)).await?;
        self.nap().await;
        let expected_metadata_generation = record.metadata_generation;
        self.submit(Command::Remove(Remove { identity: record.identity, expected_metadata_generation })).await.map(drop)
    }

    /// Cancels, pauses or retries some operation; what is paused is mostly resumed later.
    pub(super) async fn control(&self) -> Result<(), BallastError> {
        let w = &self.w;
        let active = self.look(|state| state.operations(&TenantId::default_tenant(), false, 50)).await?;
        // With a release outstanding is the worst moment.
        let releasing = active.iter().find(|operation| operation.release_outstanding).map(|it| it.operation_id.clone());
        if let Some(id) = releasing.filter(|_| w.draw(|rng| rng.chance(5_000))) {
            return self.submit(Command::CancelOperation(id)).await.map(drop);
        }
        let ids: Vec<OperationId> = active.into_iter().map(|operation| operation.operation_id).collect();
        let Some(id) = w.draw(|rng| rng.pick(&ids).cloned()) else { return Ok(()) };
        self.nap().await;
        match w.draw(|rng| rng.below(6)) {
            0 | 1 => self.submit(Command::CancelOperation(id)).await.map(drop),
            2 => self.submit(Command::RetryOperation(id)).await.map(drop),
            _ => {
                self.submit(Command::PauseOperation(id.clone())).await?;
                if w.draw(|rng| rng.chance(8_000)) {
                    w.rt.sleep(w.draw(|rng| rng.between(0, 20)) * SECOND).await;
                    self.submit(Command::ResumeOperation(id)).await?;
                }
                Ok(())
            }
        }
    }

    pub(super) async fn abort_replacement(&self) -> Result<(), BallastError> {
        let lineage = self.some_lineage().lineage();
        let asked = lineage.clone();
        let Some(claim) = self.look(move |state| state.claim(&asked).cloned()).await? else { return Ok(()) };
        self.nap().await;
        self.submit(Command::AbortReplacement(AbortReplacement { lineage, request_id: claim.request_id }))
            .await
            .map(drop)
    }

    pub(super) async fn purge(&self) -> Result<(), BallastError> {
        let record = self.some(|record| record.availability == Availability::Deleted).await?;
        self.submit(Command::PurgeTombstone(PurgeTombstone { identity: record.identity })).await.map(drop)
    }

    /// Rounds of other sizes.
    pub(super) async fn configure(&self) -> Result<(), BallastError> {
        let config = self.w.draw(|rng| ClusterConfig {
            migration_cooldown_ms: rng.between(1_000, 20_000),
            migration_max_members_per_round: rng.between(1, 5) as u32,
            migration_max_bytes_per_round: rng.between(1, 100) * 1_000,
            deletion_max_members_per_round: rng.between(1, 5) as u32,
            ..ClusterConfig::default()
        });
        self.submit(Command::SetConfig(config)).await.map(drop)
    }

    pub(super) async fn discover(&self) -> Result<(), BallastError> {
        let any = self.some_lineage();
        self.call(20 * SECOND, move |gateway| {
            let any = any.clone();
            async move { Ok(gateway.discover(&any)) }
        })
        .await
        .map(drop)
    }
}
