//! A get: lease, manifest, bytes, lease confirmed, target in place (RFC, Get and Revision Lease).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::manifest::Manifest;
use ballast_schemas::{BallastError, ErrorCode, LEASE_TTL_MS_DEFAULT, RevisionIdentity, WeightRevisionMetadata};

use crate::fetch::{Kept, UnitSink, fetch};
use crate::fill::{by_unit, fill};
use crate::gateway::Gateway;
use crate::nodes::Transport;
use crate::placed::{PlacedBuffer, fill_placed};
use crate::progress::{Phase, Progress};
use crate::reading::{Reading, Rounds};
use crate::reshard::PlanTarget;
use crate::safetensors::{Export, ExportError, RECORD_PATH, Staging};

/// Where a get puts what it reads.
#[derive(Debug)]
pub enum GetTarget<'a> {
    /// The model's files, as they were put: into a folder that is made, or that is there. Nothing appears in it before
    /// everything was read and the lease confirmed.
    Directory {
        /// The folder.
        path: &'a Path,
        /// Whether files that are there already are replaced; otherwise they are a `CONFLICT`.
        overwrite: bool,
    },
    /// Named tensors, each into a buffer of its size. After an error the buffers mean nothing.
    Buffers(BTreeMap<String, &'a mut [u8]>),
    /// The boxes of a placement (`None`: every tensor as a whole), each into its buffer. All of them, no more and no
    /// fewer. After an error the buffers mean nothing but for the tensors that its details call written.
    Placed {
        /// What is wanted.
        target: Option<PlanTarget<'a>>,
        /// Where it goes.
        buffers: Vec<PlacedBuffer<'a>>,
    },
}

/// Whether checksums are compared while reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Where bytes came over TCP or from disk. What is mapped from memory was checked at the seal.
    #[default]
    Auto,
    /// Everywhere.
    Always,
    /// Nowhere.
    Never,
}

/// How to read.
#[derive(Clone, Debug)]
pub struct GetOptions {
    /// Who reads, for people; `None`: the connection's name.
    pub holder: Option<String>,
    /// The lease ends after this long without a renewal; it is renewed every third of it.
    pub lease_ttl_ms: u64,
    /// Whether checksums are compared.
    pub verify: Verify,
    /// Told of every step.
    pub progress: Progress,
}

impl Default for GetOptions {
    fn default() -> Self {
        Self { holder: None, lease_ttl_ms: LEASE_TTL_MS_DEFAULT, verify: Verify::Auto, progress: Progress::none() }
    }
}

/// What a get read.
#[derive(Clone, Debug)]
pub struct GetReport {
    /// The revision's manifest.
    pub manifest: Arc<Manifest>,
    /// Its record when the lease was granted.
    pub revision: WeightRevisionMetadata,
    /// Bytes read.
    pub bytes: u64,
    /// Of them from memory.
    pub hot_bytes: u64,
    /// Of them from disk.
    pub cold_bytes: u64,
    /// From the call to its end.
    pub elapsed: Duration,
    /// How the bytes came; `None` when there were none.
    pub transport: Option<Transport>,
    /// Why they came over TCP and not over RDMA, when they did.
    pub why_not_rdma: Option<String>,
    /// The files written.
    pub files: Vec<PathBuf>,
}

pub(crate) async fn get(
    gateway: &Gateway,
    identity: &RevisionIdentity,
    target: GetTarget<'_>,
    options: GetOptions,
) -> Result<GetReport, BallastError> {
    let started = Instant::now();
    let mut reading = Reading::open(gateway, identity, &options).await?;
    let (manifest, revision) = (reading.manifest().clone(), reading.revision().clone());
    let (rounds, files) = match target {
        GetTarget::Directory { path, overwrite } => into_folder(reading, path, overwrite, &options).await?,
        GetTarget::Buffers(named) => {
            let mut buffers = by_unit(&manifest, named)?;
            let total = buffers.keys().map(|unit| reading.bytes_of(*unit)).sum();
            let meter = options.progress.meter(Phase::Reading, total);
            let rounds = fill(&mut reading, &mut buffers, options.verify, &meter).await?;
            reading.release().await?;
            (rounds, Vec::new())
        }
        GetTarget::Placed { target, buffers } => {
            let meter = |total| options.progress.meter(Phase::Reading, total);
            let rounds = fill_placed(&mut reading, target, buffers, options.verify, meter).await?;
            reading.release().await?;
            (rounds, Vec::new())
        }
    };
    let (transport, why_not_rdma) = rounds.way.map(|way| (way.transport, way.why_not_rdma)).unzip();
    Ok(GetReport {
        manifest,
        revision,
        bytes: rounds.hot_bytes + rounds.cold_bytes,
        hot_bytes: rounds.hot_bytes,
        cold_bytes: rounds.cold_bytes,
        elapsed: started.elapsed(),
        transport,
        why_not_rdma: why_not_rdma.flatten(),
        files,
    })
}

/// Files being exported.
#[derive(Debug)]
struct Files {
    export: Export,
    staging: Staging,
}

impl UnitSink for Files {
    fn put(&self, unit: u32, offset: u64, bytes: &[u8]) -> Result<(), BallastError> {
        Ok(self.staging.write(self.export.places(unit), offset, bytes)?)
    }
}

async fn into_folder(
    mut reading: Reading,
    path: &Path,
    overwrite: bool,
    options: &GetOptions,
) -> Result<(Rounds, Vec<PathBuf>), BallastError> {
    let manifest = reading.manifest().clone();
    let record = read_record(&mut reading, options.verify).await?;
    let export = Export::new(&manifest, record.as_deref())?;
    let units: Vec<u32> = (0..manifest.units().len() as u32).filter(|unit| export.wants(*unit)).collect();
    let total = units.iter().map(|unit| reading.bytes_of(*unit)).sum();
    let target = path.to_owned();
    let files = blocking(move || {
        let staging = Staging::new(&export, &target, overwrite)?;
        Ok(Files { export, staging })
    });
    let files = Arc::new(files.await?);
    let meter = options.progress.meter(Phase::Reading, total);
    let rounds = fetch(&mut reading, &units, files.clone(), options.verify, &meter).await?;
    reading.release().await?;
    // Every thread that wrote has ended with the fetch.
    let files =
        Arc::into_inner(files).ok_or_else(|| BallastError::new(ErrorCode::Busy, "a file is still being written"))?;
    let written = blocking(move || files.staging.publish()).await?;
    Ok((rounds, written))
}

/// The record of how the tensors were cut into files, if the revision has one.
async fn read_record(reading: &mut Reading, verify: Verify) -> Result<Option<Vec<u8>>, BallastError> {
    let Some(unit) = reading.manifest().file(RECORD_PATH).map(|file| file.unit) else { return Ok(None) };
    let kept = Arc::new(Kept::default());
    fetch(reading, &[unit], kept.clone(), verify, &Progress::none().meter(Phase::Reading, 0)).await?;
    let mut units = Arc::into_inner(kept).map(Kept::into_units).unwrap_or_default();
    Ok(Some(units.remove(&unit).unwrap_or_default()))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ExportError> + Send + 'static,
) -> Result<T, BallastError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|error| BallastError::new(ErrorCode::Unavailable, format!("writing failed: {error}")))?;
    Ok(done?)
}
