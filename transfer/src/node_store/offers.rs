//! Imports with several writers: what participants offer is noted, compared with what is in memory, and answered. The rules
//! are in `offers`.

use ballast_schemas::frame::{OfferedFragment, Offers};
use ballast_schemas::{Bitmap, InstanceId, SessionId, TokenPart};

use super::import::{Order, Writer};
use super::instance::Instance;
use super::{NodeStore, lock};
use crate::error::StoreError;
use crate::offers::{FragmentPlace, OfferVerdict};

/// A participant's write under way.
pub(super) struct PartWrite<'a> {
    instance: &'a Instance,
    place: FragmentPlace,
}

impl<'a> PartWrite<'a> {
    /// Leave to write bytes of a unit; without a participant only into an import that has none.
    pub(super) fn begin(
        instance: &'a Instance,
        part: Option<&TokenPart>,
        unit: u32,
        offset: u64,
        bytes: u64,
    ) -> Result<Option<Self>, StoreError> {
        let mut writes = lock(&instance.writes);
        match part {
            Some(part) => {
                let place = writes.offers.begin_write(&instance.id, part, unit, offset, bytes)?;
                Ok(Some(Self { instance, place }))
            }
            None if writes.offers.is_empty() => Ok(None),
            None => Err(StoreError::Invalid(format!(
                "{} is written by its participants; join the import as one of them",
                instance.id
            ))),
        }
    }
}

impl Drop for PartWrite<'_> {
    fn drop(&mut self) {
        lock(&self.instance.writes).offers.end_write(self.place);
    }
}

impl NodeStore {
    /// Takes note of the fragments that a participant holds, and answers which of them it has to send. What it has sent is
    /// compared with its checksum here, so that offering again says what has arrived.
    ///
    /// # Errors
    /// When another participant offers other bytes for one of them (all others are noted), a later run of the participant has
    /// come, or a fragment does not fit.
    pub fn offer(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        part: &TokenPart,
        fragments: &[OfferedFragment],
    ) -> Result<Bitmap, StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        for own in fragments {
            instance.target(own.unit, own.offset, own.bytes)?;
            if own.bytes == 0 {
                return Err(StoreError::Invalid(format!("an empty fragment of unit {} of {id} is offered", own.unit)));
            }
        }
        // The bytes may be read for as long as nobody deletes or seals them.
        let _reading = match Writer::enter(&instance) {
            Ok(reading) => reading,
            Err(StoreError::Sealed { .. }) => return instance.compare_sealed(fragments),
            Err(error) => return Err(error),
        };
        let mut wanted = Bitmap::empty(fragments.len() as u32);
        let mut looks = Vec::new();
        {
            let mut writes = lock(&instance.writes);
            let own = writes.offers.enter(id, part)?;
            let mut refused = None;
            for (at, fragment) in (0..).zip(fragments) {
                match writes.offers.offer(id, own, fragment) {
                    Ok(OfferVerdict::Nothing) => {}
                    Ok(OfferVerdict::Look(count)) => looks.push((at, count, writes.complete(fragment, &instance))),
                    Ok(OfferVerdict::Send) => wanted.set(at, true),
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
            refused.map_or(Ok(()), Err)?;
        }
        for (at, count, known) in looks {
            let fragment = &fragments[at as usize];
            let found = match known {
                Some(found) => found,
                None => instance.checksum_of_range(fragment.unit, fragment.offset, fragment.bytes)?,
            };
            let right = lock(&instance.writes).offers.note((fragment.unit, fragment.offset), count, found);
            wanted.set(at, !right);
        }
        Ok(wanted)
    }

    /// What the participants of an import have offered so far, or only what they do not agree on.
    ///
    /// # Errors
    /// When nothing of the import is here, or another session's.
    pub fn offers(&self, id: &InstanceId, session_id: &SessionId, conflicts: bool) -> Result<Offers, StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        let listed = lock(&instance.writes).offers.list(conflicts);
        Ok(listed)
    }
}

impl Instance {
    /// After the seal nothing is wanted: a run that comes late holds what is here, or something else.
    fn compare_sealed(&self, fragments: &[OfferedFragment]) -> Result<Bitmap, StoreError> {
        let _queue = lock(&self.queue);
        let sealed = self.sealed()?;
        drop(sealed);
        for own in fragments {
            if !lock(&self.state).units.hot().get(own.unit) {
                return Err(StoreError::NotHere { instance: self.id.clone(), unit: own.unit });
            }
            if self.checksum_of_range(own.unit, own.offset, own.bytes)? != own.crc64 {
                return Err(StoreError::Sealed { instance: self.id.clone() });
            }
        }
        Ok(Bitmap::empty(fragments.len() as u32))
    }
}

impl super::import::Writes {
    /// The checksum of a fragment that is a whole unit and came in order.
    fn complete(&self, fragment: &OfferedFragment, instance: &Instance) -> Option<u64> {
        let extent = instance.layout.extent(fragment.unit)?;
        match &self.units.get(fragment.unit as usize)?.order {
            Order::Complete(found) if fragment.offset == 0 && fragment.bytes == extent.bytes => Some(*found),
            _ => None,
        }
    }
}
