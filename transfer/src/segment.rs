//! One segment of the memory tier: a file on tmpfs, mapped by the node for its whole life, and the descriptors and
//! locks by which readers hold it (see ARCHITECTURE.md, Guards and fences). Which units are where is not known here.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::folder::{OnPath, PathError};

const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// A mapping of a file, unmapped when dropped.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is memory of the process, not of a thread; the pointer is only an address.
unsafe impl Send for Mapping {}
// SAFETY: shared use hands out addresses and slices under the conditions that `bytes` and `address` state.
unsafe impl Sync for Mapping {}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Mapping {
    /// Maps the first `bytes` bytes of a file, shared.
    pub(crate) fn new(file: &File, bytes: u64, writable: bool) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory that exists already.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0)? };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { start, bytes })
    }

    /// Maps fresh memory that belongs to no file.
    pub(crate) fn anonymous(bytes: u64) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory that exists already.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)? };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { start, bytes })
    }

    pub(crate) fn advise(&self, range: Range<u64>, advice: Advice) -> io::Result<()> {
        let (offset, bytes) = self.check(&range)?;
        // SAFETY: the range lies in this mapping (checked above), and none of the advices used here changes content.
        unsafe { rustix::mm::madvise(self.start.as_ptr().add(offset).cast(), bytes, advice)? };
        Ok(())
    }

    /// Address of the first byte of a range.
    pub(crate) fn address(&self, range: &Range<u64>) -> io::Result<NonNull<u8>> {
        let (offset, _) = self.check(range)?;
        // SAFETY: the offset lies in the mapping (checked above).
        Ok(unsafe { self.start.add(offset) })
    }

    /// The bytes of a range.
    ///
    /// # Safety
    /// For as long as the slice lives, nobody may write or free these bytes.
    pub(crate) unsafe fn bytes(&self, range: Range<u64>) -> io::Result<&[u8]> {
        let (offset, bytes) = self.check(&range)?;
        // SAFETY: the range lies in the mapping (checked above), which lives as long as `self`; the caller answers for
        // the rest.
        Ok(unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(offset), bytes) })
    }

    fn check(&self, range: &Range<u64>) -> io::Result<(usize, usize)> {
        let inside = range.start <= range.end && range.end <= self.bytes as u64;
        if inside {
            Ok((range.start as usize, (range.end - range.start) as usize))
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("bytes {}..{} lie outside a mapping of {} bytes", range.start, range.end, self.bytes),
            ))
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`; slices of it can not outlive `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        if let Err(error) = unmapped {
            tracing::error!(%error, bytes = self.bytes, "can not unmap a segment");
        }
    }
}

/// A read-only descriptor of `file` with an open file description of its own. With `guard`, that description holds
/// a shared lock: it goes when the last descriptor and the last mapping of it are gone, whatever happens to the node.
pub(crate) fn reader_descriptor(file: &File, guard: bool) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let reader = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    if guard {
        rustix::fs::flock(&reader, FlockOperation::NonBlockingLockShared)?;
    }
    Ok(reader)
}

/// Whether no reader holds the file, and keeps new ones out while the answer lives.
pub(crate) fn lock_out_readers(file: &File) -> io::Result<Option<NoReaders<'_>>> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(NoReaders { file })),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// No reader holds the file for as long as this lives.
pub(crate) struct NoReaders<'a> {
    file: &'a File,
}

impl Drop for NoReaders<'_> {
    fn drop(&mut self) {
        if let Err(error) = rustix::fs::flock(self.file, FlockOperation::Unlock) {
            tracing::error!(%error, "can not unlock a segment");
        }
    }
}

/// Frees the room that a range of a file takes; the range reads as zeros from then on.
pub(crate) fn punch(file: &File, range: &Range<u64>) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    #[cfg(test)]
    crate::folder::crash::step(Path::new("a segment")).map_err(|error| error.source)?;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, range.start, range.end - range.start)?)
}

/// Takes room for a range of a file, so that writing it can not run out of space.
pub(crate) fn take_room(file: &File, range: &Range<u64>) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    #[cfg(test)]
    crate::folder::crash::step(Path::new("a segment")).map_err(|error| error.source)?;
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, range.start, range.end - range.start) {
            Err(rustix::io::Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

/// A segment in memory.
#[derive(Debug)]
pub(crate) struct Segment {
    file: File,
    mapping: Mapping,
    bytes: u64,
    huge: bool,
}

impl Segment {
    /// Makes the file of a segment, without any room taken yet.
    pub(crate) fn create(path: &Path, bytes: u64, huge: bool) -> Result<Self, PathError> {
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path).on("create", path)?;
        file.set_len(bytes).on("size", path)?;
        Self::map(file, path, bytes, huge)
    }

    /// Opens the file of a segment from an earlier run.
    pub(crate) fn open(path: &Path, bytes: u64, huge: bool) -> Result<Self, PathError> {
        let file = OpenOptions::new().read(true).write(true).open(path).on("open", path)?;
        let found = file.metadata().on("look at", path)?.len();
        if found != bytes {
            let error = io::Error::new(io::ErrorKind::InvalidData, format!("{found} bytes, expected {bytes}"));
            return Err(PathError::new("adopt", path, error));
        }
        Self::map(file, path, bytes, huge)
    }

    fn map(file: File, path: &Path, bytes: u64, huge: bool) -> Result<Self, PathError> {
        let mapping = Mapping::new(&file, bytes, true).on("map", path)?;
        if huge {
            mapping.advise(0..bytes, Advice::LinuxHugepage).on("ask for huge pages of", path)?;
        }
        Ok(Self { file, mapping, bytes, huge })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Bytes of the file, whether they take memory or not.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of memory that the file takes.
    pub(crate) fn taken_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.file.metadata().map_or(self.bytes, |metadata| metadata.blocks() * 512)
    }

    /// Takes room for a range, so that no later access can meet a full file system (which would be SIGBUS). On a
    /// huge-page tmpfs, faulting is what makes huge pages, so whole ones are faulted in and only the edges allocated.
    pub(crate) fn take_room(&self, range: &Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        if !self.huge {
            return take_room(&self.file, range);
        }
        let first = range.start.next_multiple_of(HUGE_PAGE_BYTES);
        let to_the_end = range.end == self.bytes;
        let last = if to_the_end { range.end } else { range.end / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES };
        if first >= last {
            return take_room(&self.file, range);
        }
        take_room(&self.file, &(range.start..first))?;
        self.mapping.advise(first..last, Advice::LinuxPopulateWrite).map_err(|error| {
            // EFAULT says that a page could not be had: on tmpfs, that the file system or memory is full.
            match error.raw_os_error() {
                Some(code) if code == rustix::io::Errno::FAULT.raw_os_error() => io::ErrorKind::StorageFull.into(),
                _ => error,
            }
        })?;
        take_room(&self.file, &(last..range.end))
    }

    /// Faults a range in that already has its room, in one call instead of page by page.
    pub(crate) fn fault_in(&self, range: &Range<u64>) -> io::Result<()> {
        if range.is_empty() { Ok(()) } else { self.mapping.advise(range.clone(), Advice::LinuxPopulateWrite) }
    }

    /// Writes bytes into room that was taken before. Through the file on 4 KiB pages (half the cost of faulting
    /// the mapping in), through the mapping on huge pages.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if !self.huge {
            return self.file.write_all_at(bytes, offset);
        }
        let start = self.mapping.address(&(offset..offset + bytes.len() as u64))?;
        // SAFETY: the destination lies in the mapping (checked by `address`) and can not overlap a slice of ours, since
        // slices are only taken of units that nobody writes any more; room was taken, so no access faults.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// The bytes of a range.
    ///
    /// # Safety
    /// For as long as the slice lives, nobody may write these bytes or punch them.
    pub(crate) unsafe fn bytes(&self, range: Range<u64>) -> io::Result<&[u8]> {
        // SAFETY: passed on to the caller.
        unsafe { self.mapping.bytes(range) }
    }

    /// Address of a range, for I/O straight from or into it.
    pub(crate) fn address(&self, range: &Range<u64>) -> io::Result<NonNull<u8>> {
        self.mapping.address(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn what_is_written_is_read_and_what_is_punched_is_gone() {
        let folder = scratch();
        let path = folder.path().join("seg");
        let segment = Segment::create(&path, 16384, false).unwrap();
        segment.take_room(&(0..16384)).unwrap();
        segment.write(4096, b"hello").unwrap();
        // SAFETY: nobody else knows this segment.
        assert_eq!(unsafe { segment.bytes(4096..4101) }.unwrap(), b"hello");
        punch(segment.file(), &(4096..8192)).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { segment.bytes(4096..4101) }.unwrap(), [0; 5]);
        // SAFETY: as above.
        assert!(unsafe { segment.bytes(16000..16385) }.is_err());
        drop(segment);
        assert!(Segment::open(&path, 8192, false).is_err(), "another length than the layout's is not adopted");
    }

    #[test]
    fn a_guarded_descriptor_keeps_the_segment_until_the_last_mapping_is_gone() {
        let folder = scratch();
        let segment = Segment::create(&folder.path().join("seg"), 8192, false).unwrap();
        segment.take_room(&(0..8192)).unwrap();
        segment.write(0, b"still here").unwrap();
        assert!(lock_out_readers(segment.file()).unwrap().is_some());

        let reader = File::from(reader_descriptor(segment.file(), true).unwrap());
        let mapping = Mapping::new(&reader, 8192, false).unwrap();
        assert!(Mapping::new(&reader, 8192, true).is_err(), "no writable mapping from a reader's descriptor");
        assert!(lock_out_readers(segment.file()).unwrap().is_none());
        drop(reader);
        assert!(lock_out_readers(segment.file()).unwrap().is_none(), "the mapping alone still guards");
        drop(mapping);
        assert!(lock_out_readers(segment.file()).unwrap().is_some());
    }
}
