//! Imports: memory is reserved, units are written, the seal checks them and makes the manifest durable (RFC, Import
//! and READY Publication). Every byte goes through the node: nobody else ever writes into a segment.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use ballast_schemas::frame::{SourceRange, Tier};
use ballast_schemas::manifest::{Manifest, ManifestError};
use ballast_schemas::{
    AffinityIndex, Bitmap, InstanceId, LogPosition, ManifestRef, Receipt, SessionId, TokenPart, hash_list,
};
use bytes::Bytes;

use super::instance::{Instance, Sealed, Standing, State, cold_record, no_charges};
use super::offers::PartWrite;
use super::room::Room;
use super::{NodeStore, lock};
use crate::budget::Charge;
use crate::checksum::{RunningChecksum, checksum};
use crate::cold::Progress;
use crate::error::{Mismatch, StoreError};
use crate::folder::{OnPath, PathError, create_folder, remove_folder, replace_file, space, write_file};
use crate::guard::UnitStates;
use crate::instance_records::{InstanceRecords, LAYOUT, MANIFEST, SEAL, STATE};
use crate::layout::{Extent, GroupLayout};
use crate::memory_tier::instance_folder;
use crate::offers::PartOffers;
use crate::record::{self, LayoutRecord, SealRecord, StateRecord};
use crate::spares::Spare;

/// Bytes copied at a time: small enough to be checksummed and written while they are in a core's cache.
const COPY_BYTES: u64 = 1 << 20;
/// Longest wait of a seal for writers; each copies at most [`COPY_BYTES`] between two checks.
const WRITERS_WAIT: Duration = Duration::from_secs(30);

/// The answer to a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// Bytes of memory that the instance has reserved.
    pub reserved_bytes: u64,
    /// Whether the import has already ended; nothing needs to be written then.
    pub sealed: bool,
}

/// A manifest and what it says, ready to seal an import with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SealDocument {
    /// The canonical manifest.
    pub manifest: Bytes,
    /// What it says of itself.
    pub reference: ManifestRef,
    /// Its units.
    pub affinity: AffinityIndex,
}

impl SealDocument {
    fn parse(id: &InstanceId, manifest: Bytes) -> Result<Self, StoreError> {
        let refused = |error: ManifestError| StoreError::Manifest { instance: id.clone(), why: error.to_string() };
        let parsed = Manifest::parse(&manifest).map_err(refused)?;
        let reference = parsed.manifest_ref_of_group(&id.group_id).map_err(refused)?;
        Ok(Self { reference, affinity: parsed.affinity_index(), manifest })
    }
}

/// How far the units of an import were written.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    pub(super) units: Vec<UnitWrite>,
    room: Arc<Room>,
    /// Of an import with several writers: who brings what.
    pub(super) offers: PartOffers,
    /// For the memory that these take.
    pub(super) offers_charge: Option<Charge>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct UnitWrite {
    pub(super) order: Order,
    writers: u32,
    /// Two writers were at it at once.
    disturbed: bool,
}

/// What is known of a unit's checksum without reading it back.
#[derive(Clone, Debug, Default)]
pub(super) enum Order {
    /// Nothing: bytes came out of order, or not yet.
    #[default]
    Unknown,
    /// The checksum of the bytes so far, which all came in order.
    Running(Box<RunningChecksum>),
    /// All bytes came in order, and this is their checksum.
    Complete(u64),
}

impl Writes {
    pub(crate) fn new(layout: &GroupLayout) -> Self {
        Self {
            units: vec![UnitWrite::default(); layout.unit_count() as usize],
            room: Arc::new(Room::new(layout)),
            offers: PartOffers::default(),
            offers_charge: None,
        }
    }
}

impl NodeStore {
    /// Reserves memory for an import. Repeating it with the same session and sizes answers the same.
    ///
    /// # Errors
    /// When there is no room, the instance was deleted, or another session or layout has it.
    pub fn allocate(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        unit_sizes: &[u64],
    ) -> Result<Allocated, StoreError> {
        let layout = Arc::new(GroupLayout::new(unit_sizes)?);
        if lock(&self.tombstones).contains_key(id) {
            return Err(StoreError::Deleted { instance: id.clone() });
        }
        // Held throughout: two allocations of one instance are one.
        let mut instances = self.write_instances();
        if let Some(instance) = instances.get(id) {
            instance.check_served()?;
            instance.check_session(session_id)?;
            if instance.layout.digest() != layout.digest() {
                return Err(StoreError::OtherLayout {
                    instance: id.clone(),
                    expected: instance.layout.digest(),
                    found: layout.digest(),
                });
            }
            let state = lock(&instance.state);
            if state.deleting {
                return Err(StoreError::Deleting { instance: id.clone() });
            }
            return Ok(Allocated { reserved_bytes: state.memory_charge.bytes(), sealed: state.sealed.is_some() });
        }

        let bytes = layout.padded_bytes();
        let spares = self.memory.take_spares(&layout);
        let charge = self.memory.reserve(bytes)?;
        let folder = self.memory.instances().join(instance_folder(id));
        let ready_bytes: u64 = spares.iter().map(|(_, spare)| spare.ready_bytes()).sum();
        let mut free_bytes = space(&self.memory.instances())?.free_bytes + ready_bytes;
        if free_bytes < bytes {
            // Others have filled the file system.
            self.memory.give_up_spares();
            free_bytes = space(&self.memory.instances())?.free_bytes + ready_bytes;
        }
        if free_bytes < bytes {
            let message = format!("{free_bytes} bytes are free, {bytes} are needed");
            let source = std::io::Error::new(std::io::ErrorKind::StorageFull, message);
            return Err(StoreError::on_tier(Tier::Memory, PathError::new("reserve memory in", &folder, source)));
        }
        let record =
            LayoutRecord { instance: id.clone(), session_id: session_id.clone(), unit_sizes: unit_sizes.to_vec() };
        let made =
            create_folder(&folder).and_then(|()| write_file(&folder.join(LAYOUT), &record::encode(&record), false));
        if let Err(error) = made {
            // What was made is no instance; the error that matters is the first one.
            let _ = remove_folder(&folder);
            return Err(StoreError::on_tier(Tier::Memory, error));
        }
        let (_, cold_charge) = no_charges(&self.memory, self.cold.as_ref());
        let mut units = UnitStates::new(layout.unit_count());
        (0..layout.unit_count()).for_each(|unit| units.set_resident(unit));
        let state = State {
            standing: Standing::Serving,
            fence: LogPosition::ZERO,
            deleting: false,
            sealed: None,
            sealing: false,
            writers: 0,
            units,
            cold_lost: Bitmap::empty(layout.unit_count()),
            verified: Bitmap::empty(layout.unit_count()),
            memory_charge: charge,
            cold_charge,
        };
        let replica = self.cold.as_ref().map(|cold| cold.clone().replica(id, &layout));
        let instance = Instance::new(&self.memory, replica, &record, layout, state);
        instance.begin_with(spares);
        instance.guard(self.memory.objects());
        instances.insert(id.clone(), Arc::new(instance));
        Ok(Allocated { reserved_bytes: bytes, sealed: false })
    }

    /// Writes bytes into a unit of an import.
    ///
    /// # Errors
    /// When the bytes do not fit, the import has ended, or memory is full after all.
    pub fn write(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        unit: u32,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        self.write_as(id, session_id, None, unit, offset, bytes)
    }

    /// As [`NodeStore::write`], on behalf of a participant: into fragments that it brings.
    ///
    /// # Errors
    /// As there, and when it has not offered these bytes or a later run of it has come.
    pub fn write_as(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        part: Option<&TokenPart>,
        unit: u32,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        let extent = instance.target(unit, offset, bytes.len() as u64)?;
        let _leave = PartWrite::begin(&instance, part, unit, offset, bytes.len() as u64)?;
        let mut done = 0;
        for piece in bytes.chunks(COPY_BYTES as usize) {
            instance.write_piece(unit, extent, offset + done, piece)?;
            done += piece.len() as u64;
        }
        Ok(())
    }

    /// Writes ranges of a regular file (a memfd is one) into units of an import. Answers how many bytes.
    ///
    /// # Errors
    /// When the source is no regular file or too short, a range does not fit, the import has ended, or memory is full
    /// after all. Ranges before the failed one have been written.
    pub fn write_from_fd(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        part: Option<&TokenPart>,
        source: BorrowedFd<'_>,
        ranges: &[SourceRange],
        progress: &Progress,
    ) -> Result<u64, StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        let invalid = |reason: String| StoreError::Invalid(format!("the source descriptor {reason}"));
        let source = source.try_clone_to_owned().map(File::from).map_err(|error| invalid(error.to_string()))?;
        let metadata = source.metadata().map_err(|error| invalid(error.to_string()))?;
        if !metadata.is_file() {
            return Err(invalid("is not a regular file or memfd".to_owned()));
        }
        // Reading it can not fail with SIGBUS, unlike a mapping that its owner truncates, and what is checksummed is
        // exactly what is written, whatever its owner does to it meanwhile.
        let mut buffer = vec![0; COPY_BYTES as usize];
        let mut total = 0;
        for range in ranges {
            let extent = instance.target(range.unit, range.unit_offset, range.bytes)?;
            let _leave = PartWrite::begin(&instance, part, range.unit, range.unit_offset, range.bytes)?;
            let mut done = 0;
            while done < range.bytes {
                let piece = &mut buffer[..(range.bytes - done).min(COPY_BYTES) as usize];
                let at =
                    range.source_offset.checked_add(done).ok_or_else(|| invalid("has no such offset".to_owned()))?;
                source
                    .read_exact_at(piece, at)
                    .map_err(|error| invalid(format!("can not be read at byte {at} of {}: {error}", metadata.len())))?;
                instance.write_piece(range.unit, extent, range.unit_offset + done, piece)?;
                done += piece.len() as u64;
                progress.add_bytes(piece.len() as u64);
            }
            total += done;
            progress.add_units(1);
        }
        Ok(total)
    }

    /// The checksum of a unit of an import, as it was computed while its bytes were written in order.
    ///
    /// # Errors
    /// When they were not: somebody else writes the same unit.
    pub(crate) fn written_checksum(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        unit: u32,
    ) -> Result<u64, StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        match lock(&instance.writes).units.get(unit as usize).map(|write| &write.order) {
            Some(Order::Complete(sum)) => Ok(*sum),
            _ => Err(StoreError::Invalid(format!("unit {unit} of {id} is being written by somebody else as well"))),
        }
    }

    /// The checksum of the first `bytes` of a unit of an import, which were written in order and by nobody else.
    ///
    /// # Errors
    /// As [`NodeStore::written_checksum`].
    pub(crate) fn checksum_so_far(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        unit: u32,
        bytes: u64,
    ) -> Result<RunningChecksum, StoreError> {
        if bytes == 0 {
            return Ok(RunningChecksum::default());
        }
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        match lock(&instance.writes).units.get(unit as usize).map(|write| &write.order) {
            Some(Order::Running(sum)) if sum.bytes() == bytes => Ok((**sum).clone()),
            _ => Err(StoreError::Invalid(format!("unit {unit} of {id} is being written by somebody else as well"))),
        }
    }

    /// The layout of an import.
    ///
    /// # Errors
    /// When it is not here, or of another session.
    pub(crate) fn import_layout(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
    ) -> Result<Arc<GroupLayout>, StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        Ok(instance.layout.clone())
    }

    /// Ends an import: refuses further writers, compares every unit in memory with its checksum, and makes manifest and
    /// index durable. Repeating it with the same manifest answers the same.
    ///
    /// # Errors
    /// When a unit differs (it can be written again), the manifest is not this instance's, or the disk fails.
    pub fn seal(&self, id: &InstanceId, session_id: &SessionId, manifest: Bytes) -> Result<Receipt, StoreError> {
        self.seal_document(id, session_id, SealDocument::parse(id, manifest)?)
    }

    /// [`NodeStore::seal`] with a manifest that has been read.
    pub(crate) fn seal_document(
        &self,
        id: &InstanceId,
        session_id: &SessionId,
        document: SealDocument,
    ) -> Result<Receipt, StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        let _queue = lock(&instance.queue);
        {
            let mut state = lock(&instance.state);
            if state.deleting {
                return Err(StoreError::Deleting { instance: id.clone() });
            }
            if let Some(sealed) = &state.sealed {
                let (expected, found) = (sealed.0.seal.manifest.sha256, document.reference.sha256);
                if expected != found {
                    return Err(StoreError::OtherManifest { instance: id.clone(), expected, found });
                }
                instance.check_complete(&state)?;
                return Ok(self.receipt_of(&instance, sealed));
            }
            instance.check_document(&document)?;
            state.sealing = true;
            let (mut state, quiet) = instance.wait_until(state, WRITERS_WAIT, |state| state.writers == 0);
            if !quiet {
                state.sealing = false;
                return Err(StoreError::Busy { instance: id.clone(), units: state.writers });
            }
        }
        let sealed = instance.seal(document);
        let mut state = lock(&instance.state);
        state.sealing = false;
        let sealed = Arc::new(sealed?);
        for unit in 0..instance.layout.unit_count() {
            state.units.set_hot(unit);
        }
        state.sealed = Some(sealed.clone());
        drop(state);
        instance.guard(self.memory.objects());
        // What was noted of the writes is of no more use, but for who speaks for a participant.
        let mut writes = lock(&instance.writes);
        let offers = std::mem::take(&mut writes.offers).closed();
        *writes = Writes { offers, ..Writes::default() };
        drop(writes);
        Ok(self.receipt_of(&instance, &sealed))
    }

    /// The receipt of a sealed import.
    ///
    /// # Errors
    /// When it is not sealed, or by another session.
    pub fn receipt(&self, id: &InstanceId, session_id: &SessionId) -> Result<Receipt, StoreError> {
        let instance = self.served(id)?;
        instance.check_session(session_id)?;
        let sealed = instance.sealed()?;
        instance.check_complete(&lock(&instance.state))?;
        Ok(self.receipt_of(&instance, &sealed))
    }

    fn receipt_of(&self, instance: &Instance, sealed: &Sealed) -> Receipt {
        let checksums: Vec<[u8; 8]> =
            sealed.0.seal.affinity.units.iter().map(|unit| unit.crc64.to_be_bytes()).collect();
        Receipt {
            node: self.node.clone(),
            incarnation: self.incarnation.clone(),
            instance: instance.id.clone(),
            session_id: sealed.0.seal.session_id.clone(),
            layout_digest: instance.layout.digest(),
            checksums_digest: hash_list(checksums.iter().map(<[u8; 8]>::as_slice)),
            manifest: sealed.0.seal.manifest.clone(),
        }
    }
}

impl Instance {
    pub(super) fn check_session(&self, found: &SessionId) -> Result<(), StoreError> {
        if self.session_id == *found {
            return Ok(());
        }
        let (instance, expected, found) = (self.id.clone(), self.session_id.clone(), found.clone());
        Err(StoreError::OtherSession { instance, expected, found })
    }

    /// A receipt stands for bytes that are here: after a lost memory tier there is none to give.
    fn check_complete(&self, state: &State) -> Result<(), StoreError> {
        let (hot, cold) = (state.units.hot(), state.units.cold());
        match (0..self.layout.unit_count()).find(|&unit| !hot.get(unit) && !cold.get(unit)) {
            Some(unit) => Err(StoreError::NotHere { instance: self.id.clone(), unit }),
            None => Ok(()),
        }
    }

    /// Begins with segments whose room is taken already.
    fn begin_with(&self, spares: Vec<(u32, Spare)>) {
        let room = lock(&self.writes).room.clone();
        for (segment, spare) in spares {
            match self.memory.begin_with(segment, spare) {
                Ok(ready_bytes) => room.note(segment, ready_bytes),
                Err(error) => tracing::warn!(%error, "a spare segment is of no use"),
            }
        }
    }

    /// Where bytes go, if they fit.
    pub(super) fn target(&self, unit: u32, offset: u64, bytes: u64) -> Result<Extent, StoreError> {
        let invalid =
            |reason: String| StoreError::Invalid(format!("can not write to unit {unit} of {}: {reason}", self.id));
        let count = self.layout.unit_count();
        let extent = self.layout.extent(unit).ok_or_else(|| invalid(format!("there are {count} units")))?;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= extent.bytes);
        if fits {
            Ok(extent)
        } else {
            Err(invalid(format!("{bytes} bytes at {offset} do not fit its {} bytes", extent.bytes)))
        }
    }

    /// Writes at most [`COPY_BYTES`] of a unit, and checksums them on the way if they come in order.
    fn write_piece(&self, unit: u32, extent: Extent, offset: u64, piece: &[u8]) -> Result<(), StoreError> {
        if piece.is_empty() {
            return Ok(());
        }
        let _writer = Writer::enter(self)?;
        let start = extent.offset + offset;
        let range = start..start + piece.len() as u64;
        let segment =
            self.memory.get_or_create(extent.segment).map_err(|error| StoreError::on_tier(Tier::Memory, error))?;
        let failed = |error| StoreError::on_tier(Tier::Memory, PathError::new("write", &self.memory_folder, error));

        let room = lock(&self.writes).room.clone();
        room.take(extent.segment, &segment, &range).map_err(failed)?;
        let running = {
            let mut writes = lock(&self.writes);
            let Some(write) = writes.units.get_mut(unit as usize) else { return Ok(()) };
            write.writers += 1;
            write.disturbed |= write.writers > 1;
            // Two writers at once, or bytes out of order: the seal takes the checksum from memory instead.
            match std::mem::take(&mut write.order) {
                _ if write.disturbed => None,
                _ if offset == 0 => Some(Box::<RunningChecksum>::default()),
                Order::Running(running) if running.bytes() == offset => Some(running),
                _ => None,
            }
        };
        let running = running.map(|mut running| {
            running.update(piece);
            running
        });
        let written = segment.write(range.start, piece).map_err(failed);
        let mut writes = lock(&self.writes);
        if let Some(write) = writes.units.get_mut(unit as usize) {
            write.order = match running {
                Some(running) if written.is_ok() && !write.disturbed => match running.bytes() == extent.bytes {
                    true => Order::Complete(running.value()),
                    false => Order::Running(running),
                },
                _ => Order::Unknown,
            };
            write.writers -= 1;
            write.disturbed &= write.writers > 0;
        }
        written
    }

    fn check_document(&self, document: &SealDocument) -> Result<(), StoreError> {
        let refuse = |why: String| Err(StoreError::Manifest { instance: self.id.clone(), why });
        if document.reference.group_id != self.id.group_id {
            return refuse(format!("it is the manifest of {}", document.reference.group_id));
        }
        let units = &document.affinity.units;
        if units.len() != self.layout.unit_count() as usize {
            return refuse(format!("it has {} units, {} were reserved", units.len(), self.layout.unit_count()));
        }
        let differs =
            units.iter().zip(self.layout.extents()).position(|(unit, extent)| unit.extent_bytes != extent.bytes);
        match differs {
            Some(unit) => refuse(format!(
                "unit {unit} has {} bytes in it, {} were reserved",
                units[unit].extent_bytes,
                self.layout.extents()[unit].bytes
            )),
            None => Ok(()),
        }
    }

    /// Checks every unit and writes the records. The caller holds the queue and has closed the writers.
    fn seal(&self, document: SealDocument) -> Result<Sealed, StoreError> {
        self.take_all_room().map_err(|error| StoreError::on_tier(Tier::Memory, error))?;
        let units = self.check_written(&document.affinity)?;
        if !units.is_empty() {
            return Err(StoreError::Checksum { instance: self.id.clone(), place: "memory", units });
        }
        let SealDocument { manifest, reference, affinity } = document;
        let seal = SealRecord { session_id: self.session_id.clone(), manifest: reference, affinity };
        let layout = LayoutRecord {
            instance: self.id.clone(),
            session_id: self.session_id.clone(),
            unit_sizes: self.layout.unit_sizes(),
        };
        let sealed = Sealed(InstanceRecords { layout, seal, manifest });
        let _order = lock(&self.saving);
        if let Some(replica) = &self.cold {
            let record = cold_record(&lock(&self.state));
            let begun = replica.begin(&sealed.0, &record);
            begun.map_err(|error| StoreError::on_tier(Tier::Cold, error))?;
        }
        let state = lock(&self.state);
        // The seal record is the last one: without it the import is discarded at the next start.
        let count = self.layout.unit_count();
        let record = StateRecord {
            fence: state.fence,
            deleting: false,
            held: Bitmap::full(count),
            resident: Bitmap::full(count),
        };
        write_file(&self.memory_folder.join(MANIFEST), &sealed.0.manifest, false)
            .and_then(|()| replace_file(&self.memory_folder.join(STATE), &record::encode(&record), false))
            .and_then(|()| replace_file(&self.memory_folder.join(SEAL), &record::encode(&sealed.0.seal), false))
            .map_err(|error| StoreError::on_tier(Tier::Memory, error))?;
        Ok(sealed)
    }

    /// Takes room for what nobody has written, so that reading it can not meet a full file system.
    fn take_all_room(&self) -> Result<(), PathError> {
        let room = lock(&self.writes).room.clone();
        for index in 0..self.layout.segment_count() {
            let bytes = self.layout.segment_bytes(index);
            if bytes > 0 {
                let segment = self.memory.get_or_create(index)?;
                room.take(index, &segment, &(0..bytes)).on("reserve memory in", &self.memory_folder)?;
            }
        }
        Ok(())
    }

    /// The units whose bytes are not what the manifest says. Units that came in order were checksummed on the way, and those
    /// of several participants when the last of them had sent its fragment.
    fn check_written(&self, affinity: &AffinityIndex) -> Result<Vec<Mismatch>, StoreError> {
        let mut mismatches = Vec::new();
        let mut unknown = Vec::new();
        {
            let writes = lock(&self.writes);
            for (unit, wanted) in affinity.units.iter().enumerate() {
                let known = match writes.units.get(unit).map(|write| &write.order) {
                    Some(Order::Complete(found)) => Some(*found),
                    _ => writes.offers.checksum_of(unit as u32, wanted.extent_bytes),
                };
                match known {
                    Some(found) if found == wanted.crc64 => {}
                    Some(found) => {
                        mismatches.push(Mismatch { unit: unit as u32, expected: wanted.crc64, found });
                    }
                    None => unknown.push(unit as u32),
                }
            }
        }
        mismatches.extend(self.check_memory(&unknown, &|unit| affinity.units[unit as usize].crc64)?);
        mismatches.sort_by_key(|mismatch| mismatch.unit);
        Ok(mismatches)
    }

    /// Compares units in memory with their checksums, on all cores.
    ///
    /// The caller answers for nobody writing or freeing them meanwhile.
    pub(super) fn check_memory(
        &self,
        units: &[u32],
        checksum_of: &(dyn Fn(u32) -> u64 + Sync),
    ) -> Result<Vec<Mismatch>, StoreError> {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let next = std::sync::atomic::AtomicUsize::new(0);
        let work = || -> Result<Vec<Mismatch>, PathError> {
            let mut mismatches = Vec::new();
            loop {
                let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let Some(&unit) = units.get(at) else { return Ok(mismatches) };
                let found = self.checksum_in_memory(unit)?;
                let expected = checksum_of(unit);
                if found != expected {
                    mismatches.push(Mismatch { unit, expected, found });
                }
            }
        };
        let parts: Vec<Result<Vec<Mismatch>, PathError>> = if threads == 1 || units.len() < 2 {
            vec![work()]
        } else {
            std::thread::scope(|scope| {
                let helpers: Vec<_> = (1..threads.min(units.len())).map(|_| scope.spawn(work)).collect();
                let own = work();
                let panicked =
                    || Err(PathError::new("check", &self.memory_folder, std::io::Error::other("a checker panicked")));
                let mut parts = vec![own];
                parts.extend(helpers.into_iter().map(|helper| helper.join().unwrap_or_else(|_| panicked())));
                parts
            })
        };
        let mut mismatches = Vec::new();
        for part in parts {
            mismatches.extend(part.map_err(|error| StoreError::on_tier(Tier::Memory, error))?);
        }
        mismatches.sort_by_key(|mismatch| mismatch.unit);
        Ok(mismatches)
    }

    fn checksum_in_memory(&self, unit: u32) -> Result<u64, PathError> {
        let Some(extent) = self.layout.extent(unit).filter(|extent| extent.bytes > 0) else { return Ok(checksum(&[])) };
        let missing = || std::io::Error::new(std::io::ErrorKind::NotFound, "the segment is not in memory");
        let segment = self.memory.get(extent.segment).ok_or_else(missing).on("check", &self.memory_folder)?;
        // SAFETY: the callers answer for nobody writing or freeing these bytes.
        let bytes = unsafe { segment.bytes(extent.offset..extent.offset + extent.bytes) };
        Ok(checksum(bytes.on("check", &self.memory_folder)?))
    }

    /// The checksum of some bytes of a unit in memory; `None` when nothing was ever written near them. While somebody writes
    /// or frees them, what is found is worth nothing.
    pub(super) fn checksum_of_range(&self, unit: u32, offset: u64, bytes: u64) -> Result<Option<u64>, StoreError> {
        let extent = self.target(unit, offset, bytes)?;
        let Some(segment) = self.memory.get(extent.segment) else { return Ok(None) };
        // Not through the mapping: a page that has no room yet must not take any, and others may write these bytes.
        let mut buffer = vec![0; bytes.min(COPY_BYTES) as usize];
        let mut sum = RunningChecksum::default();
        while sum.bytes() < bytes {
            let piece = &mut buffer[..(bytes - sum.bytes()).min(COPY_BYTES) as usize];
            let read = segment.file().read_exact_at(piece, extent.offset + offset + sum.bytes());
            read.on("check", &self.memory_folder).map_err(|error| StoreError::on_tier(Tier::Memory, error))?;
            sum.update(piece);
        }
        Ok(Some(sum.value()))
    }
}

/// A writer between its check of the state and the end of its copy.
pub(super) struct Writer<'a>(&'a Instance);

impl<'a> Writer<'a> {
    pub(super) fn enter(instance: &'a Instance) -> Result<Self, StoreError> {
        let mut state = lock(&instance.state);
        if state.deleting {
            return Err(StoreError::Deleting { instance: instance.id.clone() });
        }
        if state.sealing || state.sealed.is_some() {
            return Err(StoreError::Sealed { instance: instance.id.clone() });
        }
        state.writers += 1;
        Ok(Self(instance))
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).writers -= 1;
        self.0.eased.notify_all();
    }
}
