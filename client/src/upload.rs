//! Moving the bytes of one import to its nodes: several connections side by side, each with its own share of the source,
//! and the checksum of every unit computed from the source meanwhile. On one host the node reads the files itself.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use ballast_schemas::frame::{ByteRange, SourceRange};
use ballast_schemas::manifest::Manifest;
use ballast_schemas::{BallastError, BeginImportReply, ErrorCode, NodeEndpoint};
use ballast_transfer::{NodeConnection, Route, checksum};
use bytes::Bytes;

use crate::checksums::{StopOnDrop, of_file};
use crate::gateway::Gateway;
use crate::nodes::{Transport, connect, lanes};
use crate::progress::{Phase, Progress};
use crate::source::{Data, SourceFile, UnitSource};

/// Bytes of one share: small enough that lanes end together, large enough that requests do not matter.
const BATCH_BYTES: u64 = 64 << 20;
/// Units of one share.
const BATCH_UNITS: usize = 4096;

/// The nodes of one import, each with room taken.
#[derive(Debug)]
pub(crate) struct Upload {
    nodes: Vec<Target>,
    token: String,
    route: Route,
}

#[derive(Debug)]
struct Target {
    endpoint: NodeEndpoint,
    /// The connection that took the room and will seal.
    control: NodeConnection,
}

/// Units that one lane sends in one go.
enum Batch {
    Bytes { unit: u32, bytes: Bytes },
    File { file: Arc<SourceFile>, ranges: Vec<SourceRange> },
}

impl Upload {
    /// Connects to every node of the placement and takes room there.
    pub(crate) async fn begin(
        gateway: &Gateway,
        reply: &BeginImportReply,
        extents: &[u64],
    ) -> Result<Self, BallastError> {
        let mut upload = Self { nodes: Vec::new(), token: reply.token.clone(), route: gateway.route() };
        for endpoint in &reply.endpoints {
            let mut control = connect(endpoint, &reply.token, upload.route).await?;
            control.allocate(extents).await?;
            upload.nodes.push(Target { endpoint: endpoint.clone(), control });
        }
        if upload.nodes.is_empty() {
            return Err(BallastError::new(ErrorCode::Unavailable, "the import was placed on no node; begin it again"));
        }
        Ok(upload)
    }

    /// How the bytes go.
    pub(crate) fn transport(&self) -> Transport {
        let tcp = self.nodes.iter().any(|node| Transport::from(node.control.transport()) == Transport::Tcp);
        if tcp { Transport::Tcp } else { Transport::Local }
    }

    /// Writes stretches of units from memory.
    pub(crate) async fn write(&mut self, ranges: &[ByteRange], buffers: &[&[u8]]) -> Result<(), BallastError> {
        for node in &mut self.nodes {
            node.control.write_ranges(ranges, buffers).await?;
        }
        Ok(())
    }

    /// Sends every unit whose bytes are at hand and answers the checksums of all.
    pub(crate) async fn run(
        &mut self,
        units: &[UnitSource],
        known: Vec<Option<u64>>,
        progress: &Progress,
        bytes: u64,
    ) -> Result<Vec<u64>, BallastError> {
        let mut checksums = known;
        for unit in units.iter().filter(|unit| unit.bytes == 0) {
            checksums[unit.unit as usize] = Some(checksum(&[]));
        }
        let found = Mutex::new(checksums);
        for node in 0..self.nodes.len() {
            let meter = progress.meter(Phase::Writing, bytes);
            let queue = Mutex::new(batches(units));
            let lane_count = lanes().min(queue.lock().unwrap_or_else(PoisonError::into_inner).len());
            // The source's checksums do not depend on where it goes.
            let found = (node == 0).then_some(&found);
            let mut lanes = Vec::with_capacity(lane_count);
            for lane in 0..lane_count {
                let (queue, meter, endpoint) = (&queue, &meter, &self.nodes[node].endpoint);
                let (token, route) = (&self.token, self.route);
                lanes.push(async move {
                    let mut connection = connect(endpoint, token, route).await?;
                    tracing::trace!(lane, node = %endpoint.node, "a lane is open");
                    loop {
                        let batch = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                        let Some(batch) = batch else { return Ok::<(), BallastError>(()) };
                        send(&mut connection, batch, found, &|bytes| meter.add(bytes)).await?;
                    }
                });
            }
            futures::future::try_join_all(lanes).await?;
        }
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let missing = |unit: &UnitSource| BallastError::invalid(format!("{:?} of the source has no bytes", unit.name));
        found.into_iter().zip(units).map(|(checksum, unit)| checksum.ok_or_else(|| missing(unit))).collect()
    }

    /// Has every node check what it got and keep the manifest.
    pub(crate) async fn seal(&mut self, manifest: &Manifest) -> Result<(), BallastError> {
        let document = manifest.to_canonical_bytes();
        let seals = self.nodes.iter_mut().map(|node| node.control.seal(&document));
        futures::future::try_join_all(seals).await?;
        Ok(())
    }
}

/// The source in shares, each file from front to back.
fn batches(units: &[UnitSource]) -> VecDeque<Batch> {
    let mut batches = VecDeque::new();
    let mut in_files: Vec<(&Arc<SourceFile>, u64, &UnitSource)> = Vec::new();
    for unit in units.iter().filter(|unit| unit.bytes > 0) {
        match &unit.data {
            Data::Bytes(bytes) => batches.push_back(Batch::Bytes { unit: unit.unit, bytes: bytes.clone() }),
            Data::File { file, offset } => in_files.push((file, *offset, unit)),
            Data::Later => {}
        }
    }
    in_files.sort_by(|a, b| (&a.0.path, a.1).cmp(&(&b.0.path, b.1)));
    let mut share: Option<(Arc<SourceFile>, Vec<SourceRange>)> = None;
    let mut bytes = 0;
    for (file, offset, unit) in in_files {
        let range = SourceRange { source_offset: offset, unit: unit.unit, unit_offset: 0, bytes: unit.bytes };
        match &mut share {
            Some((open, ranges))
                if Arc::ptr_eq(open, file) && bytes + unit.bytes <= BATCH_BYTES && ranges.len() < BATCH_UNITS =>
            {
                ranges.push(range);
                bytes += unit.bytes;
            }
            _ => {
                let full = share.replace((file.clone(), vec![range]));
                batches.extend(full.map(|(file, ranges)| Batch::File { file, ranges }));
                bytes = unit.bytes;
            }
        }
    }
    batches.extend(share.map(|(file, ranges)| Batch::File { file, ranges }));
    batches
}

/// Sends one share over one connection, and computes its checksums at the same time where they are wanted.
async fn send(
    connection: &mut NodeConnection,
    batch: Batch,
    found: Option<&Mutex<Vec<Option<u64>>>>,
    sent: &(dyn Fn(u64) + Sync),
) -> Result<(), BallastError> {
    let note = |checksums: Vec<(u32, u64)>| {
        let Some(found) = found else { return };
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        for (unit, checksum) in checksums {
            found[unit as usize] = Some(checksum);
        }
    };
    match batch {
        Batch::Bytes { unit, bytes } => {
            note(vec![(unit, checksum(&bytes))]);
            connection.write(unit, 0, &bytes).await?;
            sent(bytes.len() as u64);
        }
        Batch::File { file, ranges } => {
            let opened = Arc::new(file.open()?);
            let stop = StopOnDrop::default();
            let computing = found.map(|_| compute(file, opened.clone(), ranges.clone(), &stop));
            connection.write_from_file(opened.as_fd(), &ranges, sent).await?;
            if let Some(computing) = computing {
                let computed = computing
                    .await
                    .map_err(|error| BallastError::invalid(format!("reading the source failed: {error}")))?;
                note(computed?);
            }
        }
    }
    Ok(())
}

fn compute(
    file: Arc<SourceFile>,
    opened: Arc<File>,
    ranges: Vec<SourceRange>,
    stop: &StopOnDrop,
) -> tokio::task::JoinHandle<Result<Vec<(u32, u64)>, BallastError>> {
    let stop = stop.0.clone();
    tokio::task::spawn_blocking(move || {
        let one = |range: &SourceRange| {
            let checksum = of_file(&opened, &file, range.source_offset, range.bytes, &stop, None)?;
            Ok((range.unit, checksum))
        };
        ranges.iter().map(one).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::source_file;

    #[test]
    fn a_source_is_shared_out_file_by_file_from_front_to_back() {
        let first = tempfile::NamedTempFile::new().unwrap();
        let second = tempfile::NamedTempFile::new().unwrap();
        let (_, one) = source_file(first.path()).unwrap();
        let (_, two) = source_file(second.path()).unwrap();
        let unit = |unit, file: &Arc<SourceFile>, offset, bytes| UnitSource {
            unit,
            name: unit.to_string(),
            bytes,
            data: Data::File { file: file.clone(), offset },
        };
        let units = [
            unit(0, &one, 500, 10),
            unit(1, &two, 0, 10),
            unit(2, &one, 100, BATCH_BYTES),
            unit(3, &one, 600, 10),
            unit(4, &one, 0, 0),
        ];
        let mut shares: Vec<Vec<u32>> = batches(&units)
            .iter()
            .map(|batch| match batch {
                Batch::File { ranges, .. } => ranges.iter().map(|range| range.unit).collect(),
                Batch::Bytes { unit, .. } => vec![*unit],
            })
            .collect();
        shares.sort();
        assert_eq!(shares, [vec![0, 3], vec![1], vec![2]]);
    }
}
