//! Reads on a node: descriptors of segments for readers on the same machine, guarded reads from memory, reads from disk.

use std::rc::{Rc, Weak};

use ballast_schemas::{BallastError, Bitmap, ErrorCode, InstanceId};

use super::disks::{Inode, SEGMENT_UNITS};
use super::store::{Live, Store, refuse};
use crate::sim::bugs::Bug;
use crate::sim::content::Content;
use crate::sim::invariants;
use crate::sim::runtime::MS;

/// A mapped segment. Its lock goes with it, whatever becomes of the node.
pub(crate) struct Mapped {
    inode: Rc<Inode>,
    known_to: Weak<Live>,
}

impl Mapped {
    fn new(inode: &Rc<Inode>, live: &Rc<Live>) -> Self {
        inode.locks.set(inode.locks.get() + 1);
        let segment = inode.first_unit / SEGMENT_UNITS;
        *live.mapped.borrow_mut().entry(segment).or_default() += 1;
        Self { inode: Rc::clone(inode), known_to: Rc::downgrade(live) }
    }

    pub fn covers(&self, unit: u32) -> bool {
        unit / SEGMENT_UNITS == self.inode.first_unit / SEGMENT_UNITS
    }

    /// What the reader sees there; `None` is a hole.
    pub fn read(&self, unit: u32) -> Option<u64> {
        self.inode.read(unit)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.inode.locks.set(self.inode.locks.get() - 1);
        if let Some(live) = self.known_to.upgrade() {
            let segment = self.inode.first_unit / SEGMENT_UNITS;
            if let Some(count) = live.mapped.borrow_mut().get_mut(&segment) {
                *count -= 1;
            }
        }
    }
}

/// What a reader is told, with the guards that make it true.
pub(crate) struct Granted {
    pub content: Rc<Content>,
    pub hot: Bitmap,
    pub cold: Bitmap,
    pub mapped: Vec<Mapped>,
}

/// The outcome of reading one unit.
pub(crate) type ReadOf = Result<Option<u64>, BallastError>;

/// What a read from disk gave.
pub(crate) type ColdRead = Result<u64, BallastError>;

impl Store {
    fn described(&self, id: &InstanceId) -> Result<(Rc<Live>, Rc<Content>), BallastError> {
        let live = self.served(id)?;
        invariants::identity_of_bytes(&self.w, &self.node, id, &live.id);
        let content = Self::sealed(&live)?;
        Ok((live, content))
    }

    /// Describes an instance, and with `map` hands out its segments in memory. Guards and bitmaps belong to one moment.
    pub async fn grant(&self, id: &InstanceId, map: bool) -> Result<Granted, BallastError> {
        let (live, content) = self.described(id)?;
        let (hot, cold) = {
            let units = live.units.borrow();
            (units.hot().clone(), units.cold().clone())
        };
        if self.w.bug(Bug::GuardAfterDescribe) {
            self.w.work(1_500 * MS).await;
        }
        let mut mapped = Vec::new();
        if map {
            let disks = self.node.disks.borrow();
            for (segment, inode) in disks.memory.get(&live.id).iter().flat_map(|folder| &folder.segments) {
                if Self::segment_units(&live, *segment).any(|unit| hot.get(unit)) {
                    mapped.push(Mapped::new(inode, &live));
                }
            }
        }
        Ok(Granted { content, hot, cold, mapped })
    }

    /// Bytes from memory under a guard; `None` when the unit is not hot.
    pub async fn read_hot(&self, id: &InstanceId, unit: u32) -> ReadOf {
        let (live, _) = self.described(id)?;
        let segment = {
            let disks = self.node.disks.borrow();
            disks.memory.get(&live.id).and_then(|folder| folder.segments.get(&(unit / SEGMENT_UNITS)).cloned())
        };
        let Some(segment) = segment else { return Ok(None) };
        if !live.units.borrow_mut().guard(unit) {
            return Ok(None);
        }
        self.w.work(20 * MS).await;
        // A deletion may have unlinked the segment meanwhile: an open one stays what it was.
        let bytes = segment.read(unit);
        live.units.borrow_mut().unguard(unit);
        live.eased.notify();
        // A hole that was served as bytes is the reader's to notice.
        Ok(Some(bytes.unwrap_or_default()))
    }

    /// Bytes from disk, compared with their checksum: wrong ones are never handed out.
    pub async fn read_cold(&self, id: &InstanceId, unit: u32) -> ColdRead {
        let (live, content) = self.described(id)?;
        if !live.units.borrow().cold().get(unit) {
            return refuse(ErrorCode::Unavailable, format!("unit {unit} of {id} is not on disk here"));
        }
        self.w.work(20 * MS).await;
        let found = self.cold_bytes(&live, unit);
        if live.deleting.get() {
            return refuse(ErrorCode::NotReady, format!("{id} is being deleted"));
        }
        match found {
            Some(bytes) if Some(bytes) == content.unit(unit) => Ok(bytes),
            _ => {
                let _turn = live.queue.enter().await;
                if live.units.borrow().cold().get(unit) && self.cold_bytes(&live, unit) != content.unit(unit) {
                    self.lose_cold(&live, &[unit]);
                    invariants::found_by_reader(&self.w, id);
                }
                refuse(ErrorCode::ChecksumMismatch, format!("unit {unit} of {id} does not match"))
            }
        }
    }
}
