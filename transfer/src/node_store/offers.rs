//! Imports with several writers: what participants offer is noted, compared with what is in memory, and answered. The rules
//! are in `offers`.

use ballast_schemas::frame::{OfferedFragment, Offers};
use ballast_schemas::{Bitmap, ErrorCode, InstanceId, SessionId, TokenPart};

use super::import::{Order, Writer, Writes};
use super::instance::Instance;
use super::{NodeStore, lock};
use crate::budget::Charge;
use crate::error::StoreError;
use crate::offers::{FragmentPlace, OfferVerdict, PartOffers};

/// Offers take memory of the node, which is not counted up to this much and this share of the reserved bytes: an import that
/// just fits is not refused for its offers.
const FREE_BYTES: u64 = 64 << 10;
const FREE_SHARE: u64 = 64;
/// What is beyond is charged in steps of this much.
const CHARGE_BYTES: u64 = 64 << 10;

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
        // Of an import that is over nothing else matters.
        drop(Writer::enter(instance)?);
        let mut writes = lock(&instance.writes);
        match part {
            Some(part) => {
                let place = writes.offers.begin_write(&instance.id, part, unit, offset, bytes)?;
                Ok(Some(Self { instance, place }))
            }
            None if writes.offers.is_empty() => {
                writes.offers.note_other_writer();
                Ok(None)
            }
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
    /// come, a fragment does not fit, or there are more than memory has room for.
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
        match self.offer_open(&instance, part, fragments) {
            Err(StoreError::Sealed { .. }) => instance.compare_sealed(part, fragments),
            answered => answered,
        }
    }

    /// Fails as [`StoreError::Sealed`] when the import ends meanwhile.
    fn offer_open(
        &self,
        instance: &Instance,
        part: &TokenPart,
        fragments: &[OfferedFragment],
    ) -> Result<Bitmap, StoreError> {
        let mut wanted = Bitmap::empty(fragments.len() as u32);
        let mut looks = Vec::new();
        {
            let _open = Writer::enter(instance)?;
            let mut writes = lock(&instance.writes);
            let own = writes.offers.enter(&instance.id, part)?;
            let mut refused = None;
            for (at, fragment) in (0..).zip(fragments) {
                self.pay(instance, &mut writes)?;
                match writes.offers.offer(&instance.id, own, fragment) {
                    Ok(OfferVerdict::Nothing) => {}
                    Ok(OfferVerdict::Look(count)) => looks.push((at, count, writes.complete(fragment, instance))),
                    Ok(OfferVerdict::Send) => wanted.set(at, true),
                    Err(error @ StoreError::TooManyOffers { .. }) => return Err(error),
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
            refused.map_or(Ok(()), Err)?;
        }
        for (at, count, known) in looks {
            let fragment = &fragments[at as usize];
            let found = match known {
                Some(found) => Some(found),
                None => instance.checksum_of_range(fragment.unit, fragment.offset, fragment.bytes)?,
            };
            // Whoever seals or deletes does not wait while this reads; then what was found is worth nothing.
            let _open = Writer::enter(instance)?;
            let note = |found| lock(&instance.writes).offers.note((fragment.unit, fragment.offset), count, found);
            wanted.set(at, !found.is_some_and(note));
        }
        Ok(wanted)
    }

    /// Has the memory budget know of one more offer, beyond what is in proportion to the bytes that are reserved anyway.
    fn pay(&self, instance: &Instance, writes: &mut Writes) -> Result<(), StoreError> {
        let free = instance.layout.padded_bytes() / FREE_SHARE + FREE_BYTES;
        let cost = (writes.offers.cost_bytes() + PartOffers::COST_BYTES).saturating_sub(free);
        let paid = writes.offers_charge.as_ref().map_or(0, Charge::bytes);
        if cost > paid {
            let more = self.memory.reserve(CHARGE_BYTES)?;
            match &mut writes.offers_charge {
                Some(charge) => charge.absorb(more),
                charge @ None => *charge = Some(more),
            }
        }
        Ok(())
    }

    /// What the participants of an import have offered so far, or only what they do not agree on.
    ///
    /// # Errors
    /// When nothing of the import is here, it is another session's, or it is sealed.
    pub fn offers(&self, id: &InstanceId, session_id: &SessionId, conflicts: bool) -> Result<Offers, StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        let _open = Writer::enter(&instance)?;
        let listed = lock(&instance.writes).offers.list(conflicts);
        Ok(listed)
    }
}

impl Instance {
    /// After the seal nothing is wanted: a run that comes late holds what is here, or something else.
    fn compare_sealed(&self, part: &TokenPart, fragments: &[OfferedFragment]) -> Result<Bitmap, StoreError> {
        for (at, own) in fragments.iter().enumerate() {
            // One by one: an effect that waits for its turn waits for no more than this. A seal under way is waited for.
            let _queue = lock(&self.queue);
            if at == 0 {
                self.sealed()?;
                lock(&self.writes).offers.enter(&self.id, part)?;
            }
            if !lock(&self.state).units.hot().get(own.unit) {
                return Err(StoreError::NotHere { instance: self.id.clone(), unit: own.unit });
            }
            if self.checksum_of_range(own.unit, own.offset, own.bytes)? != Some(own.crc64) {
                return Err(StoreError::Fragment {
                    code: ErrorCode::Conflict,
                    instance: self.id.clone(),
                    unit: own.unit,
                    offset: own.offset,
                    bytes: own.bytes,
                    participants: vec![part.participant.clone()],
                    why: "are sealed with other content, which can not change any more".to_owned(),
                });
            }
        }
        Ok(Bitmap::empty(fragments.len() as u32))
    }
}

impl Writes {
    /// The checksum of a fragment that is a whole unit and came in order.
    fn complete(&self, fragment: &OfferedFragment, instance: &Instance) -> Option<u64> {
        let extent = instance.layout.extent(fragment.unit)?;
        match &self.units.get(fragment.unit as usize)?.order {
            Order::Complete(found) if fragment.offset == 0 && fragment.bytes == extent.bytes => Some(*found),
            _ => None,
        }
    }
}
