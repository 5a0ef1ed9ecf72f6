//! The rules of imports with several writers (ARCHITECTURE.md, Import sessions), without any I/O: what each participant
//! offers, who brings which fragment, and what is here of it. A fragment that several participants hold is sent by the one that
//! offered it first, and all of them have to offer the same bytes. Another run of a participant withdraws what the earlier
//! one has offered: who offers such a fragment next brings it.

use std::collections::BTreeMap;

use ballast_schemas::frame::{FragmentOffer, IMPORT_OFFERS_MAX, OfferedFragment, Offers};
use ballast_schemas::manifest::FRAGMENT_ALIGN_BYTES;
use ballast_schemas::{ErrorCode, InstanceId, ParticipantId, TokenPart};

use crate::checksum::of_parts;
use crate::error::StoreError;

/// What a fragment and an offer of it cost in memory, about.
const FRAGMENT_COST_BYTES: u64 = 192;
const OFFER_COST_BYTES: u64 = 32;

/// Where a fragment lies: its unit, and its first byte inside it.
pub type FragmentPlace = (u32, u64);

/// Everything that the participants of one import have offered to a node. Lost with its process, like all of an import before
/// its seal.
#[derive(Debug, Default)]
pub struct PartOffers {
    participants: Vec<Participant>,
    fragments: BTreeMap<FragmentPlace, Fragment>,
    /// Offers of all fragments.
    count: usize,
    /// Bytes were written that no fragment accounts for.
    others_wrote: bool,
}

#[derive(Debug)]
struct Participant {
    id: ParticipantId,
    /// The highest that it has come with.
    epoch: u64,
    /// Counts its epochs. An offer of another run is withdrawn.
    run: u32,
}

#[derive(Clone, Copy, Debug)]
struct Offer {
    participant: u32,
    run: u32,
    crc64: u64,
}

impl Offer {
    fn stands(&self, participants: &[Participant]) -> bool {
        participants.get(self.participant as usize).is_some_and(|own| own.run == self.run)
    }
}

#[derive(Debug)]
struct Fragment {
    bytes: u64,
    /// The first one's participant brings the bytes; if it is withdrawn, whoever offers next.
    offers: Vec<Offer>,
    here: Here,
    /// Writes that go on.
    writers: u32,
    /// Counts the writes: whoever reads the bytes back notices one that came in between.
    writes: u64,
}

/// What of a fragment is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Here {
    Nothing,
    /// Bytes that nobody has compared since.
    Unknown,
    /// All of it, with this checksum.
    Checked(u64),
}

impl Fragment {
    /// The offer of the participant that brings it.
    fn bringer(&self, participants: &[Participant]) -> Option<&Offer> {
        self.offers.first().filter(|first| first.stands(participants))
    }
}

/// What a participant has to do about a fragment that it offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfferVerdict {
    /// Nothing: it is here, or another participant brings it.
    Nothing,
    /// It depends on the bytes that are here, as of this many writes: see [`PartOffers::note`].
    Look(u64),
    /// To send it.
    Send,
}

impl PartOffers {
    /// Whether no participant has come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.participants.is_empty()
    }

    /// Memory that one more offer may take.
    pub(crate) const COST_BYTES: u64 = FRAGMENT_COST_BYTES + OFFER_COST_BYTES;

    /// Memory that the offers take, about.
    pub(crate) fn cost_bytes(&self) -> u64 {
        self.fragments.len() as u64 * FRAGMENT_COST_BYTES + self.count as u64 * OFFER_COST_BYTES
    }

    /// Somebody who is no participant writes into the import: what no fragment covers may be anything from now on.
    pub(crate) fn note_other_writer(&mut self) {
        self.others_wrote = true;
    }

    /// The import is sealed: who may speak for a participant is all that still matters.
    #[must_use]
    pub(crate) fn closed(self) -> Self {
        Self { participants: self.participants, ..Self::default() }
    }

    /// The number of a participant, unless a later run of it has come. A later one than before withdraws what the earlier one
    /// has offered.
    ///
    /// # Errors
    /// [`StoreError::Superseded`].
    pub fn enter(&mut self, id: &InstanceId, part: &TokenPart) -> Result<u32, StoreError> {
        let at = match self.participants.iter().position(|own| own.id == part.participant) {
            Some(at) => at,
            None => {
                self.participants.push(Participant { id: part.participant.clone(), epoch: part.epoch, run: 0 });
                self.participants.len() - 1
            }
        };
        let own = &mut self.participants[at];
        if part.epoch < own.epoch {
            let (instance, participant) = (id.clone(), part.participant.clone());
            return Err(StoreError::Superseded { instance, participant, expected: own.epoch, found: part.epoch });
        }
        if part.epoch > own.epoch {
            own.epoch = part.epoch;
            own.run = own.run.wrapping_add(1);
        }
        Ok(at as u32)
    }

    fn names(&self, numbers: impl IntoIterator<Item = u32>) -> Vec<ParticipantId> {
        let mut names: Vec<ParticipantId> =
            numbers.into_iter().map(|number| self.participants[number as usize].id.clone()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// A fragment that is in the way of this one: another cut of the same bytes.
    fn in_the_way(&self, offered: &OfferedFragment) -> Option<(FragmentPlace, &Fragment)> {
        let (unit, place) = (offered.unit, (offered.unit, offered.offset));
        let end = offered.offset.saturating_add(offered.bytes);
        if let Some(same) = self.fragments.get(&place) {
            return (same.bytes != offered.bytes).then_some((place, same));
        }
        let before = self.fragments.range((unit, 0)..place).next_back();
        let after = self.fragments.range(place..(unit, end)).next();
        let overlaps = before.filter(|((_, offset), own)| offset + own.bytes > offered.offset).or(after);
        overlaps.map(|(place, own)| (*place, own))
    }

    /// A participant, by its number, holds a fragment with this checksum.
    ///
    /// # Errors
    /// [`StoreError::OffersDiffer`] when another one holds other bytes, which is noted all the same; otherwise when the
    /// fragment contradicts others, or there are too many; nothing is noted then.
    pub fn offer(&mut self, id: &InstanceId, own: u32, offered: &OfferedFragment) -> Result<OfferVerdict, StoreError> {
        let place = (offered.unit, offered.offset);
        let refused = |code, participants, why| {
            let (instance, OfferedFragment { unit, offset, bytes, .. }) = (id.clone(), *offered);
            StoreError::Fragment { code, instance, unit, offset, bytes, participants, why }
        };
        if !offered.offset.is_multiple_of(FRAGMENT_ALIGN_BYTES) {
            let why = format!("do not begin at a multiple of {FRAGMENT_ALIGN_BYTES} bytes, as fragments do");
            return Err(refused(ErrorCode::InvalidArgument, self.names([own]), why));
        }
        while let Some((at, other)) = self.in_the_way(offered) {
            if let Some(holds) = other.offers.iter().find(|offer| offer.stands(&self.participants)) {
                let participants = self.names([holds.participant, own]);
                let other_name = &self.participants[holds.participant as usize].id;
                let why = format!("overlap the {} bytes at {} that {other_name} has offered", other.bytes, at.1);
                return Err(refused(ErrorCode::Conflict, participants, why));
            }
            if other.writers > 0 {
                let why = "are still being written by a run that was replaced; try again".to_owned();
                return Err(refused(ErrorCode::Busy, self.names([own]), why));
            }
            // Nobody holds it any more, but its bytes stay where they are.
            let (was_written, offers) = (other.writes > 0, other.offers.len());
            self.others_wrote |= was_written;
            self.count -= offers;
            self.fragments.remove(&at);
        }
        let found = self.fragments.get(&place);
        let is_new = found.is_none_or(|found| found.offers.iter().all(|offer| offer.participant != own));
        if is_new && self.count >= IMPORT_OFFERS_MAX {
            return Err(StoreError::TooManyOffers { instance: id.clone() });
        }
        let fragment = self.fragments.entry(place).or_insert_with(|| Fragment {
            bytes: offered.bytes,
            offers: Vec::with_capacity(1),
            here: Here::Nothing,
            writers: 0,
            writes: 0,
        });
        self.count -= fragment.offers.len();
        let brings_it = fragment.bringer(&self.participants).is_none_or(|first| first.participant == own);
        fragment.offers.retain(|offer| offer.participant != own && offer.stands(&self.participants));
        let offer = Offer { participant: own, run: self.participants[own as usize].run, crc64: offered.crc64 };
        let at = if brings_it { 0 } else { fragment.offers.len() };
        fragment.offers.insert(at, offer);
        self.count += fragment.offers.len();

        let fragment = &self.fragments[&place];
        if let Some(other) = fragment.offers.iter().find(|other| other.crc64 != offered.crc64) {
            let participants = self.names([other.participant, own]);
            let (instance, unit, offset) = (id.clone(), offered.unit, offered.offset);
            return Err(StoreError::OffersDiffer { instance, unit, offset, participants });
        }
        Ok(match fragment.here {
            Here::Checked(found) if found == offered.crc64 => OfferVerdict::Nothing,
            _ if !brings_it => OfferVerdict::Nothing,
            Here::Unknown if fragment.writers == 0 => OfferVerdict::Look(fragment.writes),
            _ => OfferVerdict::Send,
        })
    }

    /// A participant begins to write bytes: they lie in a fragment that it brings.
    ///
    /// # Errors
    /// When it has not offered them, another participant brings them, or a later run of it has come.
    pub fn begin_write(
        &mut self,
        id: &InstanceId,
        part: &TokenPart,
        unit: u32,
        offset: u64,
        bytes: u64,
    ) -> Result<FragmentPlace, StoreError> {
        let own = self.enter(id, part)?;
        let participants = &self.participants;
        let found = self.fragments.range_mut((unit, 0)..=(unit, offset)).next_back();
        let within = found.filter(|((_, start), fragment)| {
            fragment.bringer(participants).is_some_and(|first| first.participant == own)
                && offset.saturating_add(bytes) <= start + fragment.bytes
        });
        let Some((place, fragment)) = within else {
            let own = part.participant.clone();
            let why = format!("are not {own}'s to write: it has not offered them, or another participant brings them");
            let (instance, code) = (id.clone(), ErrorCode::InvalidArgument);
            return Err(StoreError::Fragment { code, instance, unit, offset, bytes, participants: vec![own], why });
        };
        fragment.here = Here::Unknown;
        fragment.writers += 1;
        fragment.writes += 1;
        Ok(*place)
    }

    /// The write has ended.
    pub fn end_write(&mut self, place: FragmentPlace) {
        if let Some(fragment) = self.fragments.get_mut(&place) {
            fragment.writers = fragment.writers.saturating_sub(1);
        }
    }

    /// Notes what the bytes of a fragment were found to be. Tells whether they are the wanted ones.
    pub fn note(&mut self, place: FragmentPlace, writes: u64, found: u64) -> bool {
        let Some(fragment) = self.fragments.get_mut(&place) else { return false };
        if fragment.writers > 0 || fragment.writes != writes {
            return false;
        }
        fragment.here = Here::Checked(found);
        fragment.bringer(&self.participants).is_some_and(|first| first.crc64 == found)
    }

    /// The checksum of a unit's extent, where all of it is here and was compared, and nobody has written between its
    /// fragments: zeros lie there.
    #[must_use]
    pub fn checksum_of(&self, unit: u32, extent_bytes: u64) -> Option<u64> {
        if self.others_wrote {
            return None;
        }
        let parts = self.fragments.range((unit, 0)..=(unit, u64::MAX)).map(|((_, offset), fragment)| {
            let Here::Checked(found) = fragment.here else { return None };
            Some((*offset, fragment.bytes, found))
        });
        let (sum, end) = of_parts(parts.collect::<Option<Vec<_>>>()?)?;
        (end == extent_bytes && end > 0).then_some(sum)
    }

    /// The fragments, or only those that participants do not agree on.
    #[must_use]
    pub fn list(&self, conflicts: bool) -> Offers {
        let participants = self.participants.iter().map(|own| own.id.clone()).collect();
        let mut listed = Offers { participants, fragments: Vec::new() };
        for ((unit, offset), own) in &self.fragments {
            let mut standing = own.offers.iter().filter(|offer| offer.stands(&self.participants));
            let Some(&Offer { participant, crc64, .. }) = standing.next() else { continue };
            let differs = standing.find(|other| other.crc64 != crc64).map(|other| other.participant);
            if !conflicts || differs.is_some() {
                let fragment = OfferedFragment { unit: *unit, offset: *offset, bytes: own.bytes, crc64 };
                let held = own.here == Here::Checked(crc64);
                listed.fragments.push(FragmentOffer { fragment, participant, held, differs });
            }
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::ParticipantId;

    use super::*;
    use crate::checksum::checksum;
    use crate::testing::instance;

    fn rank(n: u32, epoch: u64) -> TokenPart {
        TokenPart { participant: ParticipantId::new(format!("rank{n}")).unwrap(), epoch }
    }

    fn fragment(offset: u64, bytes: u64, crc64: u64) -> OfferedFragment {
        OfferedFragment { unit: 0, offset, bytes, crc64 }
    }

    fn offer(offers: &mut PartOffers, part: &TokenPart, own: &OfferedFragment) -> Result<OfferVerdict, StoreError> {
        let number = offers.enter(&instance(1), part)?;
        offers.offer(&instance(1), number, own)
    }

    /// Writes it and has it compared.
    fn bring(offers: &mut PartOffers, part: &TokenPart, own: &OfferedFragment) -> bool {
        let place = offers.begin_write(&instance(1), part, own.unit, own.offset, own.bytes).unwrap();
        offers.end_write(place);
        let Ok(OfferVerdict::Look(writes)) = offer(offers, part, own) else { return false };
        offers.note(place, writes, own.crc64)
    }

    #[test]
    fn what_a_run_offered_and_did_not_send_is_brought_by_who_offers_it_next() {
        let (mut offers, held) = (PartOffers::default(), fragment(0, 600, 7));
        assert_eq!(offer(&mut offers, &rank(0, 1), &held).unwrap(), OfferVerdict::Send);
        assert_eq!(offer(&mut offers, &rank(1, 1), &held).unwrap(), OfferVerdict::Nothing);
        // The next run of the first one holds something else: nobody has to wait for it.
        offer(&mut offers, &rank(0, 2), &fragment(768, 10, 1)).unwrap();
        assert_eq!(offer(&mut offers, &rank(2, 1), &held).unwrap(), OfferVerdict::Send);
        assert_eq!(offer(&mut offers, &rank(0, 2), &held).unwrap(), OfferVerdict::Nothing);
        assert_eq!(offer(&mut offers, &rank(1, 1), &held).unwrap(), OfferVerdict::Nothing);
        assert!(bring(&mut offers, &rank(2, 1), &held));
        assert_eq!(offer(&mut offers, &rank(1, 2), &held).unwrap(), OfferVerdict::Nothing, "it is here");
        let listed = offers.list(false).fragments;
        assert_eq!((listed.len(), listed[0].participant, listed[0].held), (2, 2, true));
    }

    #[test]
    fn a_run_that_comes_again_goes_on_bringing_what_it_brought() {
        let (mut offers, held) = (PartOffers::default(), fragment(0, 600, 7));
        offer(&mut offers, &rank(0, 1), &held).unwrap();
        offer(&mut offers, &rank(1, 1), &held).unwrap();
        assert_eq!(offer(&mut offers, &rank(0, 2), &held).unwrap(), OfferVerdict::Send);
        assert!(bring(&mut offers, &rank(0, 2), &held));
        assert_eq!(offers.count, 2);
    }

    #[test]
    fn wrong_bytes_of_a_run_that_was_replaced_bind_nobody() {
        let (mut offers, right) = (PartOffers::default(), fragment(0, 600, 7));
        offer(&mut offers, &rank(0, 1), &fragment(0, 600, 8)).unwrap();
        let refused = offer(&mut offers, &rank(1, 1), &right).unwrap_err();
        assert!(matches!(refused, StoreError::OffersDiffer { .. }), "{refused}");
        assert_eq!(offers.list(true).fragments.len(), 1);
        offers.enter(&instance(1), &rank(0, 2)).unwrap();
        assert!(offers.list(true).fragments.is_empty());
        assert_eq!(offer(&mut offers, &rank(1, 1), &right).unwrap(), OfferVerdict::Send);
        assert!(bring(&mut offers, &rank(1, 1), &right));
    }

    #[test]
    fn another_cut_of_the_same_bytes_names_both_until_it_is_withdrawn() {
        let mut offers = PartOffers::default();
        let stray = fragment(0, 700, 1);
        offer(&mut offers, &rank(1, 1), &stray).unwrap();
        assert!(bring(&mut offers, &rank(1, 1), &stray));
        for own in [fragment(0, 600, 7), fragment(512, 600, 7)] {
            let refused = offer(&mut offers, &rank(0, 1), &own).unwrap_err().to_error();
            assert_eq!(refused.code, ErrorCode::Conflict, "{refused}");
            assert_eq!(refused.details["participants"], serde_json::json!(["rank0", "rank1"]));
            assert_eq!((&refused.details["unit"], &refused.details["offset"]), (&0.into(), &own.offset.into()));
        }
        offers.enter(&instance(1), &rank(1, 2)).unwrap();
        let own = fragment(0, 600, 7);
        assert_eq!(offer(&mut offers, &rank(0, 1), &own).unwrap(), OfferVerdict::Send);
        assert!(bring(&mut offers, &rank(0, 1), &own));
        assert_eq!(offers.checksum_of(0, 600), None, "bytes of the other cut may lie behind it");
        assert_eq!((offers.count, offers.fragments.len()), (1, 1));
    }

    #[test]
    fn bytes_that_a_run_that_was_replaced_still_writes_are_not_cut_otherwise() {
        let mut offers = PartOffers::default();
        offer(&mut offers, &rank(0, 1), &fragment(0, 700, 1)).unwrap();
        let place = offers.begin_write(&instance(1), &rank(0, 1), 0, 0, 700).unwrap();
        let other = fragment(0, 600, 7);
        assert_eq!(offer(&mut offers, &rank(0, 2), &other).unwrap_err().code(), ErrorCode::Busy);
        offers.end_write(place);
        assert_eq!(offer(&mut offers, &rank(0, 2), &other).unwrap(), OfferVerdict::Send);
    }

    #[test]
    fn offers_beyond_the_limit_and_those_that_are_refused_leave_nothing() {
        let mut offers = PartOffers::default();
        offer(&mut offers, &rank(0, 1), &fragment(0, 10, 1)).unwrap();
        assert_eq!(
            offer(&mut offers, &rank(0, 1), &fragment(300, 1, 1)).unwrap_err().code(),
            ErrorCode::InvalidArgument
        );
        offers.count = IMPORT_OFFERS_MAX;
        for own in [fragment(512, 10, 1), fragment(0, 10, 1)] {
            let refused = offer(&mut offers, &rank(1, 1), &own).unwrap_err();
            assert!(matches!(refused, StoreError::TooManyOffers { .. }), "{refused}");
        }
        assert_eq!((offers.fragments.len(), offers.count), (1, IMPORT_OFFERS_MAX));
        assert_eq!(offer(&mut offers, &rank(0, 1), &fragment(0, 10, 2)).unwrap(), OfferVerdict::Send);
    }

    #[test]
    fn a_unit_whose_gaps_somebody_else_may_have_written_has_no_checksum() {
        let mut offers = PartOffers::default();
        let bytes = [vec![1; 600], vec![0; 168], vec![2; 10]].concat();
        for (offset, length) in [(0_usize, 600), (768, 10)] {
            let own = fragment(offset as u64, length as u64, checksum(&bytes[offset..offset + length]));
            offer(&mut offers, &rank(0, 1), &own).unwrap();
            assert!(bring(&mut offers, &rank(0, 1), &own));
        }
        assert_eq!(offers.checksum_of(0, 778), Some(checksum(&bytes)));
        offers.note_other_writer();
        assert_eq!(offers.checksum_of(0, 778), None);
    }
}
