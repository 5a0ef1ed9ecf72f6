//! RDMA devices: which of them, and which entry of its GID table, belongs to the address of a TCP connection; an open device
//! and protection domains on it. RoCE v2 only: an address has no GID of its own on other fabrics.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::os::raw::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::{fmt, io};

use ibverbs_sys as ffi;

use super::NoRdma;

/// Where a connection enters the fabric: a port of a device, and the entry of its GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) device: String,
    pub(crate) port: u8,
    pub(crate) gid_index: u8,
    pub(crate) gid: [u8; 16],
}

impl Place {
    /// The RoCE v2 entry of an address: the interface that TCP goes out of is the one that RDMA goes out of.
    pub(crate) fn of_address(address: IpAddr) -> Result<Self, NoRdma> {
        let wanted = gid_of(address);
        let mut others = Vec::new();
        for (device, entries) in gid_tables()? {
            for entry in &entries {
                let gid = gid_bytes(&entry.gid);
                let (Ok(port), Ok(gid_index)) = (u8::try_from(entry.port_num), u8::try_from(entry.gid_index)) else {
                    continue;
                };
                if entry.gid_type == ffi::IBV_GID_TYPE_ROCE_V2 && gid == wanted {
                    return Ok(Self { device, port, gid_index, gid });
                }
            }
            let addresses = entries.iter().filter(|entry| entry.gid_type == ffi::IBV_GID_TYPE_ROCE_V2);
            let addresses: Vec<String> = addresses.map(|entry| address_of(gid_bytes(&entry.gid)).to_string()).collect();
            others.push(format!(
                "{device} has {}",
                if addresses.is_empty() { "none".into() } else { addresses.join(", ") }
            ));
        }
        Err(NoRdma::new(format!("no RDMA device has the address {address} over RoCE v2 ({})", others.join("; "))))
    }
}

/// RoCE v2 addresses of this host's devices, for whoever is told what there is.
pub(crate) fn describe() -> Result<String, NoRdma> {
    let mut all = Vec::new();
    for (device, entries) in gid_tables()? {
        let routable = entries.iter().filter(|entry| entry.gid_type == ffi::IBV_GID_TYPE_ROCE_V2);
        all.extend(routable.map(|entry| format!("{device} {}", address_of(gid_bytes(&entry.gid)))));
    }
    if all.is_empty() { Err(NoRdma::new("no RDMA device has an address over RoCE v2")) } else { Ok(all.join(", ")) }
}

/// The GID table of every device that has an active port.
fn gid_tables() -> Result<Vec<(String, Vec<ibverbs::GidEntry>)>, NoRdma> {
    // Without support in the kernel this is an error (ENOSYS), not an empty list.
    let devices = ibverbs::devices().map_err(|error| NoRdma::new(format!("this host has no RDMA devices: {error}")))?;
    let mut tables = Vec::new();
    let mut closed = Vec::new();
    for device in devices.iter() {
        let name = device.name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        match device.open() {
            Ok(context) => tables.push((name, context.gid_table().to_vec())),
            Err(error) => closed.push(format!("{name}: {error}")),
        }
    }
    match (tables.is_empty(), closed.is_empty()) {
        (true, true) => Err(NoRdma::new("this host has no RDMA devices")),
        (true, false) => Err(NoRdma::new(format!("no RDMA device of this host can be used ({})", closed.join("; ")))),
        _ => Ok(tables),
    }
}

fn gid_bytes(gid: &ibverbs::Gid) -> [u8; 16] {
    (u128::from(gid.subnet_prefix()) << 64 | u128::from(gid.interface_id())).to_be_bytes()
}

pub(crate) fn gid_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

fn address_of(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}

/// An open device.
pub(crate) struct Device {
    context: NonNull<ffi::ibv_context>,
    name: String,
    /// READs that one queue pair may have under way, as their origin and as their target.
    pub(crate) reads_out_max: u8,
    pub(crate) reads_in_max: u8,
    /// Entries of a gather list.
    pub(crate) pieces_max: usize,
}

// SAFETY: libibverbs locks what belongs to a context; a context is used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name).finish_non_exhaustive()
    }
}

static OPEN: Mutex<Option<HashMap<String, Weak<Device>>>> = Mutex::new(None);

impl Device {
    /// The device of this name: opened once, for as long as somebody uses it.
    pub(crate) fn open(name: &str) -> io::Result<Arc<Self>> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        if let Some(device) = open.get(name).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(Self::open_anew(name)?);
        open.insert(name.to_owned(), Arc::downgrade(&device));
        Ok(device)
    }

    fn open_anew(name: &str) -> io::Result<Self> {
        let mut count: c_int = 0;
        // SAFETY: answers a list of its own, or null.
        let list = unsafe { ffi::ibv_get_device_list(&mut count) };
        if list.is_null() {
            return Err(io::Error::last_os_error());
        }
        let mut context = None;
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` entries, each a device until the list is freed.
            let device = unsafe { *list.add(index) };
            // SAFETY: as above; the name is part of the device.
            let found = unsafe { std::ffi::CStr::from_ptr(ffi::ibv_get_device_name(device)) };
            if found.to_bytes() == name.as_bytes() {
                // SAFETY: as above.
                let opened = unsafe { ffi::ibv_open_device(device) };
                context = Some(NonNull::new(opened).ok_or_else(io::Error::last_os_error));
                break;
            }
        }
        // SAFETY: the list came from above and is not used again; an opened device stays open without it.
        unsafe { ffi::ibv_free_device_list(list) };
        let context = context.unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::NotFound)))?;
        let mut device = Self { context, name: name.to_owned(), reads_out_max: 1, reads_in_max: 1, pieces_max: 1 };
        let mut limits = ffi::ibv_device_attr::default();
        // SAFETY: the context is open, and the struct is ours.
        check(unsafe { ffi::ibv_query_device(context.as_ptr(), &mut limits) })?;
        let in_a_byte = |count: c_int| u8::try_from(count.clamp(1, 16)).unwrap_or(1);
        device.reads_out_max = in_a_byte(limits.max_qp_init_rd_atom);
        device.reads_in_max = in_a_byte(limits.max_qp_rd_atom);
        // Devices may take fewer entries for a READ than for other requests.
        let pieces = if limits.max_sge_rd > 0 { limits.max_sge.min(limits.max_sge_rd) } else { limits.max_sge };
        device.pieces_max = usize::try_from(pieces).unwrap_or(1).clamp(1, 16);
        Ok(device)
    }

    pub(crate) fn context(&self) -> NonNull<ffi::ibv_context> {
        self.context
    }

    /// Largest packet of a port, as a power of two.
    pub(crate) fn mtu_log2(&self, port: u8) -> io::Result<u8> {
        let mut attributes = ffi::ibv_port_attr::default();
        let target = (&raw mut attributes).cast();
        // SAFETY: the context is open. The symbol fills the older, shorter form of the struct, which ours begins with.
        check(unsafe { ffi::ibv_query_port(self.context.as_ptr(), port, target) })?;
        // IBV_MTU_256 is 1.
        Ok(u8::try_from(attributes.active_mtu).unwrap_or(1).clamp(1, 5) + 7)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: everything that was made on the context holds it by an `Arc`, and so is gone.
        if let Err(error) = check(unsafe { ffi::ibv_close_device(self.context.as_ptr()) }) {
            tracing::error!(%error, device = self.name, "can not close an RDMA device");
        }
    }
}

/// A protection domain: queue pairs reach the regions of their own domain only.
pub(crate) struct Domain {
    device: Arc<Device>,
    domain: NonNull<ffi::ibv_pd>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Domain {}
// SAFETY: as for `Device`.
unsafe impl Sync for Domain {}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Domain {
    pub(crate) fn new(device: Arc<Device>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open for as long as `device` lives.
        let domain = NonNull::new(unsafe { ffi::ibv_alloc_pd(device.context.as_ptr()) });
        Ok(Arc::new(Self { domain: domain.ok_or_else(io::Error::last_os_error)?, device }))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn as_ptr(&self) -> *mut ffi::ibv_pd {
        self.domain.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs of the domain hold it by an `Arc`, and so are gone.
        if let Err(error) = check(unsafe { ffi::ibv_dealloc_pd(self.domain.as_ptr()) }) {
            tracing::error!(%error, "can not give up an RDMA protection domain");
        }
    }
}

/// What a verb that answers an error number, or -1 and `errno`, says.
pub(crate) fn check(answer: c_int) -> io::Result<()> {
    match answer {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        number => Err(io::Error::from_raw_os_error(number.abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_and_its_gid_are_one() {
        for text in ["10.0.0.1", "fe80::1", "2001:db8::7"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(address_of(gid_of(address)), address);
        }
        assert_eq!(gid_of("10.0.0.1".parse().unwrap())[10..], [0xff, 0xff, 10, 0, 0, 1]);
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        assert!(Device::open("no-such-device").is_err());
    }
}
