//! Records in the order of their keys, found by hash. A fold looks the same few records up again and again; a walk through an
//! ordered tree at every look is what would grow with the number of revisions.
//!
//! Nothing ever goes through the hashed part in its own order, so what a replica decides does not depend on it: it only says
//! which row a key has.

use std::borrow::Borrow;
use std::collections::{BTreeMap, btree_map};
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::marker::PhantomData;
use std::ops::RangeBounds;

use hashbrown::{DefaultHashBuilder, HashTable};
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An ordered map with hashed lookups. Keys are cheap to clone.
#[derive(Clone)]
pub(crate) struct Table<K, V> {
    order: BTreeMap<K, u32>,
    /// Boxed: records are large, and the vector grows.
    rows: Vec<Option<Box<Row<K, V>>>>,
    free: Vec<u32>,
    lookup: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

#[derive(Clone)]
struct Row<K, V> {
    key: K,
    value: V,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self {
            order: BTreeMap::new(),
            rows: Vec::new(),
            free: Vec::new(),
            lookup: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
        }
    }
}

impl<K: Ord + Hash + Clone, V> Table<K, V> {
    fn row(&self, key: &K) -> Option<u32> {
        let is_it = |at: &u32| row(&self.rows, *at).is_some_and(|row| row.key == *key);
        self.lookup.find(self.hasher.hash_one(key), is_it).copied()
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        row(&self.rows, self.row(key)?).map(|row| &row.value)
    }

    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let at = self.row(key)?;
        self.rows.get_mut(index(at))?.as_mut().map(|row| &mut row.value)
    }

    /// Puts a record in, in the place of the one with this key.
    pub fn insert(&mut self, key: K, value: V) {
        if let Some(before) = self.get_mut(&key) {
            *before = value;
            return;
        }
        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                // A row number has 32 bits; memory ends long before they do.
                let at = u32::try_from(self.rows.len()).unwrap_or(u32::MAX);
                self.rows.push(None);
                at
            }
        };
        self.note(&key, at);
        self.order.insert(key.clone(), at);
        if let Some(row) = self.rows.get_mut(index(at)) {
            *row = Some(Box::new(Row { key, value }));
        }
    }

    /// Lets the lookup find `key` in row `at`.
    fn note(&mut self, key: &K, at: u32) {
        let (rows, hasher) = (&self.rows, &self.hasher);
        let rehash = |at: &u32| row(rows, *at).map_or(0, |row| hasher.hash_one(&row.key));
        self.lookup.insert_unique(hasher.hash_one(key), at, rehash);
    }

    pub fn remove(&mut self, key: &K) -> Option<V> {
        let rows = &self.rows;
        let is_it = |at: &u32| row(rows, *at).is_some_and(|row| row.key == *key);
        let (at, _) = self.lookup.find_entry(self.hasher.hash_one(key), is_it).ok()?.remove();
        self.order.remove(key);
        self.free.push(at);
        self.rows.get_mut(index(at))?.take().map(|row| row.value)
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// The key before `key`.
    pub fn before(&self, key: &K) -> Option<&K> {
        self.order.range(..key).next_back().map(|(key, _)| key)
    }

    /// Every record, in the order of keys.
    pub fn iter(&self) -> Iter<'_, K, V, btree_map::Iter<'_, K, u32>> {
        Iter { rows: &self.rows, order: self.order.iter() }
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// The records with keys in `bounds`, in their order.
    pub fn range<Q: Ord + ?Sized>(&self, bounds: impl RangeBounds<Q>) -> Iter<'_, K, V, btree_map::Range<'_, K, u32>>
    where
        K: Borrow<Q>,
    {
        Iter { rows: &self.rows, order: self.order.range(bounds) }
    }
}

fn index(at: u32) -> usize {
    usize::try_from(at).unwrap_or(usize::MAX)
}

fn row<K, V>(rows: &[Option<Box<Row<K, V>>>], at: u32) -> Option<&Row<K, V>> {
    rows.get(index(at))?.as_deref()
}

/// Goes through records in the order of their keys.
pub(crate) struct Iter<'a, K, V, O> {
    rows: &'a [Option<Box<Row<K, V>>>],
    order: O,
}

impl<'a, K, V, O: Iterator<Item = (&'a K, &'a u32)>> Iterator for Iter<'a, K, V, O> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        let (key, at) = self.order.next()?;
        row(self.rows, *at).map(|row| (key, &row.value))
    }
}

impl<'a, K: Ord + Hash + Clone, V> IntoIterator for &'a Table<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V, btree_map::Iter<'a, K, u32>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<K: Ord + Hash + Clone, V: PartialEq> PartialEq for Table<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<K: Ord + Hash + Clone, V: Eq> Eq for Table<K, V> {}

impl<K: Ord + Hash + Clone + fmt::Debug, V: fmt::Debug> fmt::Debug for Table<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: Ord + Hash + Clone + Serialize, V: Serialize> Serialize for Table<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

/// A record that was read from a snapshot takes its place in a table.
pub(crate) trait Settle<K> {
    /// Shares what it has in common with its key, and with the key of the record before it.
    fn settle(&mut self, _key: &mut K, _before: Option<&K>) {}
}

impl<'de, K, V> Deserialize<'de> for Table<K, V>
where
    K: Deserialize<'de> + Ord + Hash + Clone,
    V: Deserialize<'de> + Settle<K>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Records(PhantomData))
    }
}

struct Records<K, V>(PhantomData<(K, V)>);

impl<'de, K, V> Visitor<'de> for Records<K, V>
where
    K: Deserialize<'de> + Ord + Hash + Clone,
    V: Deserialize<'de> + Settle<K>,
{
    type Value = Table<K, V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of records")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut table = Table::<K, V>::default();
        while let Some((mut key, mut value)) = map.next_entry::<K, V>()? {
            value.settle(&mut key, table.rows.last().and_then(Option::as_ref).map(|before| &before.key));
            table.rows.push(Some(Box::new(Row { key, value })));
        }
        // As one: the tree is built full from keys that come in order.
        let numbered = table.rows.iter().flatten().zip(0u32..);
        table.order = numbered.map(|(row, at)| (row.key.clone(), at)).collect();
        if table.order.len() != table.rows.len() {
            return Err(A::Error::custom("a record's key is there twice"));
        }
        let (rows, hasher) = (&table.rows, &table.hasher);
        let rehash = |at: &u32| row(rows, *at).map_or(0, |row| hasher.hash_one(&row.key));
        table.lookup.reserve(rows.len(), rehash);
        for (row, at) in rows.iter().flatten().zip(0u32..) {
            table.lookup.insert_unique(hasher.hash_one(&row.key), at, rehash);
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl Settle<u8> for u8 {}
    impl Settle<u8> for u32 {}

    proptest! {
        #[test]
        fn a_table_is_an_ordered_map(changes in prop::collection::vec((0u8..40, prop::option::of(0u32..9)), 0..200)) {
            let (mut table, mut map) = (Table::default(), BTreeMap::new());
            for (key, value) in changes {
                match value {
                    Some(value) => { table.insert(key, value); map.insert(key, value); }
                    None => prop_assert_eq!(table.remove(&key), map.remove(&key)),
                }
                prop_assert_eq!(table.get(&key), map.get(&key));
                prop_assert_eq!(table.len(), map.len());
            }
            prop_assert!(table.iter().eq(map.iter()));
            prop_assert!(table.range(10..20).eq(map.range(10..20)));
            let bytes = rmp_serde::to_vec(&table).unwrap();
            prop_assert_eq!(&bytes, &rmp_serde::to_vec(&map).unwrap());
            let back: Table<u8, u32> = rmp_serde::from_slice(&bytes).unwrap();
            prop_assert_eq!(&back, &table);
            prop_assert!(map.iter().all(|(key, value)| back.get(key) == Some(value)));
        }
    }

    #[test]
    fn a_key_that_is_there_twice_is_refused() {
        let twice = [0x82, 1, 1, 1, 2];
        assert!(rmp_serde::from_slice::<Table<u8, u8>>(&twice).unwrap_err().to_string().contains("twice"));
    }
}
