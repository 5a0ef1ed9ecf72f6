//! The rules of imports with several writers (ARCHITECTURE.md, Import sessions), without any I/O: what each participant
//! offers, who brings which fragment, and what is here of it. A fragment that several participants hold is sent by the one that
//! offered it first, and all of them have to offer the same bytes.

use std::collections::BTreeMap;

use ballast_schemas::frame::{FragmentOffer, IMPORT_OFFERS_MAX, OfferedFragment, Offers};
use ballast_schemas::manifest::FRAGMENT_ALIGN_BYTES;
use ballast_schemas::{InstanceId, ParticipantId, TokenPart};

use crate::checksum::{checksum, combine};
use crate::error::StoreError;

/// Fragments are packed at multiples of this many bytes.
const GAP_BYTES_MAX: usize = FRAGMENT_ALIGN_BYTES as usize;

/// Where a fragment lies: its unit, and its first byte inside it.
pub type FragmentPlace = (u32, u64);

/// Everything that the participants of one import have offered to a node. Lost with its process, like all of an import before
/// its seal.
#[derive(Debug, Default)]
pub struct PartOffers {
    participants: Vec<ParticipantId>,
    /// The highest that each of them has come with.
    epochs: Vec<u64>,
    fragments: BTreeMap<FragmentPlace, Fragment>,
    /// Offers of all fragments.
    count: usize,
}

#[derive(Debug)]
struct Fragment {
    bytes: u64,
    /// Participants with their checksums; the first one brings the bytes.
    offers: Vec<(u32, u64)>,
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
    fn wanted(&self) -> u64 {
        self.offers.first().map_or(0, |(_, crc64)| *crc64)
    }

    fn is_held(&self) -> bool {
        self.here == Here::Checked(self.wanted())
    }

    /// A participant whose bytes are others than those of the first one, which is not `own`.
    fn differs_from(&self, own: (u32, u64)) -> Option<u32> {
        self.offers
            .iter()
            .find(|(participant, crc64)| *participant != own.0 && *crc64 != own.1)
            .map(|(other, _)| *other)
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

    /// The number of a participant, unless a later run of it has come.
    ///
    /// # Errors
    /// [`StoreError::Superseded`].
    pub fn enter(&mut self, id: &InstanceId, part: &TokenPart) -> Result<u32, StoreError> {
        let at = match self.participants.iter().position(|own| *own == part.participant) {
            Some(at) => at,
            None => {
                self.participants.push(part.participant.clone());
                self.epochs.push(part.epoch);
                self.participants.len() - 1
            }
        };
        let highest = &mut self.epochs[at];
        if part.epoch < *highest {
            let (instance, participant) = (id.clone(), part.participant.clone());
            return Err(StoreError::Superseded { instance, participant, expected: *highest, found: part.epoch });
        }
        *highest = part.epoch;
        Ok(at as u32)
    }

    fn name(&self, participant: u32) -> ParticipantId {
        self.participants[participant as usize].clone()
    }

    /// A participant, by its number, holds a fragment with this checksum.
    ///
    /// # Errors
    /// [`StoreError::OffersDiffer`] when another one holds other bytes, which is noted all the same; otherwise when the
    /// fragment contradicts others.
    pub fn offer(&mut self, id: &InstanceId, own: u32, offered: &OfferedFragment) -> Result<OfferVerdict, StoreError> {
        let place = (offered.unit, offered.offset);
        let end = offered.offset + offered.bytes;
        if !self.fragments.contains_key(&place) {
            let before = self.fragments.range((offered.unit, 0)..place).next_back();
            let after = self.fragments.range(place..(offered.unit, end)).next();
            let overlaps = before.filter(|((_, offset), own)| offset + own.bytes > offered.offset).or(after);
            if let Some(((_, offset), other)) = overlaps {
                let other = self.name(other.offers.first().map_or(own, |(first, _)| *first));
                return Err(StoreError::Invalid(format!(
                    "the fragment of {} bytes at {} of unit {} of {id} overlaps the one at {offset} that {other} offered",
                    offered.bytes, offered.offset, offered.unit
                )));
            }
        }
        let count = self.count;
        let fragment = self.fragments.entry(place).or_insert_with(|| Fragment {
            bytes: offered.bytes,
            offers: Vec::new(),
            here: Here::Nothing,
            writers: 0,
            writes: 0,
        });
        if fragment.bytes != offered.bytes {
            let found = fragment.bytes;
            return Err(StoreError::Invalid(format!(
                "the fragment at {} of unit {} of {id} was offered with {found} bytes before, now with {}",
                offered.offset, offered.unit, offered.bytes
            )));
        }
        match fragment.offers.iter_mut().find(|(participant, _)| *participant == own) {
            Some((_, crc64)) => *crc64 = offered.crc64,
            None if count >= IMPORT_OFFERS_MAX => {
                return Err(StoreError::Invalid(format!(
                    "the participants of {id} offer more than {IMPORT_OFFERS_MAX} fragments; let fewer replicas offer theirs"
                )));
            }
            None => {
                fragment.offers.push((own, offered.crc64));
                self.count += 1;
            }
        }
        if let Some(other) = fragment.differs_from((own, offered.crc64)) {
            let participants = [self.name(other.min(own)), self.name(other.max(own))];
            return Err(StoreError::OffersDiffer {
                instance: id.clone(),
                unit: offered.unit,
                offset: offered.offset,
                participants,
            });
        }
        let brings_it = fragment.offers.first().is_some_and(|(first, _)| *first == own);
        Ok(match fragment.here {
            _ if fragment.is_held() || !brings_it => OfferVerdict::Nothing,
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
        let found = self.fragments.range_mut((unit, 0)..=(unit, offset)).next_back();
        let within = found.filter(|((_, start), fragment)| {
            fragment.offers.first().is_some_and(|(first, _)| *first == own)
                && offset.saturating_add(bytes) <= start + fragment.bytes
        });
        let Some((place, fragment)) = within else {
            return Err(StoreError::Invalid(format!(
                "{} may not write {bytes} bytes at {offset} of unit {unit} of {id}: it has not offered them, or another participant brings them",
                part.participant
            )));
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
        fragment.is_held()
    }

    /// The checksum of a unit's extent, where all of it is here and was compared: nobody but participants has written to it,
    /// so that zeros lie between its fragments.
    #[must_use]
    pub fn checksum_of(&self, unit: u32, extent_bytes: u64) -> Option<u64> {
        let mut sum = checksum(&[]);
        let mut end = 0;
        for ((_, offset), fragment) in self.fragments.range((unit, 0)..=(unit, u64::MAX)) {
            let Here::Checked(found) = fragment.here else { return None };
            let gap = usize::try_from(offset - end).ok().filter(|gap| *gap < GAP_BYTES_MAX)?;
            sum = combine(sum, checksum(&[0; GAP_BYTES_MAX][..gap]), gap as u64);
            sum = combine(sum, found, fragment.bytes);
            end = offset + fragment.bytes;
        }
        (end == extent_bytes && end > 0).then_some(sum)
    }

    /// The fragments, or only those that participants do not agree on.
    #[must_use]
    pub fn list(&self, conflicts: bool) -> Offers {
        let mut listed = Offers { participants: self.participants.clone(), fragments: Vec::new() };
        for ((unit, offset), own) in &self.fragments {
            let Some(&(participant, crc64)) = own.offers.first() else { continue };
            let differs = own.differs_from((participant, crc64));
            if !conflicts || differs.is_some() {
                let fragment = OfferedFragment { unit: *unit, offset: *offset, bytes: own.bytes, crc64 };
                listed.fragments.push(FragmentOffer { fragment, participant, held: own.is_held(), differs });
            }
        }
        listed
    }
}
