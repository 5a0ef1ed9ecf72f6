//! The node's own fence and guard rules, without any I/O (see ARCHITECTURE.md, Guards and fences): which effects are
//! obeyed, which units may be read, and when a unit's memory may be freed.
//!
//! Release = clear the hot bit durably → wait until no guard covers the unit → punch. The steps here are
//! [`UnitStates::begin_release`], [`UnitStates::is_guarded`] and [`UnitStates::finish_release`]; making bits durable,
//! asking segment locks and punching happen in between, elsewhere.

use std::collections::BTreeMap;

use ballast_schemas::{Bitmap, LogPosition};

/// An effect carried a lower fence than one that was obeyed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fence {offered} is older than {highest}, which this node has obeyed; the operation was superseded")]
pub struct FenceRefused {
    /// The effect's fence.
    pub offered: LogPosition,
    /// The highest fence obeyed.
    pub highest: LogPosition,
}

/// What to do before an effect that may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceStep {
    /// The fence is the one in force.
    Same,
    /// Make this fence durable first.
    Raise(LogPosition),
}

/// Compares an effect's fence with the highest one obeyed.
///
/// # Errors
/// When it is lower.
pub fn check_fence(highest: LogPosition, offered: LogPosition) -> Result<FenceStep, FenceRefused> {
    match offered.cmp(&highest) {
        std::cmp::Ordering::Less => Err(FenceRefused { offered, highest }),
        std::cmp::Ordering::Equal => Ok(FenceStep::Same),
        std::cmp::Ordering::Greater => Ok(FenceStep::Raise(offered)),
    }
}

/// A unit can not be released: nothing else would hold its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unit {unit} has no verified copy on the cold tier; copy it there first")]
pub struct NoWitness {
    /// The unit.
    pub unit: u32,
}

/// Which units of one instance are in memory, on disk, on their way out, and being read.
///
/// Invariants: a hot unit is resident; a guarded unit is resident; a unit on its way out is resident and not hot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitStates {
    hot: Bitmap,
    resident: Bitmap,
    cold: Bitmap,
    readers: BTreeMap<u32, u32>,
}

impl UnitStates {
    /// The states of `units` units that are nowhere yet.
    #[must_use]
    pub fn new(units: u32) -> Self {
        Self {
            hot: Bitmap::empty(units),
            resident: Bitmap::empty(units),
            cold: Bitmap::empty(units),
            readers: BTreeMap::new(),
        }
    }

    /// Units with a readable copy in memory.
    #[must_use]
    pub fn hot(&self) -> &Bitmap {
        &self.hot
    }

    /// Units that take room in memory.
    #[must_use]
    pub fn resident(&self) -> &Bitmap {
        &self.resident
    }

    /// Units with a verified copy on disk.
    #[must_use]
    pub fn cold(&self) -> &Bitmap {
        &self.cold
    }

    /// Whether a unit is being released: it takes room but is no longer handed out.
    #[must_use]
    pub fn is_leaving(&self, unit: u32) -> bool {
        self.resident.get(unit) && !self.hot.get(unit)
    }

    /// Room was taken for a unit; it is not readable yet.
    pub fn set_resident(&mut self, unit: u32) {
        self.resident.set(unit, true);
    }

    /// A unit's bytes in memory were verified (or sealed): it can be read from now on.
    pub fn set_hot(&mut self, unit: u32) {
        self.resident.set(unit, true);
        self.hot.set(unit, true);
    }

    /// A unit's bytes in memory are not what they should be: nobody gets them any more.
    pub fn clear_hot(&mut self, unit: u32) {
        self.hot.set(unit, false);
    }

    /// A unit's copy on disk was verified, or is no longer good.
    pub fn set_cold(&mut self, unit: u32, readable: bool) {
        self.cold.set(unit, readable);
    }

    /// Guards a unit for one reader, if it is hot. Every `true` is paid back by one [`UnitStates::unguard`].
    pub fn guard(&mut self, unit: u32) -> bool {
        let hot = self.hot.get(unit);
        if hot {
            *self.readers.entry(unit).or_insert(0) += 1;
        }
        hot
    }

    /// A reader is done with a unit that it guarded.
    pub fn unguard(&mut self, unit: u32) {
        if let Some(count) = self.readers.get_mut(&unit) {
            *count -= 1;
            if *count == 0 {
                self.readers.remove(&unit);
            }
        }
    }

    /// Whether a reader covers the unit.
    #[must_use]
    pub fn is_guarded(&self, unit: u32) -> bool {
        self.readers.contains_key(&unit)
    }

    /// Takes units out of what is handed out, before their memory is freed. Units that are not hot are left as they
    /// are: they are gone, or already on their way out. Tells whether anything changed.
    ///
    /// # Errors
    /// When a unit has no copy on disk; nothing is changed then.
    pub fn begin_release(&mut self, units: &[u32]) -> Result<bool, NoWitness> {
        if let Some(&unit) = units.iter().find(|&&unit| self.resident.get(unit) && !self.cold.get(unit)) {
            return Err(NoWitness { unit });
        }
        let mut changed = false;
        for &unit in units {
            changed |= self.hot.get(unit);
            self.hot.set(unit, false);
        }
        Ok(changed)
    }

    /// The unit's memory was freed.
    pub fn finish_release(&mut self, unit: u32) {
        self.hot.set(unit, false);
        self.resident.set(unit, false);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seq: u64) -> LogPosition {
        LogPosition { seq, index: 0 }
    }

    #[test]
    fn a_lower_fence_is_refused_and_a_higher_one_raised_first() {
        assert_eq!(check_fence(at(5), at(5)), Ok(FenceStep::Same));
        assert_eq!(check_fence(at(5), at(6)), Ok(FenceStep::Raise(at(6))));
        assert_eq!(check_fence(at(5), at(4)), Err(FenceRefused { offered: at(4), highest: at(5) }));
        let later = LogPosition { seq: 5, index: 1 };
        assert_eq!(check_fence(at(5), later), Ok(FenceStep::Raise(later)));
    }

    #[test]
    fn the_last_copy_is_never_released() {
        let mut states = UnitStates::new(3);
        states.set_hot(0);
        states.set_hot(1);
        states.set_cold(0, true);
        assert_eq!(states.begin_release(&[0, 1]), Err(NoWitness { unit: 1 }));
        assert!(states.hot().get(0), "a refused release changes nothing");
        assert_eq!(states.begin_release(&[0]), Ok(true));
        assert_eq!(states.begin_release(&[0]), Ok(false), "again is a no-op");
        assert_eq!(states.begin_release(&[2]), Ok(false), "so is a unit that was never here");
    }

    #[test]
    fn a_unit_on_its_way_out_is_guarded_by_those_who_came_before_and_by_no_one_after() {
        let mut states = UnitStates::new(1);
        states.set_hot(0);
        states.set_cold(0, true);
        assert!(states.guard(0));
        assert!(states.begin_release(&[0]).unwrap());
        assert!(states.is_leaving(0) && states.is_guarded(0));
        assert!(!states.guard(0), "nobody new");
        states.unguard(0);
        assert!(!states.is_guarded(0));
        states.finish_release(0);
        assert!(!states.resident().get(0));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Seal(u32),
        Cold(u32),
        ColdLost(u32),
        Guard(u32),
        Unguard(usize),
        Release(u32),
        Free(u32),
        Promote(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        let unit = 0..4_u32;
        prop_oneof![
            unit.clone().prop_map(Step::Seal),
            unit.clone().prop_map(Step::Cold),
            unit.clone().prop_map(Step::ColdLost),
            unit.clone().prop_map(Step::Guard),
            (0..8_usize).prop_map(Step::Unguard),
            unit.clone().prop_map(Step::Release),
            unit.clone().prop_map(Step::Free),
            unit.prop_map(Step::Promote),
        ]
    }

    proptest! {
        #[test]
        fn no_reader_ever_sees_its_unit_freed(steps in prop::collection::vec(step(), 0..200)) {
            let mut states = UnitStates::new(4);
            let mut held: Vec<u32> = Vec::new();
            for step in steps {
                match step {
                    Step::Seal(unit) => states.set_hot(unit),
                    Step::Cold(unit) => if states.hot().get(unit) { states.set_cold(unit, true) },
                    Step::ColdLost(unit) => if states.hot().get(unit) { states.set_cold(unit, false) },
                    Step::Guard(unit) => if states.guard(unit) { held.push(unit) },
                    Step::Unguard(at) => if at < held.len() { states.unguard(held.swap_remove(at)) },
                    Step::Release(unit) => {
                        let had_cold = states.cold().get(unit);
                        let released = states.begin_release(&[unit]);
                        prop_assert!(released.is_err() != (had_cold || !states.resident().get(unit)));
                    }
                    Step::Free(unit) => {
                        if states.is_leaving(unit) && !states.is_guarded(unit) { states.finish_release(unit) }
                    }
                    Step::Promote(unit) => if states.cold().get(unit) { states.set_hot(unit) },
                }
                for unit in &held {
                    prop_assert!(states.resident().get(*unit));
                }
                for unit in 0..4 {
                    prop_assert!(!states.hot().get(unit) || states.resident().get(unit));
                    prop_assert_eq!(states.is_guarded(unit), held.contains(&unit));
                }
            }
        }
    }
}
