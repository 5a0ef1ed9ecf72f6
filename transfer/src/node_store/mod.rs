//! What one node holds of every group, on both tiers: imports, residency effects, deletion and reads (see
//! ARCHITECTURE.md, The data plane). Carries out steps and obeys fences; why a step is taken is decided in the log.
//!
//! Every call blocks for as long as its bytes move: async callers run it on a blocking thread. Effects on one
//! instance are carried out one after the other; raising a fence, reads and inventories never wait for them.

mod adoption;
#[cfg(test)]
mod cold_conformance;
#[cfg(test)]
mod crash_tests;
mod deletion;
#[cfg(test)]
mod fault_tests;
mod import;
mod instance;
mod offers;
#[cfg(test)]
mod offers_tests;
mod ordinary;
mod reading;
mod residency;
mod room;
#[cfg(test)]
mod space_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use ballast_schemas::frame::Tier;
use ballast_schemas::{ClusterId, InstanceId, InstanceStanding, LogPosition, NodeId, NodeInventory, ObjectCounts};
use uuid::Uuid;

pub use adoption::{Adoption, DamagedFolder};
pub use import::Allocated;
#[cfg(test)]
pub(crate) use import::SealDocument;
#[cfg(feature = "rdma")]
pub(crate) use reading::HotRun;
pub use reading::{ColdPiece, GrantedSegments, HotPiece, InstanceReader};

use crate::budget::{Charge, Usage};
use crate::cold::{self, ColdOptions, ColdReport, ColdTier, ColdTierError, Scan};
use crate::error::StoreError;
use crate::folder::PathError;
use crate::memory_tier::{MemoryOptions, MemoryReport, MemoryTier, MemoryTierError, instance_folder};
use instance::{Instance, Standing};

/// Deleted instances that a node remembers, so that a straggling import can not bring one back.
const TOMBSTONES_MAX: usize = 65_536;

/// How to open a node's store.
#[derive(Clone, Debug)]
pub struct NodeStoreOptions {
    /// The node's durable name.
    pub node: NodeId,
    /// The memory tier.
    pub memory: MemoryOptions,
    /// The cold tier, if the node has one.
    pub cold: Option<ColdOptions>,
}

/// Why a node's store can not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The memory tier can not.
    #[error(transparent)]
    Memory(#[from] MemoryTierError),
    /// The cold tier can not.
    #[error(transparent)]
    Cold(#[from] ColdTierError),
    /// The two tiers belong to different clusters.
    #[error("the memory folder belongs to cluster {memory}, the cold tier to {cold}; use tiers of one cluster")]
    TwoClusters {
        /// The cluster in the memory folder.
        memory: ClusterId,
        /// The cluster in the cold folder.
        cold: ClusterId,
    },
    /// What is in the folders can not be read.
    #[error(transparent)]
    Path(#[from] PathError),
}

/// How full a node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeUsage {
    /// The memory tier.
    pub memory: Usage,
    /// Bytes of deleted instances that readers still map; part of the memory used.
    pub lingering_bytes: u64,
    /// The cold tier, if there is one.
    pub cold: Option<Usage>,
    /// Instances held, quarantined ones included.
    pub instances: u32,
    /// Instances that are kept but not served.
    pub quarantined: u32,
    /// Ordinary objects; their bytes are part of the memory used.
    pub objects: ObjectCounts,
}

/// The store of one node.
#[derive(Debug)]
pub struct NodeStore {
    node: NodeId,
    incarnation: String,
    cluster: Mutex<Option<ClusterId>>,
    memory: MemoryTier,
    cold: Option<Arc<dyn ColdTier>>,
    instances: RwLock<BTreeMap<InstanceId, Arc<Instance>>>,
    tombstones: Mutex<BTreeMap<InstanceId, LogPosition>>,
    adoption: Adoption,
    /// What is on the cold tier is not adopted yet, because it is not known whether the node is of the tier's cluster.
    cold_waits: Mutex<bool>,
    /// A cluster has taken this run of the node in.
    is_member: AtomicBool,
    /// Bytes of folders that could not be adopted and are kept.
    damaged: Mutex<Vec<Charge>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section in this module leaves its data in order at each step: a panic elsewhere can not tear it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NodeStore {
    /// Opens the store: takes the folders, starts a new incarnation, and re-adopts what is intact in them. What was
    /// adopted is served once [`NodeStore::set_standing`] says that the log knows it.
    ///
    /// # Errors
    /// When a tier can not be opened. A damaged instance is no error: it is kept and reported in [`Adoption`].
    pub fn open(options: &NodeStoreOptions) -> Result<Arc<Self>, OpenError> {
        Self::open_with(options, cold::open)
    }

    /// [`NodeStore::open`] with another way to open the cold tier.
    pub(crate) fn open_with(
        options: &NodeStoreOptions,
        open_cold: impl Fn(&ColdOptions, &NodeId, Uuid) -> Result<Arc<dyn ColdTier>, ColdTierError>,
    ) -> Result<Arc<Self>, OpenError> {
        let incarnation = Uuid::now_v7();
        let cold = match &options.cold {
            Some(cold) => Some(open_cold(cold, &options.node, incarnation)?),
            None => None,
        };
        let memory = MemoryTier::open(&options.memory, &options.node, incarnation)?;
        let in_memory = memory.identity().cluster.clone();
        let on_cold = cold.as_ref().and_then(|cold| cold.cluster());
        let cluster = match (in_memory, on_cold) {
            (Some(memory), Some(cold)) if memory != cold => return Err(OpenError::TwoClusters { memory, cold }),
            (memory, cold) => cold.or(memory),
        };
        // What outlives its node may be another cluster's, with a node of the same name that lives.
        let is_new_here = cold.as_ref().is_some_and(|cold| cold.outlives_node() && cold.cluster().is_some());
        let cold_waits = is_new_here && memory.identity().cluster.is_none();
        let found = match &cold {
            Some(cold) if !cold_waits => cold.clone().scan()?,
            _ => Scan::default(),
        };
        let adoption::Adopted { instances, adoption, charges } = adoption::adopt(&memory, cold.as_ref(), found)?;
        instances.values().for_each(|instance| instance.guard(memory.objects()));
        Ok(Arc::new(Self {
            node: options.node.clone(),
            incarnation: incarnation.to_string(),
            cluster: Mutex::new(cluster),
            memory,
            cold,
            instances: RwLock::new(instances),
            tombstones: Mutex::default(),
            adoption,
            cold_waits: Mutex::new(cold_waits),
            is_member: AtomicBool::new(false),
            damaged: Mutex::new(charges),
        }))
    }

    /// Adopts what the node has on a cold tier that outlives it, where that waited for [`NodeStore::set_cluster`]: a node that
    /// begins anew can not know before whose the tier is. Tells whether there was anything.
    ///
    /// # Errors
    /// When the tier does not answer; asking again goes on.
    pub fn adopt_own(&self) -> Result<bool, StoreError> {
        let mut waits = lock(&self.cold_waits);
        let Some(cold) = self.cold.as_ref().filter(|_| *waits && self.is_member.load(Ordering::SeqCst)) else {
            return Ok(false);
        };
        let on_tier = |error| StoreError::on_tier(Tier::Cold, error);
        let found = cold.clone().scan().map_err(on_tier)?;
        let adopted = adoption::adopt_found(&self.memory, cold, found).map_err(on_tier)?;
        *waits = false;
        lock(&self.damaged).extend(adopted.charges);
        adopted.instances.values().for_each(|instance| instance.guard(self.memory.objects()));
        let instances = adopted.adoption.instances;
        self.write_instances().extend(adopted.instances);
        Ok(instances > 0)
    }

    /// Takes over the cold replicas of nodes that are away, where this node holds nothing of the instance and they outlive their
    /// node. Like all that was adopted they are served once [`NodeStore::set_standing`] says that the log knows them.
    ///
    /// # Errors
    /// When what holds them does not answer; what was taken over before stays so.
    pub fn adopt_from(&self, is_away: &dyn Fn(&NodeId) -> bool) -> Result<Vec<InstanceId>, StoreError> {
        let Some(cold) = &self.cold else { return Ok(Vec::new()) };
        let held = || self.instances().iter().map(instance_folder).collect();
        let found = cold.clone().adopt(is_away, &held).map_err(|error| StoreError::on_tier(Tier::Cold, error))?;
        let mut adopted = Vec::new();
        for copy in found {
            match adoption::adopt_instance(&self.memory, Some(cold), None, Some(copy), &mut Adoption::default()) {
                Ok(instance) => {
                    instance.guard(self.memory.objects());
                    adopted.push(instance.id.clone());
                    self.write_instances().insert(instance.id.clone(), instance);
                }
                // It is this node's by now, and found again the next time.
                Err(error) => tracing::warn!(%error, "a cold replica that was taken over can not be adopted yet"),
            }
        }
        Ok(adopted)
    }

    /// Whether the cold tier outlives the node, so that others can take it over.
    #[must_use]
    pub fn cold_outlives_node(&self) -> bool {
        self.cold.as_ref().is_some_and(|cold| cold.outlives_node())
    }

    /// The node's durable name.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// The name of this run of the node.
    #[must_use]
    pub fn incarnation(&self) -> &str {
        &self.incarnation
    }

    /// What the memory tier runs on.
    #[must_use]
    pub fn memory_report(&self) -> &MemoryReport {
        self.memory.report()
    }

    /// What the cold tier runs on, if there is one.
    #[must_use]
    pub fn cold_report(&self) -> Option<&ColdReport> {
        self.cold.as_deref().map(|cold| cold.report())
    }

    /// What was found in the folders at start.
    #[must_use]
    pub fn adoption(&self) -> &Adoption {
        &self.adoption
    }

    /// How full the node is.
    #[must_use]
    pub fn usage(&self) -> NodeUsage {
        let instances = self.all();
        let quarantined =
            instances.iter().filter(|instance| lock(&instance.state).standing != Standing::Serving).count();
        NodeUsage {
            memory: self.memory.usage(),
            lingering_bytes: self.memory.lingering_bytes(),
            cold: self.cold.as_deref().map(|cold| cold.budget().usage()),
            instances: instances.len() as u32,
            quarantined: quarantined as u32,
            objects: self.memory.objects().counts(),
        }
    }

    /// The cluster that the node's bytes belong to, once it has met one.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        lock(&self.cluster).clone()
    }

    /// Makes the node a member of a cluster, durably. A node never changes its cluster.
    ///
    /// # Errors
    /// When it belongs to another one, or the folders can not be written.
    pub fn set_cluster(&self, cluster: &ClusterId) -> Result<(), StoreError> {
        let check = |current: &Option<ClusterId>| match current {
            Some(expected) if expected != cluster => {
                Err(StoreError::OtherCluster { expected: expected.clone(), found: cluster.clone() })
            }
            _ => Ok(()),
        };
        check(&lock(&self.cluster))?;
        // Not under the lock: the tier may take its time, and the node's status says the cluster.
        if let Some(cold) = &self.cold {
            cold.set_cluster(cluster)?;
        }
        let mut current = lock(&self.cluster);
        check(&current)?;
        self.memory.set_cluster(cluster)?;
        *current = Some(cluster.clone());
        self.is_member.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Every instance of which something is here.
    #[must_use]
    pub fn instances(&self) -> Vec<InstanceId> {
        self.read_instances().keys().cloned().collect()
    }

    /// The highest fence or import position that anything here names: the log the node has seen reaches at least this far.
    #[must_use]
    pub fn highest_seen(&self) -> LogPosition {
        let fences = self.all().into_iter().map(|instance| lock(&instance.state).fence.max(instance.id.position));
        fences.max().unwrap_or(LogPosition::ZERO)
    }

    /// Says what the log knows of an adopted instance: known ones are served, unknown ones kept, deleted ones dropped.
    ///
    /// # Errors
    /// When a deleted instance can not be dropped.
    pub fn set_standing(&self, instance: &InstanceId, standing: InstanceStanding) -> Result<(), StoreError> {
        match standing {
            InstanceStanding::Known => self.change_standing(instance, Standing::Serving),
            InstanceStanding::Unknown => {
                self.change_standing(instance, Standing::Quarantined("the log does not know it".to_owned()));
            }
            InstanceStanding::Deleted => return self.drop_instance(instance),
        }
        Ok(())
    }

    /// Keeps everything and serves nothing, because the node is not this cluster's, say.
    pub fn quarantine_all(&self, why: &str) {
        for instance in self.instances() {
            self.change_standing(&instance, Standing::Quarantined(why.to_owned()));
        }
    }

    fn change_standing(&self, instance: &InstanceId, standing: Standing) {
        if let Some(instance) = self.read_instances().get(instance) {
            lock(&instance.state).standing = standing;
        }
    }

    /// What is here of an instance; `None` when nothing is.
    ///
    /// # Errors
    /// When it is kept but not served.
    pub fn inventory(&self, instance: &InstanceId) -> Result<Option<NodeInventory>, StoreError> {
        let Some(instance) = self.read_instances().get(instance).cloned() else { return Ok(None) };
        instance.check_served()?;
        Ok(Some(self.inventory_of(&instance)))
    }

    /// What is here of every instance that is served.
    #[must_use]
    pub fn inventories(&self) -> Vec<NodeInventory> {
        let served = self.all().into_iter().filter(|instance| instance.check_served().is_ok());
        served.map(|instance| self.inventory_of(&instance)).collect()
    }

    fn inventory_of(&self, instance: &Instance) -> NodeInventory {
        let state = lock(&instance.state);
        let sealed = state.sealed.is_some();
        NodeInventory {
            node: self.node.clone(),
            incarnation: self.incarnation.clone(),
            instance: instance.id.clone(),
            fence: state.fence,
            sealed,
            manifest: sealed && !state.deleting,
            hot: if sealed {
                state.units.hot().clone()
            } else {
                ballast_schemas::Bitmap::empty(instance.layout.unit_count())
            },
            cold: state.units.cold().clone(),
            cold_lost: state.cold_lost.clone(),
        }
    }

    fn read_instances(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<InstanceId, Arc<Instance>>> {
        self.instances.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_instances(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<InstanceId, Arc<Instance>>> {
        self.instances.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<Arc<Instance>> {
        self.read_instances().values().cloned().collect()
    }

    /// An instance that is here and served.
    fn served(&self, id: &InstanceId) -> Result<Arc<Instance>, StoreError> {
        let found = self.read_instances().get(id).cloned();
        let instance = found.ok_or_else(|| match lock(&self.tombstones).contains_key(id) {
            true => StoreError::Deleted { instance: id.clone() },
            false => StoreError::Unknown { instance: id.clone() },
        })?;
        instance.check_served()?;
        Ok(instance)
    }

    fn cold(&self) -> Result<&Arc<dyn ColdTier>, StoreError> {
        self.cold.as_ref().ok_or(StoreError::NoColdTier)
    }

    fn bury(&self, instance: &InstanceId, fence: LogPosition) {
        let mut tombstones = lock(&self.tombstones);
        let entry = tombstones.entry(instance.clone()).or_insert(fence);
        *entry = (*entry).max(fence);
        while tombstones.len() > TOMBSTONES_MAX {
            // The one from the earliest log position is the least likely to have a straggler.
            let Some(oldest) = tombstones.keys().min_by_key(|id| id.position).cloned() else { break };
            tombstones.remove(&oldest);
        }
    }
}
