//! What is remembered for a while so that a late repeat does no harm: the outcomes of commands, the ends of leases. Everything is
//! remembered for equally long, so what came first is forgotten first, and nothing has to be sorted.

use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, Hash};

use ballast_schemas::LogTime;
use hashbrown::{DefaultHashBuilder, HashTable};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Something remembered under a name until a moment of the log clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Remembered<K, V> {
    pub key: K,
    pub value: V,
    pub until: LogTime,
}

/// A queue that is searched by hash. It is never gone through in the order of hashes.
#[derive(Clone)]
pub(crate) struct Recent<K, V> {
    queue: VecDeque<Remembered<K, V>>,
    /// How many were forgotten: the number of the first one in the queue.
    forgotten: u64,
    /// Numbers, by the hash of the key.
    lookup: HashTable<u64>,
    hasher: DefaultHashBuilder,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), forgotten: 0, lookup: HashTable::new(), hasher: DefaultHashBuilder::default() }
    }
}

impl<K: Hash + Eq, V> Recent<K, V> {
    pub fn get(&self, key: &K) -> Option<&V> {
        let is_it = |number: &u64| self.numbered(*number).is_some_and(|found| found.key == *key);
        let number = self.lookup.find(self.hasher.hash_one(key), is_it)?;
        self.numbered(*number).map(|found| &found.value)
    }

    fn numbered(&self, number: u64) -> Option<&Remembered<K, V>> {
        numbered(&self.queue, self.forgotten, number)
    }

    /// Remembers one more. `until` must not be before that of the last one, and the key must not be known.
    pub fn push(&mut self, key: K, value: V, until: LogTime) {
        let number = self.forgotten.saturating_add(u64::try_from(self.queue.len()).unwrap_or(u64::MAX));
        let hash = self.hasher.hash_one(&key);
        self.queue.push_back(Remembered { key, value, until });
        let (queue, forgotten, hasher) = (&self.queue, self.forgotten, &self.hasher);
        let rehash = |number: &u64| numbered(queue, forgotten, *number).map_or(0, |found| hasher.hash_one(&found.key));
        self.lookup.insert_unique(hash, number, rehash);
    }

    /// Forgets what was to be remembered until before `clock`.
    pub fn forget_before(&mut self, clock: LogTime) {
        while self.queue.front().is_some_and(|first| first.until < clock) {
            let Some(first) = self.queue.pop_front() else { break };
            let number = self.forgotten;
            self.forgotten = self.forgotten.saturating_add(1);
            if let Ok(found) = self.lookup.find_entry(self.hasher.hash_one(&first.key), |at| *at == number) {
                found.remove();
            }
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.queue.len()
    }
}

fn numbered<K, V>(queue: &VecDeque<Remembered<K, V>>, forgotten: u64, number: u64) -> Option<&Remembered<K, V>> {
    queue.get(usize::try_from(number.checked_sub(forgotten)?).ok()?)
}

impl<K: PartialEq, V: PartialEq> PartialEq for Recent<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.queue == other.queue
    }
}

impl<K: Eq, V: Eq> Eq for Recent<K, V> {}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for Recent<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.queue.fmt(f)
    }
}

impl<K: Serialize, V: Serialize> Serialize for Recent<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.queue.serialize(serializer)
    }
}

impl<'de, K: Deserialize<'de> + Hash + Eq, V: Deserialize<'de>> Deserialize<'de> for Recent<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut recent = Self::default();
        for Remembered { key, value, until } in Vec::<Remembered<K, V>>::deserialize(deserializer)? {
            recent.push(key, value, until);
        }
        Ok(recent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_first_is_forgotten_first_and_the_rest_is_still_found() {
        let mut recent = Recent::default();
        (0..100u64).for_each(|n| recent.push(n, n * 2, LogTime(n / 10)));
        recent.forget_before(LogTime(3));
        assert_eq!((recent.len(), recent.get(&29), recent.get(&30)), (70, None, Some(&60)));
        let bytes = rmp_serde::to_vec_named(&recent).unwrap();
        let mut back: Recent<u64, u64> = rmp_serde::from_slice(&bytes).unwrap();
        assert_eq!(back, recent);
        back.push(7, 1, LogTime(10));
        assert_eq!((back.get(&99), back.get(&7)), (Some(&198), Some(&1)));
        back.forget_before(LogTime(100));
        assert_eq!((back.len(), back.get(&7)), (0, None));
    }
}
