//! Byte budgets of a tier: room is reserved before any byte moves and given back when it is free again
//! (see ARCHITECTURE.md, One layout, two tiers). Counts only; whether the file system keeps its word is the tier's matter.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ballast_schemas::frame::Tier;
use ballast_schemas::human_bytes;

/// A tier has no room for what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} are free of the {} that the {tier_name} tier may use, {} are needed; \
     free some (migrate or remove a revision) or give the node more with {flag}",
    human_bytes(limit_bytes.saturating_sub(*used_bytes)), human_bytes(*limit_bytes), human_bytes(*asked_bytes)
)]
pub struct CapacityExhausted {
    /// The tier.
    pub tier: Tier,
    /// Its name in a sentence.
    pub tier_name: &'static str,
    /// The flag that raises the limit.
    pub flag: &'static str,
    /// Bytes asked for.
    pub asked_bytes: u64,
    /// Bytes in use or reserved.
    pub used_bytes: u64,
    /// Bytes that the tier may use.
    pub limit_bytes: u64,
}

/// How full a tier is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that the tier may use.
    pub limit_bytes: u64,
    /// Bytes in use, reserved ones included.
    pub used_bytes: u64,
}

impl Usage {
    /// Bytes still free.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

#[derive(Debug)]
struct Inner {
    tier: Tier,
    usage: Mutex<Usage>,
}

/// The bytes that a tier may use. Cheap to clone; clones share the count.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Inner>);

impl Budget {
    /// A budget of `limit_bytes`, none of them used.
    #[must_use]
    pub fn new(tier: Tier, limit_bytes: u64) -> Self {
        Self(Arc::new(Inner { tier, usage: Mutex::new(Usage { limit_bytes, used_bytes: 0 }) }))
    }

    fn lock(&self) -> MutexGuard<'_, Usage> {
        // The count is two integers changed in one statement: a panic elsewhere can not leave it torn.
        self.0.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How full the tier is.
    #[must_use]
    pub fn usage(&self) -> Usage {
        *self.lock()
    }

    /// Takes `bytes` out of the budget for as long as the charge lives.
    ///
    /// # Errors
    /// When fewer are free.
    pub fn reserve(&self, bytes: u64) -> Result<Charge, CapacityExhausted> {
        let mut usage = self.lock();
        if usage.free_bytes() < bytes {
            let (tier_name, flag) = match self.0.tier {
                Tier::Memory => ("memory", "--memory"),
                Tier::Cold => ("cold", "--cold-quota"),
            };
            return Err(CapacityExhausted {
                tier: self.0.tier,
                tier_name,
                flag,
                asked_bytes: bytes,
                used_bytes: usage.used_bytes,
                limit_bytes: usage.limit_bytes,
            });
        }
        usage.used_bytes += bytes;
        Ok(Charge { budget: self.clone(), bytes })
    }

    /// Charges `bytes` that are already taken on disk or in memory, even past the limit (adoption after a restart).
    #[must_use]
    pub fn charge(&self, bytes: u64) -> Charge {
        self.lock().used_bytes += bytes;
        Charge { budget: self.clone(), bytes }
    }
}

/// Bytes taken out of a budget; dropping it gives them back.
#[derive(Debug)]
pub struct Charge {
    budget: Budget,
    bytes: u64,
}

impl Charge {
    /// How many bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes over the bytes of another charge on the same budget.
    pub fn absorb(&mut self, mut other: Charge) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Splits `bytes` off into a charge of their own (all of them when it has fewer).
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Charge {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Charge { budget: self.budget.clone(), bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut usage = self.budget.lock();
        usage.used_bytes = usage.used_bytes.saturating_sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_comes_back_when_the_charge_goes() {
        let budget = Budget::new(Tier::Memory, 100);
        let mut first = budget.reserve(60).unwrap();
        let refused = budget.reserve(50).unwrap_err();
        assert_eq!((refused.asked_bytes, refused.used_bytes, refused.limit_bytes), (50, 60, 100));
        assert!(refused.to_string().contains("40 B are free of the 100 B"), "{refused}");
        drop(first.split(20));
        assert_eq!(budget.usage().free_bytes(), 60);
        first.absorb(budget.reserve(60).unwrap());
        assert_eq!(budget.usage().free_bytes(), 0);
        drop(first);
        assert_eq!(budget.usage().free_bytes(), 100);
    }

    #[test]
    fn what_was_there_before_is_charged_past_the_limit() {
        let budget = Budget::new(Tier::Cold, 10);
        let charge = budget.charge(25);
        assert_eq!(budget.usage().free_bytes(), 0);
        drop(charge);
        assert_eq!(budget.usage().free_bytes(), 10);
    }
}
