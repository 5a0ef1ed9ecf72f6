//! Memory that a device may reach. A region is deregistered before its memory can go: it holds what keeps the memory, or
//! borrows it.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use ballast_schemas::frame::RemoteMemory;
use ibverbs_sys as ffi;
use ibverbs_sys::ibv_access_flags as flags;

use super::device::{Domain, check};
use crate::segment::Mapping;

/// What a device may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It reads it for requests of this process.
    Source,
    /// It reads and writes it for requests of this process.
    Target,
    /// The peer may read it.
    Readable,
    /// The peer may write it.
    Writable,
}

impl Access {
    fn flags(self) -> u32 {
        match self {
            Self::Source => 0,
            Self::Target => flags::IBV_ACCESS_LOCAL_WRITE.0,
            Self::Readable => flags::IBV_ACCESS_REMOTE_READ.0,
            Self::Writable => {
                flags::IBV_ACCESS_LOCAL_WRITE.0 | flags::IBV_ACCESS_REMOTE_WRITE.0 | flags::IBV_ACCESS_REMOTE_READ.0
            }
        }
    }
}

/// A registered stretch of memory. Dropped, no device reaches it any more.
pub(crate) struct Region {
    region: NonNull<ffi::ibv_mr>,
    address: u64,
    bytes: u64,
    _domain: Arc<Domain>,
}

// SAFETY: a region is a number of the device; libibverbs locks what belongs to it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Region {
    /// Registers memory, whose pages stay in place from then on.
    ///
    /// # Safety
    /// The memory must be mapped for as long as the region lives. While `access` lets a device write it, nobody may hold a
    /// reference into it during a request or, when it is [`Access::Writable`], at all.
    pub(crate) unsafe fn new(domain: &Arc<Domain>, start: NonNull<u8>, bytes: u64, access: Access) -> io::Result<Self> {
        let length = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let access = access.flags() as std::os::raw::c_int;
        // SAFETY: the domain lives; the memory is mapped (the caller), and a wrong one would be an error, no fault.
        let region = unsafe { ffi::ibv_reg_mr(domain.as_ptr(), start.as_ptr().cast(), length, access) };
        let region = NonNull::new(region).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { region, address: start.as_ptr() as u64, bytes, _domain: domain.clone() })
    }

    /// What the requests of this process name it by.
    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region lives until `self` is dropped, and nobody writes the struct.
        unsafe { (*self.region.as_ptr()).lkey }
    }

    /// All of it, as the peer names it.
    pub(crate) fn remote(&self) -> RemoteMemory {
        // SAFETY: as above.
        let key = unsafe { (*self.region.as_ptr()).rkey };
        RemoteMemory { address: self.address, bytes: self.bytes, key }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: it was registered in `new` and is given up here alone.
        if let Err(error) = check(unsafe { ffi::ibv_dereg_mr(self.region.as_ptr()) }) {
            // Its memory is about to be used for something else, which a device would read or overwrite.
            tracing::error!(%error, bytes = self.bytes, "a registered region can not be given up; stopping");
            std::process::abort();
        }
    }
}

/// A buffer of the caller's, registered for as long as it is borrowed.
#[derive(Debug)]
pub(crate) struct Lent<'a> {
    region: Region,
    _buffer: PhantomData<&'a mut [u8]>,
}

impl<'a> Lent<'a> {
    /// A buffer to be filled.
    pub(crate) fn to_fill(domain: &Arc<Domain>, buffer: &'a mut [u8]) -> io::Result<Self> {
        let (start, bytes) = (NonNull::from(&mut *buffer).cast(), buffer.len() as u64);
        // SAFETY: the buffer is borrowed for ourselves for as long as this lives.
        let region = unsafe { Region::new(domain, start, bytes, Access::Target)? };
        Ok(Self { region, _buffer: PhantomData })
    }

    /// A buffer to be sent.
    pub(crate) fn to_send(domain: &Arc<Domain>, buffer: &'a [u8]) -> io::Result<Self> {
        let (start, bytes) = (NonNull::from(buffer).cast(), buffer.len() as u64);
        // SAFETY: the buffer is borrowed for as long as this lives, and devices only read it.
        let region = unsafe { Region::new(domain, start, bytes, Access::Source)? };
        Ok(Self { region, _buffer: PhantomData })
    }

    pub(crate) fn stretch(&self) -> Stretch {
        Stretch { address: self.region.address, bytes: self.region.bytes, key: self.region.local_key() }
    }
}

/// Registered memory of our own, which no reference leads into.
#[derive(Debug)]
pub(crate) struct Arena {
    // Deregistered before it is unmapped: fields go in this order.
    region: Region,
    memory: Mapping,
}

impl Arena {
    pub(crate) fn new(domain: &Arc<Domain>, bytes: u64, access: Access) -> io::Result<Self> {
        let memory = Mapping::anonymous(bytes)?;
        let start = memory.address(&(0..bytes))?;
        // SAFETY: the mapping goes after the region, and is only ever copied from and to.
        let region = unsafe { Region::new(domain, start, bytes, access)? };
        Ok(Self { region, memory })
    }

    pub(crate) fn remote(&self) -> RemoteMemory {
        self.region.remote()
    }

    /// A part of it, for a request.
    pub(crate) fn stretch(&self, offset: u64, bytes: u64) -> io::Result<Stretch> {
        let start = self.memory.address(&(offset..offset.saturating_add(bytes)))?;
        Ok(Stretch { address: start.as_ptr() as u64, bytes, key: self.region.local_key() })
    }

    /// Copies bytes out. A device that writes them meanwhile, against the protocol, decides what they are.
    pub(crate) fn copy_out(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let start = self.memory.address(&(offset..offset.saturating_add(buffer.len() as u64)))?;
        // SAFETY: the bytes lie in the mapping (checked by `address`), and no reference leads into it.
        unsafe { std::ptr::copy_nonoverlapping(start.as_ptr(), buffer.as_mut_ptr(), buffer.len()) };
        Ok(())
    }

    /// Copies bytes in.
    pub(crate) fn copy_in(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let start = self.memory.address(&(offset..offset.saturating_add(bytes.len() as u64)))?;
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Registered bytes of this process, as a request names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) key: u32,
}

impl Stretch {
    /// Takes the first bytes off it.
    pub(crate) fn take(&mut self, bytes: u64) -> Self {
        let front = Self { bytes: bytes.min(self.bytes), ..*self };
        self.address += front.bytes;
        self.bytes -= front.bytes;
        front
    }
}
