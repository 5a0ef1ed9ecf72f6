//! The node's end of one-sided transfers: what one connection may reach, and for how long. Regions over hot units are shared by
//! the connections that read an instance, and counted; each guards its units, and is deregistered before they can be freed.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ballast_schemas::InstanceId;
use ballast_schemas::frame::{RdmaPeer, RemoteMemory, Response, SLOT_BYTES, SLOTS, Tier};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::NoRdma;
use super::device::{Device, Domain, Place, gid_of};
use super::link::unusable;
use super::memory::{Access, Arena, Region};
use super::queue_pair::{PeerMay, QueuePair};
use crate::error::StoreError;
use crate::folder::PathError;
use crate::node_store::{HotRun, InstanceReader};

/// Landing windows at once; further importers send over TCP.
const WINDOWS_MAX: usize = 64;

/// Regions of one connection; units beyond, in memory that is full of holes, go over TCP.
const REGIONS_MAX: usize = 1024;

/// What all connections of a node share.
#[derive(Debug)]
pub(crate) struct Service {
    /// By device and instance.
    shelves: Mutex<HashMap<(String, InstanceId), Weak<Shelf>>>,
    windows: Arc<Semaphore>,
}

impl Default for Service {
    fn default() -> Self {
        Self { shelves: Mutex::default(), windows: Arc::new(Semaphore::new(WINDOWS_MAX)) }
    }
}

/// Regions of one instance. Its domain keeps the queue pairs of other instances out.
#[derive(Debug)]
struct Shelf {
    domain: Arc<Domain>,
    regions: Mutex<Vec<Weak<HotRegion>>>,
}

/// A registered run of hot units.
#[derive(Debug)]
struct HotRegion {
    // Deregistered before its units may be freed: fields go in this order.
    region: Region,
    run: HotRun,
}

impl HotRegion {
    fn place_of(&self, unit: u32) -> Option<RemoteMemory> {
        let place = self.run.place_of(unit)?;
        let all = self.region.remote();
        Some(RemoteMemory { address: all.address + place.start, bytes: place.end - place.start, key: all.key })
    }
}

impl Shelf {
    fn new(device: Arc<Device>) -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self { domain: Domain::new(device)?, regions: Mutex::default() }))
    }

    /// The region of a unit: an earlier one, or a new one over the run.
    fn region(&self, unit: u32, run: HotRun) -> std::io::Result<Arc<HotRegion>> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|region| region.strong_count() > 0);
        let holds = |region: &Arc<HotRegion>| region.run.place_of(unit).is_some();
        if let Some(region) = regions.iter().filter_map(Weak::upgrade).find(holds) {
            return Ok(region);
        }
        let (start, bytes) = run.memory()?;
        // SAFETY: the run keeps its segment mapped and goes after the region; its bytes are only read, here and by the peer.
        let region = unsafe { Region::new(&self.domain, start, bytes, Access::Readable)? };
        let region = Arc::new(HotRegion { region, run });
        regions.push(Arc::downgrade(&region));
        Ok(region)
    }
}

/// What one connection may reach. Dropped, nothing any more.
#[derive(Debug)]
pub(crate) struct NodeLink {
    // Gone before what it gives access to.
    pair: QueuePair,
    probe: Arena,
    content: [u8; 16],
    regions: Vec<Arc<HotRegion>>,
    window: Option<(Arc<Arena>, OwnedSemaphorePermit)>,
    shelf: Arc<Shelf>,
}

impl Service {
    /// A queue pair for a connection between these addresses, the node's and its peer's, connected to the peer's queue pair.
    pub(crate) fn open(
        &self,
        (address, peer_address): (IpAddr, IpAddr),
        instance: &InstanceId,
        writable: bool,
        peer: &RdmaPeer,
    ) -> Result<NodeLink, NoRdma> {
        let place = Place::of_address(address)?;
        if peer.gid != gid_of(peer_address) {
            // A node sends nothing to an address that a peer made up.
            return Err(NoRdma::new(format!(
                "the queue pair is not at {peer_address}, where the connection comes from"
            )));
        }
        let permit = match writable {
            true => Some(
                self.windows
                    .clone()
                    .try_acquire_owned()
                    .map_err(|_| NoRdma::new(format!("all {WINDOWS_MAX} landing windows of the node are in use")))?,
            ),
            false => None,
        };
        let made = || -> std::io::Result<NodeLink> {
            let device = Device::open(&place.device)?;
            // Importers share nothing: each reaches its own window only.
            let shelf = if writable { Shelf::new(device)? } else { self.shelf(&place.device, device, instance)? };
            let peer_may = if writable { PeerMay::Write } else { PeerMay::Read };
            let mut pair = QueuePair::new(&shelf.domain, &place, peer_may)?;
            pair.connect(peer)?;
            let content = *uuid::Uuid::new_v4().as_bytes();
            let probe = Arena::new(&shelf.domain, content.len() as u64, Access::Readable)?;
            probe.copy_in(0, &content)?;
            let window = match permit {
                Some(permit) => {
                    let bytes = u64::from(SLOTS) * SLOT_BYTES;
                    Some((Arc::new(Arena::new(&shelf.domain, bytes, Access::Writable)?), permit))
                }
                None => None,
            };
            Ok(NodeLink { pair, probe, content, regions: Vec::new(), window, shelf })
        };
        made().map_err(|error| NoRdma::new(unusable(&place.device, &error)))
    }

    fn shelf(&self, name: &str, device: Arc<Device>, instance: &InstanceId) -> std::io::Result<Arc<Shelf>> {
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        shelves.retain(|_, shelf| shelf.strong_count() > 0);
        let key = (name.to_owned(), instance.clone());
        if let Some(shelf) = shelves.get(&key).and_then(Weak::upgrade) {
            return Ok(shelf);
        }
        let shelf = Shelf::new(device)?;
        shelves.insert(key, Arc::downgrade(&shelf));
        Ok(shelf)
    }
}

impl NodeLink {
    /// The answer to the peer.
    pub(crate) fn opened(&self) -> Response {
        Response::RdmaOpened {
            peer: self.pair.me(),
            probe: self.probe.remote(),
            content: self.content,
            window: self.window().map(|window| window.remote()),
        }
    }

    /// Where uploads land.
    pub(crate) fn window(&self) -> Option<Arc<Arena>> {
        self.window.as_ref().map(|(window, _)| window.clone())
    }

    /// Where hot units can be read; they stay in memory for as long as this lives.
    ///
    /// # Errors
    /// When the instance is being deleted, or memory can not be registered.
    pub(crate) fn locate(
        &mut self,
        reader: &InstanceReader,
        units: &[u32],
    ) -> Result<Vec<Option<RemoteMemory>>, StoreError> {
        let mut places = Vec::with_capacity(units.len());
        for &unit in units {
            // One that was found wrong is handed out to nobody new.
            if reader.tier(unit) != Some(Tier::Memory) {
                places.push(None);
                continue;
            }
            let known = |region: &Arc<HotRegion>| region.place_of(unit);
            // Units come in the order of their runs, most of them.
            if let Some(place) = self.regions.iter().rev().find_map(known) {
                places.push(Some(place));
                continue;
            }
            let run = if self.regions.len() < REGIONS_MAX { reader.hot_run(unit)? } else { None };
            let Some(run) = run else {
                places.push(None);
                continue;
            };
            let region = self.shelf.region(unit, run).map_err(|error| {
                let error = PathError::new("register memory of", std::path::Path::new("an instance"), error);
                StoreError::on_tier(Tier::Memory, error)
            })?;
            places.push(region.place_of(unit));
            self.regions.push(region);
        }
        Ok(places)
    }
}
