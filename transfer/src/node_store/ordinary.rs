//! A node's ordinary objects as its store gives them out, and which keys of an instance the guard covers.

use ballast_schemas::{ObjectEntry, ObjectKey};
use bytes::Bytes;

use super::instance::Instance;
use super::{NodeStore, lock};
use crate::error::StoreError;
use crate::objects::{Cleared, Objects};

impl NodeStore {
    /// Stores an object in place of what was there; answers how many others gave way to it.
    ///
    /// # Errors
    /// When the key is a managed group's, the object is too large, or managed groups leave it no room.
    pub fn put_object(&self, key: &ObjectKey, bytes: Bytes) -> Result<u64, StoreError> {
        self.memory.sweep();
        let put = self.memory.objects().put(self.memory.budget(), key, bytes);
        self.memory.fit_spares();
        put
    }

    /// An object's bytes.
    ///
    /// # Errors
    /// When there is none, or the key is a managed group's.
    pub fn get_object(&self, key: &ObjectKey) -> Result<Bytes, StoreError> {
        self.memory.objects().get(key)
    }

    /// Removes one object; answers its bytes.
    ///
    /// # Errors
    /// When there is none, or the key is a managed group's: that is skipped and counted.
    pub fn remove_object(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        self.memory.objects().remove(key)
    }

    /// The objects whose keys come after `after`, a page of them, and whether there are more.
    #[must_use]
    pub fn list_objects(&self, after: &str) -> (Vec<ObjectEntry>, bool) {
        self.memory.objects().list(after)
    }

    /// Removes every object; managed groups are skipped and counted. A dry run only tells what it would do.
    pub fn clear_objects(&self, dry_run: bool) -> Cleared {
        self.memory.objects().clear(dry_run)
    }
}

impl Instance {
    /// Puts the keys of this instance under the guard: its group, and its manifest once there is one.
    pub(super) fn guard(&self, objects: &Objects) {
        self.guarded_keys().iter().for_each(|key| objects.guard(key, &self.id));
    }

    /// The instance has ended: another one of the same group keeps the keys under the guard.
    pub(super) fn unguard(&self, objects: &Objects) {
        objects.unguard(self.guarded_keys().iter().map(String::as_str), &self.id);
    }

    fn guarded_keys(&self) -> Vec<String> {
        let manifest = lock(&self.state).sealed.as_ref().map(|sealed| sealed.0.seal.manifest.key.clone());
        manifest.into_iter().chain([self.id.group_id.as_str().to_owned()]).collect()
    }
}
