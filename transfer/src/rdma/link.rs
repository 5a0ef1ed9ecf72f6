//! The client's end of one-sided transfers: READs into the caller's buffers and WRITEs from them, large ones where they lie and
//! small ones through registered memory of our own. Every call blocks until no device touches the caller's buffers any more,
//! so that a buffer can never be lent longer than it is borrowed.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ballast_schemas::frame::{RdmaPeer, RemoteMemory, Response, SLOT_BYTES, SLOTS};

use super::NoRdma;
use super::device::{Device, Domain, Place};
use super::memory::{Access, Arena, Lent, Stretch};
use super::queue_pair::{LinkError, PeerMay, QueuePair, Verb};

/// Shorter buffers are copied: registering them would cost more.
const DIRECT_BYTES: usize = 64 << 10;
/// Bytes of one round, after which others have their turn, and of what is registered for it.
const ROUND_BYTES: usize = 16 << 20;
/// Buffers of one round.
const ROUND_PIECES: usize = 4096;
/// Memory of our own, for small buffers.
const STAGING_BYTES: u64 = 4 << 20;
/// Bytes of one request.
const REQUEST_BYTES: u64 = 1 << 20;
/// Longest wait for the first bytes that ever come.
const PROBE_WAIT: Duration = Duration::from_secs(5);

/// A range of a peer's memory, and where it goes.
pub(crate) type Read<'a> = (RemoteMemory, &'a mut [u8]);

/// A queue pair connected to a node's.
#[derive(Debug)]
pub(crate) struct Link {
    // Gone before what its requests name: fields go in this order.
    pair: QueuePair,
    staging: Arena,
    domain: Arc<Domain>,
    pub(crate) window: Option<RemoteMemory>,
}

impl Link {
    /// This end, for a TCP connection from this address.
    pub(crate) fn new(address: IpAddr) -> Result<Self, NoRdma> {
        let place = Place::of_address(address)?;
        let made = || -> std::io::Result<Self> {
            let domain = Domain::new(Device::open(&place.device)?)?;
            let pair = QueuePair::new(&domain, &place, PeerMay::Nothing)?;
            let staging = Arena::new(&domain, STAGING_BYTES, Access::Target)?;
            Ok(Self { pair, staging, domain, window: None })
        };
        made().map_err(|error| NoRdma::new(unusable(&place.device, &error)))
    }

    /// What the node is told of this end.
    pub(crate) fn me(&self) -> RdmaPeer {
        self.pair.me()
    }

    /// Connects to the node's end, and sees whether bytes come through.
    pub(crate) fn connect(&mut self, opened: &Response) -> Result<(), NoRdma> {
        let Response::RdmaOpened { peer, probe, content, window } = opened else {
            return Err(NoRdma::new("the node did not say where to connect"));
        };
        self.pair.connect(peer).map_err(|error| NoRdma::new(format!("queue pairs do not connect: {error}")))?;
        let mut found = [0; 16];
        let probe = RemoteMemory { bytes: 16, ..*probe };
        let read = self.read(vec![(probe, &mut found)], PROBE_WAIT);
        read.map_err(|error| NoRdma::new(format!("nothing comes through: {error}")))?;
        if found != *content {
            return Err(NoRdma::new("what comes through is not what the node has"));
        }
        self.window = window.filter(|window| window.bytes >= u64::from(SLOTS) * SLOT_BYTES);
        Ok(())
    }

    /// Whether uploads can land.
    pub(crate) fn has_window(&self) -> bool {
        self.window.is_some()
    }

    /// Fills buffers: one of the [`rounds`].
    pub(crate) fn read(&mut self, round: Vec<Read<'_>>, stall: Duration) -> Result<(), LinkError> {
        let mut parts = Vec::with_capacity(round.len());
        let (mut lent, mut staged) = (Vec::new(), Vec::new());
        let mut used = 0;
        for (remote, buffer) in round {
            let bytes = buffer.len() as u64;
            if buffer.len() >= DIRECT_BYTES {
                let buffer = Lent::to_fill(&self.domain, buffer)?;
                parts.push((remote, buffer.stretch()));
                lent.push(buffer);
            } else {
                parts.push((remote, self.staging.stretch(used, bytes)?));
                staged.push((used, buffer));
                used += bytes;
            }
        }
        self.run(Verb::Read, parts, stall)?;
        drop(lent);
        for (offset, buffer) in staged {
            self.staging.copy_out(offset, buffer)?;
        }
        Ok(())
    }

    /// Puts bytes into a slot of the node's landing window, one piece after the other.
    pub(crate) fn write(&mut self, slot: u32, pieces: &[&[u8]], stall: Duration) -> Result<(), LinkError> {
        let total: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        let Some(window) = self.window.filter(|_| slot < SLOTS && total <= SLOT_BYTES) else {
            return Err(std::io::Error::from(std::io::ErrorKind::InvalidInput).into());
        };
        let start = RemoteMemory { address: window.address + u64::from(slot) * SLOT_BYTES, ..window };
        let mut parts = Vec::with_capacity(pieces.len());
        let mut lent = Vec::new();
        let (mut done, mut used) = (0, 0);
        for piece in pieces {
            let bytes = piece.len() as u64;
            let remote = RemoteMemory { address: start.address + done, bytes, ..start };
            if piece.len() >= DIRECT_BYTES {
                let piece = Lent::to_send(&self.domain, piece)?;
                parts.push((remote, piece.stretch()));
                lent.push(piece);
            } else {
                self.staging.copy_in(used, piece)?;
                parts.push((remote, self.staging.stretch(used, bytes)?));
                used += bytes;
            }
            done += bytes;
        }
        self.run(Verb::Write, parts, stall)?;
        drop(lent);
        // A WRITE that has ended may still be on its way from the node's device to its memory. A READ behind it is answered from
        // that memory.
        let last = RemoteMemory { address: start.address + total.saturating_sub(1), bytes: 1, ..start };
        let behind = vec![(last, self.staging.stretch(STAGING_BYTES - 1, 1)?)];
        self.run(Verb::Read, behind, stall)
    }

    /// Posts requests for all parts, neighbours together, and waits until all have ended.
    fn run(&mut self, verb: Verb, parts: Vec<(RemoteMemory, Stretch)>, stall: Duration) -> Result<(), LinkError> {
        let done = self.run_parts(verb, parts, stall);
        // After a failure some may still be under way.
        self.pair.end();
        done
    }

    fn run_parts(&mut self, verb: Verb, parts: Vec<(RemoteMemory, Stretch)>, stall: Duration) -> Result<(), LinkError> {
        let pieces_max = self.domain.device().pieces_max;
        let mut request: Option<(RemoteMemory, Vec<Stretch>)> = None;
        for (mut remote, mut local) in parts {
            while local.bytes > 0 {
                let fits = |(start, pieces): &(RemoteMemory, Vec<Stretch>)| {
                    let next = start.key == remote.key && start.address + start.bytes == remote.address;
                    next && start.bytes < REQUEST_BYTES && pieces.len() < pieces_max
                };
                if let Some((start, pieces)) = request.take_if(|request| !fits(request)) {
                    self.post(verb, &pieces, start, stall)?;
                }
                let (start, pieces) =
                    request.get_or_insert_with(|| (RemoteMemory { bytes: 0, ..remote }, Vec::with_capacity(1)));
                let piece = local.take(REQUEST_BYTES - start.bytes);
                start.bytes += piece.bytes;
                remote.address += piece.bytes;
                match pieces.last_mut() {
                    Some(last) if last.key == piece.key && last.address + last.bytes == piece.address => {
                        last.bytes += piece.bytes;
                    }
                    _ => pieces.push(piece),
                }
            }
        }
        if let Some((start, pieces)) = request {
            self.post(verb, &pieces, start, stall)?;
        }
        while self.pair.under_way() > 0 {
            self.pair.wait(stall)?;
        }
        Ok(())
    }

    fn post(&mut self, verb: Verb, local: &[Stretch], remote: RemoteMemory, stall: Duration) -> Result<(), LinkError> {
        while self.pair.room() == 0 {
            self.pair.wait(stall)?;
        }
        // SAFETY: `read` and `write` hold what the stretches lie in, registered and borrowed, until `run` has returned; that
        // ends every request.
        unsafe { self.pair.post(verb, local, remote) }
    }
}

/// Cuts reads into rounds that [`Link::read`] takes. Buffers and ranges have the same lengths.
pub(crate) fn rounds<'a>(reads: Vec<Read<'a>>) -> Vec<Vec<Read<'a>>> {
    let mut rounds: Vec<Vec<Read<'a>>> = Vec::new();
    let (mut bytes, mut staged) = (ROUND_BYTES, 0);
    for (mut remote, mut buffer) in reads {
        loop {
            let take = buffer.len().min(ROUND_BYTES);
            let (front, rest) = buffer.split_at_mut(take);
            let small = if take < DIRECT_BYTES { take } else { 0 };
            let full = |round: &Vec<Read<'a>>| {
                let fits = bytes + take <= ROUND_BYTES && staged + small <= STAGING_BYTES as usize;
                !fits || round.len() >= ROUND_PIECES
            };
            if rounds.last().is_none_or(full) {
                rounds.push(Vec::new());
                (bytes, staged) = (0, 0);
            }
            bytes += take;
            staged += small;
            if let Some(round) = rounds.last_mut() {
                round.push((RemoteMemory { bytes: take as u64, ..remote }, front));
            }
            remote.address += take as u64;
            buffer = rest;
            if buffer.is_empty() {
                break;
            }
        }
    }
    rounds
}

/// What to tell of a device that can not be used.
pub(crate) fn unusable(device: &str, error: &std::io::Error) -> String {
    let limit = match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::NOMEM.raw_os_error() => {
            "; is the limit of locked memory (ulimit -l) too low?"
        }
        _ => "",
    };
    format!("RDMA device {device} can not be used: {error}{limit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_cut_into_rounds_that_lose_no_byte() {
        let mut buffers = vec![vec![0; 5], vec![0; ROUND_BYTES * 2 + 7], vec![0; 0], vec![0; 3]];
        buffers.extend(vec![vec![0; DIRECT_BYTES - 1]; 100]);
        let lengths: Vec<usize> = buffers.iter().map(Vec::len).collect();
        let mut address = 1000;
        let mut reads = Vec::new();
        for buffer in &mut buffers {
            let bytes = buffer.len() as u64;
            reads.push((RemoteMemory { address, bytes, key: 1 }, buffer.as_mut_slice()));
            address += bytes;
        }
        let rounds = rounds(reads);
        let mut next = 1000;
        for round in &rounds {
            let sizes: Vec<usize> = round.iter().map(|(_, buffer)| buffer.len()).collect();
            assert!(sizes.iter().sum::<usize>() <= ROUND_BYTES);
            let small: usize = sizes.iter().filter(|&&bytes| bytes < DIRECT_BYTES).sum();
            assert!(small as u64 <= STAGING_BYTES);
            for (remote, buffer) in round {
                assert_eq!((remote.address, remote.bytes), (next, buffer.len() as u64));
                next += remote.bytes;
            }
        }
        assert_eq!(next - 1000, lengths.iter().sum::<usize>() as u64);
    }
}
