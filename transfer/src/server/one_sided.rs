//! Requests about one-sided transfers: opening a queue pair for a connection, telling where units lie, and writing what has
//! landed. What a peer reaches ends with the connection, and with its token.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ballast_schemas::frame::{ByteRange, LOCATED_UNITS_MAX, RdmaPeer, Response, SLOT_BYTES, SLOTS};
use ballast_schemas::{BallastError, ErrorCode, TokenClaims, TokenRight};

use super::{Connection, Failure, PIECE_BYTES, blocking, check_count, invalid, joined, take_front};
use crate::error::StoreError;
use crate::rdma::{NoRdma, NodeLink};
use crate::token::{TOKEN_LEEWAY_MS, now_unix_ms};

/// What a connection's peer reaches. Dropped, nothing.
#[derive(Debug)]
pub(super) struct OneSided {
    /// `None` once it has been taken back.
    link: Arc<Mutex<Option<NodeLink>>>,
    ends_unix_ms: Arc<AtomicU64>,
    watch: tokio::task::JoinHandle<()>,
}

impl OneSided {
    fn new(link: NodeLink, claims: &TokenClaims) -> Self {
        let link = Arc::new(Mutex::new(Some(link)));
        let ends_unix_ms = Arc::new(AtomicU64::new(end_of(claims)));
        let watch = tokio::spawn(take_back_in_time(link.clone(), ends_unix_ms.clone()));
        Self { link, ends_unix_ms, watch }
    }

    /// Goes on under a newer token.
    pub(super) fn extend(&self, claims: &TokenClaims) {
        self.ends_unix_ms.store(end_of(claims), Ordering::Relaxed);
    }
}

impl Drop for OneSided {
    fn drop(&mut self) {
        self.watch.abort();
        take_back(&self.link);
    }
}

fn end_of(claims: &TokenClaims) -> u64 {
    claims.expires_unix_ms.saturating_add(TOKEN_LEEWAY_MS)
}

fn lock(link: &Mutex<Option<NodeLink>>) -> MutexGuard<'_, Option<NodeLink>> {
    link.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The peer asks no node before it reads, so that an ended token has to end what it reaches.
async fn take_back_in_time(link: Arc<Mutex<Option<NodeLink>>>, ends_unix_ms: Arc<AtomicU64>) {
    loop {
        let left = ends_unix_ms.load(Ordering::Relaxed).saturating_sub(now_unix_ms());
        if left == 0 {
            return take_back(&link);
        }
        // Looked at again at times: the end may have moved.
        tokio::time::sleep(Duration::from_millis(left.min(1_000))).await;
    }
}

/// Large regions take a while to go.
fn take_back(link: &Arc<Mutex<Option<NodeLink>>>) {
    let link = link.clone();
    tokio::task::spawn_blocking(move || *lock(&link) = None);
}

fn not_used(no_rdma: &NoRdma) -> Failure {
    BallastError::new(ErrorCode::NotReady, format!("the node does not use RDMA for this: {no_rdma}")).into()
}

impl Connection<'_> {
    pub(super) async fn open_rdma(&mut self, peer: RdmaPeer) -> Result<(), Failure> {
        let claims = self.claims()?;
        let writable = claims.right == TokenRight::Import;
        let Some(service) = self.shared.rdma.clone() else {
            return Err(not_used(&NoRdma::new("it was started without")));
        };
        let (Some(address), Some(peer_address)) = (self.wire.local_address(), self.wire.peer_address()) else {
            return Err(invalid("RDMA is for connections over TCP; map segments instead"));
        };
        self.one_sided = None;
        let instance = claims.instance.clone();
        let opening =
            tokio::task::spawn_blocking(move || service.open((address, peer_address), &instance, writable, &peer));
        let link = joined(opening.await)?.map_err(|no_rdma| not_used(&no_rdma))?;
        let opened = link.opened();
        self.one_sided = Some(OneSided::new(link, &claims));
        Ok(self.send(opened).await?)
    }

    fn one_sided(&self) -> Result<&OneSided, Failure> {
        self.one_sided.as_ref().ok_or_else(|| invalid("open a queue pair first"))
    }

    pub(super) async fn locate_units(&mut self, units: Vec<u32>) -> Result<(), Failure> {
        let claims = self.allowed(TokenRight::Read)?;
        if units.len() > LOCATED_UNITS_MAX {
            return Err(invalid(format!("{} units; at most {LOCATED_UNITS_MAX} fit one request", units.len())));
        }
        let (store, link) = (self.shared.store.clone(), self.one_sided()?.link.clone());
        let units = blocking(move || {
            let reader = store.reader(&claims.instance)?;
            match lock(&link).as_mut() {
                Some(link) => link.locate(&reader, &units),
                None => Ok(vec![None; units.len()]),
            }
        })
        .await?;
        Ok(self.send(Response::Located { units }).await?)
    }

    pub(super) async fn write_landed(&mut self, slot: u32, ranges: Vec<ByteRange>) -> Result<(), Failure> {
        let (claims, session) = self.importer()?;
        check_count(ranges.len())?;
        let bytes = ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.bytes));
        if slot >= SLOTS || bytes > SLOT_BYTES {
            return Err(invalid(format!("{bytes} bytes in slot {slot}; there are {SLOTS} of {SLOT_BYTES}")));
        }
        let window = lock(&self.one_sided()?.link).as_ref().and_then(NodeLink::window);
        let Some(window) = window else {
            let message = "this connection has no landing window (any more); connect again";
            return Err(BallastError::new(ErrorCode::Unavailable, message).into());
        };
        let store = self.shared.store.clone();
        blocking(move || {
            // Copied out first: what is checksummed is what is written, whatever the peer does to the slot meanwhile.
            let mut buffer = vec![0; bytes.min(PIECE_BYTES) as usize];
            let mut ranges = VecDeque::from(ranges);
            let mut done = 0;
            while done < bytes {
                let piece = &mut buffer[..(bytes - done).min(PIECE_BYTES) as usize];
                let read = window.copy_out(u64::from(slot) * SLOT_BYTES + done, piece);
                read.map_err(|error| StoreError::Invalid(format!("a landing window can not be read: {error}")))?;
                let mut rest: &[u8] = piece;
                for target in take_front(&mut ranges, rest.len() as u64) {
                    let (front, later) = rest.split_at((target.bytes as usize).min(rest.len()));
                    rest = later;
                    let part = claims.part.as_ref();
                    store.write_as(&claims.instance, &session, part, target.unit, target.offset, front)?;
                }
                done += piece.len() as u64;
            }
            Ok(())
        })
        .await?;
        Ok(self.send(Response::Written { bytes }).await?)
    }
}
