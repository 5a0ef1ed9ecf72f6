//! Imports on a node: reserve, write, seal, and the receipt that the gateway asks for.

use std::collections::BTreeMap;
use std::rc::Rc;

use ballast_schemas::frame::{OfferedFragment, Offers};
use ballast_schemas::{BallastError, Bitmap, Digest, ErrorCode, InstanceId, Receipt, SessionId, TokenPart};
use ballast_transfer::{OfferVerdict, combine};

use super::disks::{ColdFolder, ColdUnit};
use super::store::{Live, Standing, Store, new_folder, refuse};
use crate::sim::bugs::Bug;
use crate::sim::content::Content;
use crate::sim::invariants;
use crate::sim::runtime::MS;
use crate::sim::world::short;

impl Store {
    fn check_session(live: &Live, session_id: &SessionId) -> Result<(), BallastError> {
        if live.session_id == *session_id {
            return Ok(());
        }
        refuse(ErrorCode::Conflict, format!("{} belongs to session {}", live.id, live.session_id))
    }

    pub fn allocate(&self, id: &InstanceId, session_id: &SessionId, count: u32) -> Result<(), BallastError> {
        if self.tombstones.borrow().contains(id) {
            return refuse(ErrorCode::Conflict, format!("{id} was deleted"));
        }
        if let Some(live) = self.instances.borrow().get(id) {
            if live.standing.get() != Standing::Serving || live.deleting.get() {
                return refuse(ErrorCode::NotReady, format!("{id} is not served or being deleted"));
            }
            return Self::check_session(live, session_id);
        }
        if self.node.disks.borrow().memory_used() + u64::from(count) > self.node.memory_units {
            return refuse(ErrorCode::CapacityExhausted, "memory tier is full");
        }
        let live = Live::new(id, session_id, count, Standing::Serving);
        (0..count).for_each(|unit| live.units.borrow_mut().set_resident(unit));
        let folder = new_folder(session_id, count, self.w.now());
        self.node.disks.borrow_mut().memory.insert(id.clone(), folder);
        self.instances.borrow_mut().insert(id.clone(), Rc::new(live));
        self.trace(&format!("allocated {} for {session_id}", short(id)));
        Ok(())
    }

    pub async fn write(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        unit: u32,
        bytes: u64,
    ) -> Result<(), BallastError> {
        let live = self.served(id)?;
        Self::check_session(&live, session_id)?;
        if live.deleting.get() || live.sealing.get() || live.content.borrow().is_some() {
            return refuse(ErrorCode::Conflict, format!("the import of {id} has ended"));
        }
        // A writer is between its look at the state and the end of its copy.
        live.writers.set(live.writers.get() + 1);
        self.step(4 * MS).await;
        if let Some(folder) = self.node.disks.borrow_mut().memory.get_mut(id) {
            folder.write(unit, Some(bytes));
        }
        live.writers.set(live.writers.get() - 1);
        live.eased.notify();
        Ok(())
    }

    /// What a participant holds is noted; answers the units that it has to send.
    pub async fn offer(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        part: &TokenPart,
        held: &[(u32, u64)],
    ) -> Result<Vec<u32>, BallastError> {
        let live = self.served(id)?;
        Self::check_session(&live, session_id)?;
        if live.deleting.get() || live.sealing.get() {
            return refuse(ErrorCode::Conflict, format!("the import of {id} has ended"));
        }
        if let Some(content) = &*live.content.borrow() {
            return match held.iter().all(|(unit, bytes)| content.unit(*unit) == Some(*bytes)) {
                true => Ok(Vec::new()),
                false => refuse(ErrorCode::Conflict, format!("{id} is sealed")),
            };
        }
        let mut offers = live.offers.borrow_mut();
        let own = offers.enter(id, part).map_err(|error| error.to_error())?;
        let (mut wanted, mut refused) = (Vec::new(), None);
        for (unit, bytes) in held {
            let fragment = OfferedFragment { unit: *unit, offset: 0, bytes: 1, crc64: *bytes };
            match offers.offer(id, own, &fragment) {
                Ok(OfferVerdict::Nothing) => {}
                Ok(OfferVerdict::Look(writes)) => {
                    let found = self.node.disks.borrow().memory.get(id).and_then(|folder| folder.bytes(*unit));
                    if !offers.note((*unit, 0), writes, found.unwrap_or_default()) {
                        wanted.push(*unit);
                    }
                }
                // The planted bug: as good as here.
                Ok(OfferVerdict::Send) if self.w.bug(Bug::OffersCountUnread) => {
                    offers.note((*unit, 0), 0, *bytes);
                }
                Ok(OfferVerdict::Send) => wanted.push(*unit),
                Err(error) => refused = refused.or(Some(error.to_error())),
            }
        }
        refused.map_or(Ok(wanted), Err)
    }

    /// A participant writes what it brings.
    pub async fn write_part(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        part: &TokenPart,
        unit: u32,
        bytes: u64,
    ) -> Result<(), BallastError> {
        let live = self.served(id)?;
        Self::check_session(&live, session_id)?;
        let begun = live.offers.borrow_mut().begin_write(id, part, unit, 0, 1);
        let place = begun.map_err(|error| error.to_error())?;
        let written = self.write(id, session_id, unit, bytes).await;
        live.offers.borrow_mut().end_write(place);
        written
    }

    /// What the participants have offered so far.
    pub fn offers(&self, id: &InstanceId, session_id: &SessionId) -> Result<Offers, BallastError> {
        let live = self.served(id)?;
        Self::check_session(&live, session_id)?;
        let listed = live.offers.borrow().list(false);
        Ok(listed)
    }

    pub async fn seal(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        content: &Rc<Content>,
    ) -> Result<(), BallastError> {
        let live = self.served(id)?;
        Self::check_session(&live, session_id)?;
        let _turn = live.queue.enter().await;
        if live.deleting.get() {
            return refuse(ErrorCode::NotReady, format!("{id} is being deleted"));
        }
        if let Some(sealed) = &*live.content.borrow() {
            if sealed.manifest.sha256 != content.manifest.sha256 {
                return refuse(ErrorCode::Conflict, format!("{id} is sealed with another manifest"));
            }
            return Self::check_complete(&live);
        }
        if content.manifest.group_id != id.group_id || content.len() != live.count {
            return refuse(ErrorCode::InvalidArgument, format!("the manifest is not that of {id}"));
        }
        live.sealing.set(true);
        live.eased.wait_for(|| (live.writers.get() == 0).then_some(())).await;
        self.step(3 * MS).await;
        let sealed = self.seal_now(&live, content);
        live.sealing.set(false);
        sealed
    }

    fn seal_now(&self, live: &Live, content: &Rc<Content>) -> Result<(), BallastError> {
        // Deletion may have begun while the writers ended.
        let mut disks = self.node.disks.borrow_mut();
        let now = self.w.now();
        let Some(folder) = disks.memory.get_mut(&live.id) else {
            return refuse(ErrorCode::NotFound, format!("nothing of {} is here", live.id));
        };
        // The planted bug again: what counts as here is not looked at.
        let offered = |unit: &u32| {
            let counts = self.w.bug(Bug::OffersCountUnread);
            counts && live.offers.borrow().checksum_of(*unit, 1) == content.unit(*unit).map(checksum_of_one)
        };
        let wrong = |unit: &u32| folder.bytes(*unit) != content.unit(*unit) && !offered(unit);
        let wrong = (0..live.count).find(wrong);
        if let Some(unit) = wrong {
            return refuse(ErrorCode::ChecksumMismatch, format!("unit {unit} of {} differs", live.id));
        }
        folder.content = Some(Rc::clone(content));
        folder.held = Bitmap::full(live.count);
        if self.node.has_cold {
            let cold = ColdFolder {
                session_id: live.session_id.clone(),
                content: Rc::clone(content),
                fence: live.fence.get(),
                deleting: live.deleting.get(),
                held: Bitmap::empty(live.count),
                lost: Bitmap::empty(live.count),
                units: vec![ColdUnit::default(); live.count as usize],
                offline: false,
                allocated_at: now,
            };
            disks.cold.insert(live.id.clone(), cold);
        }
        drop(disks);
        (0..live.count).for_each(|unit| live.units.borrow_mut().set_hot(unit));
        *live.content.borrow_mut() = Some(Rc::clone(content));
        *live.verified.borrow_mut() = BTreeMap::new();
        self.save(live);
        self.trace(&format!("sealed {}", short(&live.id)));
        Ok(())
    }

    /// A receipt stands for bytes that are here.
    fn check_complete(live: &Live) -> Result<(), BallastError> {
        let units = live.units.borrow();
        match (0..live.count).find(|unit| !units.hot().get(*unit) && !units.cold().get(*unit)) {
            Some(unit) => refuse(ErrorCode::Unavailable, format!("unit {unit} of {} is not here", live.id)),
            None => Ok(()),
        }
    }

    pub fn receipt(&self, id: &InstanceId, session_id: &SessionId) -> Result<Receipt, BallastError> {
        let live = self.served(id)?;
        Self::check_session(&live, session_id)?;
        let content = Self::sealed(&live)?;
        Self::check_complete(&live)?;
        invariants::identity_of_bytes(&self.w, &self.node, id, &live.id);
        Ok(Receipt {
            node: self.node.id.clone(),
            incarnation: self.incarnation.clone(),
            instance: id.clone(),
            session_id: session_id.clone(),
            layout_digest: Digest::of(b"layout"),
            checksums_digest: content.manifest.sha256,
            manifest: content.manifest.clone(),
        })
    }
}

/// The checksum of a unit whose one fragment has this one.
fn checksum_of_one(fragment: u64) -> u64 {
    combine(ballast_transfer::checksum(&[]), fragment, 1)
}
