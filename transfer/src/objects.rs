//! The ordinary objects of a node, and the guard that keeps every generic path off the managed groups (RFC, Delete and
//! Ordinary Eviction; Safety Invariant 7). One key space and one order of last use hold both: what a generic path meets
//! is an object, which it may remove, or a key of a managed group, which it skips and counts.
//!
//! Objects are a cache: they live in this process, within the memory tier's budget, and are gone after a restart.
//! Managed groups have precedence: objects give way to an import or a promotion, the longest unused first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ballast_schemas::{
    GENERIC_PATHS, InstanceId, OBJECT_BYTES_MAX, OBJECT_LIST_MAX, ObjectCounts, ObjectEntry, ObjectKey,
};
use bytes::Bytes;

use crate::budget::{Budget, CapacityExhausted, Charge};
use crate::error::StoreError;

/// Objects are accepted up to this share of the memory tier, managed groups included, so that an import of usual size
/// finds room at once.
const WATERMARK_PERCENT: u64 = 90;

/// Who removes something without knowing of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// Room for an import or a promotion.
    Evict,
    /// The watermark.
    Quota,
    /// A single key.
    Remove,
    /// Everything.
    Clear,
}

impl Path {
    fn name(self) -> &'static str {
        GENERIC_PATHS[self as usize]
    }
}

#[derive(Debug)]
enum Resident {
    Object {
        bytes: Bytes,
        charge: Charge,
    },
    /// A key of these instances' groups. It is never removed by anything in this module but their own end.
    Managed(BTreeSet<InstanceId>),
}

#[derive(Debug)]
struct Entry {
    used_at: u64,
    resident: Resident,
}

#[derive(Debug, Default)]
struct Inner {
    entries: BTreeMap<String, Entry>,
    by_use: BTreeMap<u64, String>,
    now: u64,
    counts: ObjectCounts,
}

/// Every key of a node that a generic path could meet.
#[derive(Debug, Default)]
pub(crate) struct Objects(Mutex<Inner>);

/// What a clear removed, or would remove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Keys of managed groups that were skipped.
    pub skipped: u64,
}

impl Objects {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere can not tear it: each change below is finished before anything that may panic begins.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn counts(&self) -> ObjectCounts {
        let mut counts = self.lock().counts.clone();
        for path in GENERIC_PATHS {
            counts.guard_skips.entry(path.to_owned()).or_default();
        }
        counts
    }

    /// Puts a key of a managed group under the guard.
    pub(crate) fn guard(&self, key: &str, instance: &InstanceId) {
        let mut inner = self.lock();
        if let Some(Entry { resident: Resident::Managed(instances), .. }) = inner.entries.get_mut(key) {
            instances.insert(instance.clone());
            return;
        }
        // A managed key that no put accepts holds no object.
        inner.insert(key.to_owned(), Resident::Managed(BTreeSet::from([instance.clone()])));
    }

    /// An instance has ended by its own path: its keys are guarded no more.
    pub(crate) fn unguard<'a>(&self, keys: impl IntoIterator<Item = &'a str>, instance: &InstanceId) {
        let mut inner = self.lock();
        for key in keys {
            let Some(Entry { resident: Resident::Managed(instances), .. }) = inner.entries.get_mut(key) else {
                continue;
            };
            instances.remove(instance);
            if instances.is_empty() {
                inner.forget(key);
            }
        }
    }

    /// Room for a managed group: what is not free comes from objects, the longest unused first. When all of them would
    /// not be enough, none goes.
    pub(crate) fn reserve_managed(&self, budget: &Budget, bytes: u64) -> Result<Charge, CapacityExhausted> {
        let mut inner = self.lock();
        inner.make_room(Path::Evict, budget, bytes, budget.usage().limit_bytes);
        budget.reserve(bytes)
    }

    /// Stores an object in place of what was there; answers how many others gave way.
    pub(crate) fn put(&self, budget: &Budget, key: &ObjectKey, bytes: Bytes) -> Result<u64, StoreError> {
        if key.managed_owner().is_some() {
            return Err(StoreError::Invalid(format!(
                "{key} names a member of a managed group; publish weights with `ballast put`, or choose a key that does not \
                 begin with weights/ or weight:"
            )));
        }
        if bytes.len() > OBJECT_BYTES_MAX {
            return Err(StoreError::Invalid(format!(
                "the object has {} bytes, at most {OBJECT_BYTES_MAX} are stored under one key; split it, or publish weights \
                 with `ballast put`",
                bytes.len()
            )));
        }
        let size = bytes.len() as u64;
        let mut inner = self.lock();
        // What it replaces need not be there beside it.
        let replaced = inner.entries.get(key.as_str()).map_or(0, Entry::object_bytes);
        let watermark = budget.usage().limit_bytes / 100 * WATERMARK_PERCENT;
        let managed = budget.usage().used_bytes.saturating_sub(inner.counts.bytes);
        if managed.saturating_add(size) > watermark {
            return Err(StoreError::ObjectsFull {
                asked_bytes: size,
                managed_bytes: managed,
                watermark_bytes: watermark,
            });
        }
        if replaced > 0 || inner.entries.contains_key(key.as_str()) {
            inner.forget(key.as_str());
        }
        let evicted = inner.make_room(Path::Quota, budget, size, watermark);
        let charge = budget.reserve(size)?;
        inner.insert(key.as_str().to_owned(), Resident::Object { bytes, charge });
        Ok(evicted)
    }

    /// An object's bytes; it counts as used.
    pub(crate) fn get(&self, key: &ObjectKey) -> Result<Bytes, StoreError> {
        let mut inner = self.lock();
        let bytes = match inner.entries.get(key.as_str()) {
            Some(Entry { resident: Resident::Object { bytes, .. }, .. }) => bytes.clone(),
            _ if key.managed_owner().is_some() => {
                return Err(StoreError::Invalid(format!(
                    "{key} names a member of a managed group; read weights with `ballast get`"
                )));
            }
            _ => return Err(StoreError::NoObject { key: key.clone() }),
        };
        inner.touch(key.as_str());
        Ok(bytes)
    }

    /// Removes one object; answers its bytes.
    pub(crate) fn remove(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let mut inner = self.lock();
        // A member of a group is as much under the guard as the group's own keys.
        let guarded = key.managed_owner().unwrap_or_else(|| key.as_str().to_owned());
        if let Some(instance) = inner.skip(Path::Remove, &guarded) {
            return Err(StoreError::ManagedKey { key: key.clone(), instance });
        }
        let Some(entry) = inner.forget(key.as_str()) else { return Err(StoreError::NoObject { key: key.clone() }) };
        Ok(entry.object_bytes())
    }

    /// Objects whose keys come after `after`, and whether there are more.
    pub(crate) fn list(&self, after: &str) -> (Vec<ObjectEntry>, bool) {
        let inner = self.lock();
        let later = inner.entries.range::<str, _>((std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded));
        let mut objects = later.filter(|(_, entry)| !entry.is_managed());
        let page = objects.by_ref().take(OBJECT_LIST_MAX);
        let page = page.map(|(key, entry)| ObjectEntry { key: key.clone(), bytes: entry.object_bytes() }).collect();
        (page, objects.next().is_some())
    }

    /// Removes every object and no managed group; a dry run only counts.
    pub(crate) fn clear(&self, dry_run: bool) -> Cleared {
        let mut inner = self.lock();
        let mut cleared = Cleared::default();
        for key in inner.entries.keys().cloned().collect::<Vec<_>>() {
            let managed = match dry_run {
                true => inner.entries.get(&key).is_some_and(Entry::is_managed),
                false => inner.skip(Path::Clear, &key).is_some(),
            };
            if managed {
                cleared.skipped += 1;
                continue;
            }
            cleared.objects += 1;
            cleared.bytes += inner.entries.get(&key).map_or(0, Entry::object_bytes);
            if !dry_run {
                inner.forget(&key);
            }
        }
        cleared
    }
}

impl Entry {
    fn is_managed(&self) -> bool {
        matches!(self.resident, Resident::Managed(_))
    }

    fn object_bytes(&self) -> u64 {
        match &self.resident {
            Resident::Object { charge, .. } => charge.bytes(),
            Resident::Managed(_) => 0,
        }
    }
}

impl Inner {
    /// The guard: whether a key is a managed group's, and if so, whose. Every generic path asks it before it removes.
    fn skip(&mut self, path: Path, key: &str) -> Option<InstanceId> {
        let Some(Entry { resident: Resident::Managed(instances), .. }) = self.entries.get(key) else { return None };
        let instance = instances.first().cloned();
        *self.counts.guard_skips.entry(path.name().to_owned()).or_default() += 1;
        instance
    }

    /// Evicts objects, the longest unused first, until `bytes` more fit below `limit_bytes`; none when that can not be
    /// reached. A managed key that is met goes to the young end: the next eviction need not pass it again.
    fn make_room(&mut self, path: Path, budget: &Budget, bytes: u64, limit_bytes: u64) -> u64 {
        let missing = |budget: &Budget| budget.usage().used_bytes.saturating_add(bytes).saturating_sub(limit_bytes);
        if missing(budget) > self.counts.bytes {
            return 0;
        }
        let (mut evicted, begun) = (0, self.now);
        while missing(budget) > 0 {
            // Whatever was used, or met, since this began has been passed.
            let Some((_, key)) = self.by_use.range(..=begun).next().map(|(at, key)| (*at, key.clone())) else { break };
            if self.skip(path, &key).is_some() {
                self.touch(&key);
                continue;
            }
            self.forget(&key);
            evicted += 1;
        }
        self.counts.evicted += evicted;
        evicted
    }

    fn insert(&mut self, key: String, resident: Resident) {
        self.now += 1;
        if let Resident::Object { charge, .. } = &resident {
            self.counts.count += 1;
            self.counts.bytes += charge.bytes();
        }
        self.by_use.insert(self.now, key.clone());
        self.entries.insert(key, Entry { used_at: self.now, resident });
    }

    fn touch(&mut self, key: &str) {
        self.now += 1;
        let Some(entry) = self.entries.get_mut(key) else { return };
        self.by_use.remove(&entry.used_at);
        entry.used_at = self.now;
        self.by_use.insert(self.now, key.to_owned());
    }

    fn forget(&mut self, key: &str) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.by_use.remove(&entry.used_at);
        if let Resident::Object { charge, .. } = &entry.resident {
            self.counts.count -= 1;
            self.counts.bytes -= charge.bytes();
        }
        // An object's charge goes with the entry, and with it its share of the budget.
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::ErrorCode;

    use super::*;
    use crate::node_store::NodeStore;
    use crate::testing::*;

    const LIMIT: u64 = 1 << 20;
    /// Nine of them fit below the watermark.
    const SIZE: usize = 100_000;

    fn key(text: &str) -> ObjectKey {
        ObjectKey::new(text).unwrap()
    }

    fn store(folders: &Folders) -> std::sync::Arc<NodeStore> {
        let mut options = folders.options();
        options.memory.budget_bytes = LIMIT;
        NodeStore::open(&options).unwrap()
    }

    fn put(store: &NodeStore, name: &str) -> u64 {
        store.put_object(&key(name), Bytes::from(vec![7; SIZE])).unwrap()
    }

    fn fill(store: &NodeStore, count: u64) {
        for number in 0..count {
            put(store, &format!("o{number}"));
        }
    }

    fn names(store: &NodeStore) -> Vec<String> {
        store.list_objects("").0.into_iter().map(|entry| entry.key).collect()
    }

    fn skips(store: &NodeStore, path: &str) -> u64 {
        store.usage().objects.guard_skips[path]
    }

    #[test]
    fn objects_share_the_budget_and_the_longest_unused_goes_first() {
        let folders = Folders::new();
        let store = store(&folders);
        for number in 0..8 {
            assert_eq!(put(&store, &format!("o{number}")), 0);
        }
        assert_eq!(store.usage().memory.used_bytes, 8 * SIZE as u64);
        assert_eq!(store.get_object(&key("o0")).unwrap().len(), SIZE);
        assert_eq!(put(&store, "o8"), 0);
        assert_eq!(put(&store, "o9"), 1, "the watermark is reached");
        assert_eq!(names(&store), ["o0", "o2", "o3", "o4", "o5", "o6", "o7", "o8", "o9"], "o0 was used, o1 was not");
        assert_eq!(put(&store, "o9"), 0, "what is replaced makes its own room");
        assert_eq!(store.remove_object(&key("o9")).unwrap(), SIZE as u64);
        assert_eq!(store.remove_object(&key("o9")).unwrap_err().code(), ErrorCode::NotFound);
        assert_eq!(store.usage().memory.used_bytes, 8 * SIZE as u64);
        drop(store);
        assert!(names(&folders.reopen()).is_empty(), "objects do not outlive their node");
    }

    #[test]
    fn an_import_takes_the_room_of_objects_and_only_as_much_as_it_needs() {
        let folders = Folders::new();
        let store = store(&folders);
        fill(&store, 8);
        let too_large = store.allocate(&instance(1), &session(), &[2 * LIMIT]).unwrap_err();
        assert_eq!(too_large.code(), ErrorCode::CapacityExhausted);
        assert_eq!(names(&store).len(), 8, "nothing goes for an import that does not fit anyway");
        import(&store, &instance(1), &[4 * SIZE as u64]);
        assert_eq!(names(&store), ["o2", "o3", "o4", "o5", "o6", "o7"]);
        // Nine tenths of the tier are the watermark: what is left of it is for objects.
        let full = store.put_object(&key("big"), Bytes::from(vec![1; 6 * SIZE])).unwrap_err();
        assert_eq!(full.code(), ErrorCode::CapacityExhausted);
        assert!(full.to_string().contains("--memory"), "{full}");
        assert_eq!(names(&store).len(), 6, "an object that does not fit removes none");
    }

    #[test]
    fn a_promotion_takes_the_room_of_objects() {
        let folders = Folders::new();
        let store = store(&folders);
        let (id, sizes) = (instance(1), [5 * SIZE as u64]);
        import(&store, &id, &sizes);
        store.copy_to_cold(&effect(&id, 2, 0..1), &Default::default()).unwrap();
        store.release_memory(&effect(&id, 3, 0..1), std::time::Duration::ZERO, &Default::default()).unwrap();
        fill(&store, 9);
        let inventory = store.copy_to_memory(&effect(&id, 4, 0..1), &Default::default()).unwrap();
        assert!(inventory.hot.is_full());
        assert_eq!(names(&store), ["o4", "o5", "o6", "o7", "o8"]);
        assert!(skips(&store, "evict") > 0, "the group was the longest unused of all, and was left alone");
    }

    #[test]
    fn every_generic_path_skips_a_managed_group_and_counts_it() {
        let folders = Folders::new();
        let store = store(&folders);
        let (id, sizes) = (instance(1), [3 * SIZE as u64]);
        import(&store, &id, &sizes);
        let before = store.inventory(&id).unwrap();
        let keys = ["weights/x", id.group_id.as_str()];

        fill(&store, 8);
        assert_eq!(skips(&store, "quota"), 2, "the group's two keys were older than every object");

        let member = format!("{}/payload/0", id.group_id);
        for name in [id.group_id.as_str(), &member] {
            let refused = store.remove_object(&key(name)).unwrap_err();
            assert_eq!(refused.code(), ErrorCode::Conflict);
            assert!(refused.to_string().contains("ballast rm"), "{refused}");
        }
        assert_eq!(skips(&store, "remove"), 2);
        for name in keys.into_iter().chain([member.as_str()]) {
            assert_eq!(store.put_object(&key(name), Bytes::new()).unwrap_err().code(), ErrorCode::InvalidArgument);
            assert_eq!(store.get_object(&key(name)).unwrap_err().code(), ErrorCode::InvalidArgument);
        }

        let objects = names(&store).len() as u64;
        assert_eq!(store.clear_objects(true), Cleared { objects, bytes: objects * SIZE as u64, skipped: 2 });
        assert_eq!(skips(&store, "clear"), 0, "a dry run is no operation");
        assert_eq!(store.clear_objects(false).objects, objects);
        assert_eq!((skips(&store, "clear"), names(&store).len()), (2, 0));

        fill(&store, 6);
        let met = skips(&store, "evict");
        import(&store, &instance(2), &[3 * SIZE as u64]);
        assert_eq!(skips(&store, "evict"), met + 2, "older than the objects again");
        assert_eq!(store.inventory(&id).unwrap(), before);
        store.delete_instance(&id, at(9), &crate::Progress::default()).unwrap();
        assert_eq!(store.remove_object(&key(id.group_id.as_str())).unwrap_err().code(), ErrorCode::NotFound);
        store.remove_object(&key(instance(2).group_id.as_str())).unwrap_err();
    }

    #[test]
    fn the_guard_covers_what_was_adopted() {
        let folders = Folders::new();
        import(&store(&folders), &instance(1), &[4096]);
        let store = store(&folders);
        assert_eq!(store.clear_objects(false).skipped, 2);
        assert_eq!(store.remove_object(&key(instance(1).group_id.as_str())).unwrap_err().code(), ErrorCode::Conflict);
    }
}
