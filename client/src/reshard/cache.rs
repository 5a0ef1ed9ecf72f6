//! Plans that were made, by what they were made from: a training step or a rolling restart loads the same generation into
//! the same placement again and again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use ballast_schemas::Digest;

use super::error::PlanError;
use super::plan::{Limits, Plan};
use super::planner::{PlanSource, PlanTarget, plan};

/// What a plan was made from: digests, and the participant it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    source: Digest,
    target: Digest,
    participant: Option<String>,
}

impl Key {
    fn new(source: PlanSource<'_>, target: PlanTarget<'_>) -> Self {
        let source = match source {
            PlanSource::Stored(manifest) => manifest.sha256(),
            PlanSource::Held(placement) => placement.digest(),
        };
        let (target, participant) = match target {
            PlanTarget::Whole(placement) => (placement.digest(), None),
            PlanTarget::Local(placement, participant) => (placement.digest(), Some(participant.to_owned())),
            PlanTarget::Part(part) => (part.digest(), None),
        };
        Self { source, target, participant }
    }
}

/// The plans that were used last, up to a number of regions in all.
#[derive(Debug)]
pub struct PlanCache {
    limits: Limits,
    regions_max: usize,
    /// Used last, last.
    plans: Mutex<VecDeque<(Key, Arc<Plan>)>>,
}

impl PlanCache {
    /// A cache that plans within `limits` and keeps plans of up to `regions_max` regions together.
    #[must_use]
    pub fn new(limits: Limits, regions_max: usize) -> Self {
        Self { limits, regions_max, plans: Mutex::default() }
    }

    /// The plan from that source to that target, made now or before.
    ///
    /// # Errors
    /// As [`plan`].
    pub fn plan(&self, source: PlanSource<'_>, target: PlanTarget<'_>) -> Result<Arc<Plan>, PlanError> {
        let key = Key::new(source, target);
        if let Some(found) = self.find(&key) {
            return Ok(found);
        }
        // Planned outside the lock: two callers may do the same work once, none waits for another's.
        let made = Arc::new(plan(source, target, &self.limits)?);
        self.keep(key, made.clone());
        Ok(made)
    }

    /// How many plans are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn find(&self, key: &Key) -> Option<Arc<Plan>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let at = plans.iter().position(|(other, _)| other == key)?;
        let found = plans.remove(at)?;
        let plan = found.1.clone();
        plans.push_back(found);
        Some(plan)
    }

    fn keep(&self, key: Key, plan: Arc<Plan>) {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans.retain(|(other, _)| *other != key);
        plans.push_back((key, plan));
        let weight = |plan: &Plan| plan.regions().len() + plan.targets().len();
        let mut kept: usize = plans.iter().map(|(_, plan)| weight(plan)).sum();
        while kept > self.regions_max
            && let Some((_, gone)) = plans.pop_front()
        {
            kept -= weight(&gone);
        }
    }
}

impl Default for PlanCache {
    fn default() -> Self {
        Self::new(Limits::default(), 4_000_000)
    }
}
