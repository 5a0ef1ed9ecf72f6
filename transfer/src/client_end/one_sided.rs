//! One-sided transfers beside a TCP connection: begun when it is made, used for what they reach, and left for good after the
//! first failure; then everything goes over TCP, which also says what is wrong.

use std::collections::{BTreeSet, HashMap};

use ballast_schemas::frame::{
    ByteRange, LOCATED_UNITS_MAX, ReadRange, RemoteMemory, Request, Response, SLOT_BYTES, SLOTS,
};

use super::{NodeConnection, WRITE_BYTES, WRITES_AHEAD};
use crate::rdma::{Link, LinkError, NoRdma, rounds};
use crate::transfer_error::TransferError;

// A landing slot is written again once what landed in it before has been answered for.
const _: () = assert!(WRITES_AHEAD < SLOTS as usize);

/// Whether a connection uses RDMA.
#[derive(Debug)]
pub(super) enum OneSided {
    On {
        link: Box<Link>,
        /// Where units lie; `None` for those that are not in memory.
        places: HashMap<u32, Option<RemoteMemory>>,
        /// The landing slot whose turn it is.
        slot: u32,
    },
    /// Why not.
    Off(String),
}

/// Runs what blocks for the device, where others are not held up by it.
fn in_place<T>(work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

impl NodeConnection {
    /// Why bytes do not go over RDMA; `None` when they do, and on a Unix socket.
    #[must_use]
    pub fn why_not_rdma(&self) -> Option<&str> {
        match &self.one_sided {
            OneSided::Off(why) if !self.wire.is_unix() => Some(why),
            _ => None,
        }
    }

    /// Connects queue pairs with the node, if both have RDMA.
    pub(super) async fn begin_one_sided(&mut self) -> Result<(), TransferError> {
        match self.try_one_sided().await {
            Ok(Ok(link)) => self.one_sided = OneSided::On { link: Box::new(link), places: HashMap::new(), slot: 0 },
            Ok(Err(why)) => self.leave_one_sided(&why),
            Err(error) => {
                self.leave_one_sided(&error);
                return Err(error);
            }
        }
        Ok(())
    }

    async fn try_one_sided(&mut self) -> Result<Result<Link, NoRdma>, TransferError> {
        let Some(address) = self.wire.local_address() else {
            return Ok(Err(NoRdma::new("this connection has no address")));
        };
        let mut link = match in_place(|| Link::new(address)) {
            Ok(link) => link,
            Err(no_rdma) => return Ok(Err(no_rdma)),
        };
        let opened = match self.call(Request::OpenRdma { peer: link.me() }, &[], &[], self.options.stall).await {
            Ok(header) => header.body,
            Err(TransferError::Refused(error)) => return Ok(Err(NoRdma::new(error.message))),
            Err(error) => return Err(error),
        };
        Ok(in_place(|| link.connect(&opened)).map(|()| link))
    }

    fn leave_one_sided(&mut self, why: &impl ToString) {
        let why = why.to_string();
        tracing::debug!(node = %self.hello.node, why, "bytes go over TCP, not RDMA");
        self.one_sided = OneSided::Off(why);
    }

    /// Reads what RDMA reaches. Answers the ranges that are left, with their buffers: all of them after a failure.
    pub(super) async fn read_one_sided<'b>(
        &mut self,
        ranges: &[ReadRange],
        buffers: &'b mut [&mut [u8]],
    ) -> Result<(Vec<ReadRange>, Vec<&'b mut [u8]>), TransferError> {
        self.locate(ranges).await?;
        let mut places = vec![None; ranges.len()];
        if let OneSided::On { places: known, .. } = &self.one_sided {
            let place = |range: &ReadRange| known.get(&range.unit).copied().flatten().and_then(|all| part(&all, range));
            places = ranges.iter().map(place).collect();
        }
        let reads = places.iter().zip(buffers.iter_mut());
        let reads = reads.filter_map(|(place, buffer)| Some(((*place)?, &mut **buffer))).collect();
        if let Err(error) = self.read_rounds(rounds(reads)).await {
            self.leave_one_sided(&error);
            places.fill(None);
        }
        let left = ranges.iter().zip(buffers.iter_mut()).zip(&places).filter(|(_, place)| place.is_none());
        Ok(left.map(|((range, buffer), _)| (*range, &mut **buffer)).unzip())
    }

    /// Dropped between two rounds, it leaves nothing under way.
    async fn read_rounds(&mut self, rounds: Vec<Vec<(RemoteMemory, &mut [u8])>>) -> Result<(), LinkError> {
        let OneSided::On { link, .. } = &mut self.one_sided else { return Ok(()) };
        for round in rounds {
            let stall = self.options.stall;
            in_place(|| link.read(round, stall))?;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Asks where units lie that were not asked for before.
    async fn locate(&mut self, ranges: &[ReadRange]) -> Result<(), TransferError> {
        let OneSided::On { places, .. } = &self.one_sided else { return Ok(()) };
        let unknown: BTreeSet<u32> =
            ranges.iter().map(|range| range.unit).filter(|unit| !places.contains_key(unit)).collect();
        let unknown: Vec<u32> = unknown.into_iter().collect();
        for units in unknown.chunks(LOCATED_UNITS_MAX) {
            let request = Request::LocateUnits { units: units.to_vec() };
            // Memory may have to be registered, and so brought in.
            match self.call(request, &[], &[], self.options.patience).await.map(|header| header.body) {
                Ok(Response::Located { units: found }) if found.len() == units.len() => {
                    if let OneSided::On { places, .. } = &mut self.one_sided {
                        places.extend(units.iter().copied().zip(found));
                    }
                }
                Ok(other) => return Err(self.unexpected(&other)),
                Err(TransferError::Refused(error)) => {
                    // What is wrong with the reader, the same request over TCP says.
                    self.leave_one_sided(&error);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Bytes of one request that writes.
    pub(super) fn write_bytes(&self) -> u64 {
        match &self.one_sided {
            OneSided::On { link, .. } if link.has_window() => SLOT_BYTES,
            _ => WRITE_BYTES,
        }
    }

    /// Sends bytes that belong into these ranges: to the landing window if there is one. At most [`WRITES_AHEAD`] earlier
    /// ones may be unanswered, so that the slot is free.
    pub(super) async fn send_bytes(&mut self, ranges: Vec<ByteRange>, payload: &[&[u8]]) -> Result<(), TransferError> {
        let stall = self.options.stall;
        let mut failure: Option<LinkError> = None;
        if let OneSided::On { link, slot, .. } = &mut self.one_sided
            && link.has_window()
        {
            let landing = *slot;
            *slot = (landing + 1) % SLOTS;
            match in_place(|| link.write(landing, payload, stall)) {
                Ok(()) => return self.send(Request::WriteLanded { slot: landing, ranges }, &[], &[]).await,
                Err(error) => failure = Some(error),
            }
        }
        if let Some(error) = failure {
            self.leave_one_sided(&error);
        }
        self.send(Request::Write { ranges }, payload, &[]).await
    }
}

/// The part of a unit's bytes that a range is, if it is one.
fn part(all: &RemoteMemory, range: &ReadRange) -> Option<RemoteMemory> {
    let inside = range.bytes > 0 && range.offset.checked_add(range.bytes).is_some_and(|end| end <= all.bytes);
    inside.then(|| RemoteMemory { address: all.address.wrapping_add(range.offset), bytes: range.bytes, key: all.key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_is_not_in_its_unit_is_left_to_the_node_to_refuse() {
        let all = RemoteMemory { address: 1000, bytes: 10, key: 3 };
        let range = |offset, bytes| ReadRange { unit: 0, offset, bytes };
        assert_eq!(part(&all, &range(4, 6)), Some(RemoteMemory { address: 1004, bytes: 6, key: 3 }));
        for outside in [range(4, 7), range(0, 0), range(u64::MAX, 2), range(11, 1)] {
            assert_eq!(part(&all, &outside), None);
        }
    }
}
