//! The cold tier in object storage: which replicas a node has in a bucket, and how it comes to have those of another one or of
//! an earlier run (see ARCHITECTURE.md, The cold tier's back-ends). What is in a replica is `bucket_replica`'s matter, keys and
//! index are `bucket_index`'s, requests `bucket`'s; which units are cold is the node store's.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ballast_schemas::frame::Tier;
use ballast_schemas::{ClusterId, InstanceId, NodeId};
use object_store::path::Path;
use uuid::Uuid;

use crate::bucket::{Bucket, BucketUrl};
use crate::bucket_index::{
    self, Index, MANIFEST, PACKS, RECORDS, SealedRecord, UPLOADS, mark_key, marked_by, newest, replica_key, version_key,
};
use crate::bucket_replica::BucketReplica;
use crate::budget::Budget;
use crate::cold::{ColdReplica, ColdReport, ColdTier, ColdTierError, FoundReplica, Scan};
use crate::folder::{OnPath, PathError};
use crate::instance_records::{Found, InstanceRecords};
use crate::layout::{GROUP_BYTES_MAX, GroupLayout};
use crate::memory_tier::instance_folder;
use crate::node_store::DamagedFolder;
use crate::record;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these mutexes hold is changed in single statements; a panic elsewhere can not leave it torn.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cold tier of a node, in a bucket.
#[derive(Debug)]
pub(crate) struct BucketTier {
    bucket: Bucket,
    node: NodeId,
    incarnation: String,
    cluster: Mutex<Option<ClusterId>>,
    report: ColdReport,
    budget: Budget,
}

impl BucketTier {
    /// Opens the tier: the bucket must answer.
    pub(crate) fn open(
        url: &BucketUrl,
        quota_bytes: Option<u64>,
        node: &NodeId,
        incarnation: Uuid,
    ) -> Result<Self, ColdTierError> {
        let place = PathBuf::from(url.to_string());
        let bucket = Bucket::open(url).on("use", &place)?;
        Ok(Self::on(bucket, quota_bytes, node, incarnation)?)
    }

    /// The tier on a bucket.
    pub(crate) fn on(
        bucket: Bucket,
        quota_bytes: Option<u64>,
        node: &NodeId,
        incarnation: Uuid,
    ) -> Result<Self, PathError> {
        let cluster = bucket_index::cluster(&bucket)?;
        let incarnation = incarnation.to_string();
        bucket_index::check_server(&bucket, node, &incarnation)?;
        let quota_bytes = quota_bytes.unwrap_or(GROUP_BYTES_MAX);
        let report =
            ColdReport { place: bucket.place().to_owned(), quota_bytes, how: "object storage (S3 API)".to_owned() };
        Ok(Self {
            bucket,
            node: node.clone(),
            incarnation,
            cluster: Mutex::new(cluster),
            report,
            budget: Budget::new(Tier::Cold, quota_bytes),
        })
    }

    pub(crate) fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    pub(crate) fn node(&self) -> &NodeId {
        &self.node
    }

    pub(crate) fn incarnation(&self) -> &str {
        &self.incarnation
    }

    pub(crate) fn is_of_this_run(&self, index: &Index) -> bool {
        index.owner == self.node && index.incarnation == self.incarnation
    }

    fn place_of(&self, replica: &str) -> PathBuf {
        self.bucket.path_of(&replica_key(&self.bucket, replica, []))
    }

    /// Takes a replica for this run of the node, with all that its index says. `None` when there is none, or it is not one that
    /// `may_have` allows.
    fn take(self: &Arc<Self>, name: &str, may_have: &dyn Fn(&Index) -> bool) -> Result<Option<Taken>, PathError> {
        let mark = mark_key(&self.bucket, &self.node, name);
        loop {
            let Some((version, index)) = newest(&self.bucket, name)? else { return Ok(None) };
            let index = match index {
                Ok(index) if may_have(&index) && !index.is_of_remains() => index,
                Ok(_) => return Ok(None),
                Err(reason) => return Ok(Some(Taken::Damaged(reason))),
            };
            let found = match self.read_records(name, &index)? {
                Ok(found) => found,
                Err(reason) => return Ok(Some(Taken::Damaged(reason))),
            };
            self.bucket.put(&mark, Vec::new())?;
            let before = index.owner.clone();
            let replica = BucketReplica::new(self.clone(), name.to_owned(), &found.layout);
            if !replica.take(version, index)? {
                // Another writer was faster. If it is of another node, this one has nothing here.
                if newest(&self.bucket, name)?
                    .is_some_and(|(_, index)| index.is_ok_and(|index| index.owner != self.node))
                {
                    self.bucket.remove(std::slice::from_ref(&mark))?;
                }
                continue;
            }
            if before != self.node {
                self.bucket.remove(&[mark_key(&self.bucket, &before, name)])?;
            }
            replica.clean()?;
            return Ok(Some(Taken::Whole(Box::new((found, Box::new(replica))))));
        }
    }

    fn read_records(&self, name: &str, index: &Index) -> Result<Result<Found, String>, PathError> {
        let key = |part| replica_key(&self.bucket, name, [part]);
        let (records, manifest) = (self.bucket.get(&key(RECORDS))?, self.bucket.get(&key(MANIFEST))?);
        let (Some(records), Some(manifest)) = (records, manifest) else {
            return Ok(Err("its records or its manifest are missing".to_owned()));
        };
        let path = self.bucket.path_of(&key(RECORDS));
        let found = record::decode::<SealedRecord>(&records, &path).map_err(|error| error.to_string());
        Ok(found.and_then(|SealedRecord { layout, seal }| {
            let found = Found::new(InstanceRecords { layout, seal, manifest }, index.state.clone())?;
            if instance_of(name) != Some(&found.instance_folder()) {
                return Err(format!("it holds {}", found.records.layout.instance));
            }
            match index.packs.iter().find(|pack| !pack.lies_in(&found.layout)) {
                Some(pack) => Err(format!("its index speaks of {}, which is no part of a segment", pack.name)),
                None => Ok(found),
            }
        }))
    }

    /// Removes what this node's mark stands for when it could not take that: another node's replica has only the mark from
    /// it, one without an index nothing else.
    fn drop_stale(&self, name: &str) -> Result<(), PathError> {
        let mine = |index: &Result<Index, String>| index.as_ref().is_ok_and(|index| index.owner == self.node);
        match newest(&self.bucket, name)? {
            Some((_, Ok(index))) if index.owner == self.node && index.is_of_remains() => self.remove_remains(name),
            Some((_, index)) if !mine(&index) => self.bucket.remove(&[mark_key(&self.bucket, &self.node, name)]),
            Some(_) => Ok(()),
            // An earlier run that still lives may be about to write the first index: it must find that this one was here.
            None => {
                let index = record::encode(&Index::of_remains(&self.node, &self.incarnation));
                match self.bucket.create(&version_key(&self.bucket, name, 1), index)? {
                    true => self.remove_remains(name),
                    false => Ok(()),
                }
            }
        }
    }

    /// Removes a replica whose index says that nothing is left, or that has none any more. The index goes last: an earlier run
    /// that comes to write the first one finds either this one or its own records gone, which it looks for afterwards.
    pub(crate) fn remove_remains(&self, name: &str) -> Result<(), PathError> {
        self.abort_uploads(name)?;
        let left = self.bucket.list(&replica_key(&self.bucket, name, []))?;
        let is_index = |key: &Path| bucket_index::is_index(&self.bucket, name, key);
        let (indexes, other): (Vec<Path>, Vec<Path>) = left.into_iter().map(|meta| meta.location).partition(is_index);
        self.bucket.remove(&other)?;
        self.bucket.remove(&[mark_key(&self.bucket, &self.node, name)])?;
        self.bucket.remove(&indexes)
    }

    /// Gives up the uploads in parts that are noted for a replica.
    pub(crate) fn abort_uploads(&self, name: &str) -> Result<(), PathError> {
        for meta in self.bucket.list(&replica_key(&self.bucket, name, [UPLOADS]))? {
            let Some(pack) = meta.location.filename() else { continue };
            if let Some(id) = self.bucket.get(&meta.location)? {
                let key = replica_key(&self.bucket, name, [PACKS, pack]);
                self.bucket.abort(&key, &String::from_utf8_lossy(&id))?;
            }
            self.bucket.remove(std::slice::from_ref(&meta.location))?;
        }
        Ok(())
    }
}

/// A replica that was taken.
enum Taken {
    Whole(Box<FoundReplica>),
    /// Its records make no sense.
    Damaged(String),
}

impl ColdTier for BucketTier {
    fn report(&self) -> &ColdReport {
        &self.report
    }

    fn cluster(&self) -> Option<ClusterId> {
        lock(&self.cluster).clone()
    }

    fn set_cluster(&self, cluster: &ClusterId) -> Result<(), PathError> {
        let found = match self.cluster() {
            Some(found) => found,
            None => bucket_index::set_cluster(&self.bucket, cluster)?,
        };
        if found != *cluster {
            let message = format!("it holds the bytes of cluster {found}, not of {cluster}; name another prefix");
            return Err(PathError::new("use", self.bucket.place(), io::Error::other(message)));
        }
        *lock(&self.cluster) = Some(found);
        Ok(())
    }

    fn budget(&self) -> &Budget {
        &self.budget
    }

    fn replica(self: Arc<Self>, instance: &InstanceId, layout: &Arc<GroupLayout>) -> Box<dyn ColdReplica> {
        Box::new(BucketReplica::new(self, fresh_name(&instance_folder(instance)), layout))
    }

    fn left_of(&self, instance: &InstanceId) -> Result<Option<PathBuf>, PathError> {
        let folder = instance_folder(instance);
        for name in marked_by(&self.bucket, &self.node)? {
            if instance_of(&name) != Some(&folder) {
                continue;
            }
            match newest(&self.bucket, &name)? {
                Some((_, Ok(index))) if index.owner == self.node && !index.is_of_remains() => {
                    return Ok(Some(self.place_of(&name)));
                }
                Some((_, Err(_))) => return Ok(Some(self.place_of(&name))),
                // A mark can outlive what it speaks of.
                _ => self.drop_stale(&name)?,
            }
        }
        Ok(None)
    }

    fn scan(self: Arc<Self>) -> Result<Scan, PathError> {
        let mut scan = Scan::default();
        let mut damaged: Vec<(String, String)> = Vec::new();
        let mut taken: BTreeMap<InstanceId, Named> = BTreeMap::new();
        for name in marked_by(&self.bucket, &self.node)? {
            match self.take(&name, &|index| index.owner == self.node)? {
                Some(Taken::Whole(found)) => {
                    let instance = found.0.records.layout.instance.clone();
                    let before = taken.remove(&instance);
                    let (kept, other) = fuller((name, *found), before);
                    taken.insert(instance, kept);
                    // Two runs of one name that lived at once have made one each.
                    damaged.extend(other.map(|(name, _)| (name, "its instance has a fuller replica".to_owned())));
                }
                Some(Taken::Damaged(reason)) => damaged.push((name, reason)),
                None => self.drop_stale(&name)?,
            }
        }
        scan.found.extend(taken.into_iter().map(|(instance, (_, found))| (instance, found)));
        for (name, reason) in damaged {
            let all = self.bucket.list(&replica_key(&self.bucket, &name, []))?;
            let charge = self.budget.charge(all.iter().map(|meta| meta.size).sum());
            scan.damaged.push((DamagedFolder { path: self.place_of(&name), reason }, charge));
        }
        Ok(scan)
    }

    fn outlives_node(&self) -> bool {
        true
    }

    fn adopt(
        self: Arc<Self>,
        is_away: &dyn Fn(&NodeId) -> bool,
        held: &dyn Fn() -> BTreeSet<String>,
    ) -> Result<Vec<FoundReplica>, PathError> {
        let mut adopted: Vec<FoundReplica> = Vec::new();
        for node in bucket_index::nodes(&self.bucket)? {
            let is_own = node == self.node;
            if !is_own && !is_away(&node) {
                continue;
            }
            let marked = marked_by(&self.bucket, &node)?;
            // Asked for after the marks: what this node makes itself is held before it is marked.
            let mut held = held();
            held.extend(adopted.iter().map(|(found, _)| found.instance_folder()));
            for name in marked {
                if instance_of(&name).is_none_or(|folder| held.contains(folder)) {
                    continue;
                }
                // Of this node's own only what this run has taken and not adopted: another run of its name may be at work.
                let may_have =
                    |index: &Index| index.owner == node && (!is_own || index.incarnation == self.incarnation);
                match self.take(&name, &may_have)? {
                    Some(Taken::Whole(found)) => {
                        tracing::info!(%node, replica = name, "took over a cold replica");
                        held.insert(found.0.instance_folder());
                        adopted.push(*found);
                    }
                    Some(Taken::Damaged(_)) if is_own => {}
                    Some(Taken::Damaged(reason)) => {
                        tracing::warn!(%node, replica = name, reason, "a cold replica can not be taken over; it is kept");
                    }
                    None => {}
                }
            }
        }
        Ok(adopted)
    }
}

/// A replica and its name in the bucket.
type Named = (String, FoundReplica);

/// The replica that holds more, and the other.
fn fuller(one: Named, other: Option<Named>) -> (Named, Option<Named>) {
    let held = |(_, (found, _)): &Named| found.state.held.count();
    match other {
        Some(other) if held(&other) >= held(&one) => (other, Some(one)),
        other => (one, other),
    }
}

/// A name for a replica that nobody has.
pub(crate) fn fresh_name(instance_folder: &str) -> String {
    format!("{instance_folder}_{}", Uuid::now_v7().simple())
}

/// The instance's part of a replica's name.
pub(crate) fn instance_of(name: &str) -> Option<&str> {
    name.rsplit_once('_').map(|(instance, _)| instance)
}
