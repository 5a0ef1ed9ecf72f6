//! A connection and what can be asked of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ballast_client::delta::{self, Members, Semantics, SparseDelta};
use ballast_client::{
    ConnectOptions, EventFeed, EventFilter, EventStart, Gateway, GetOptions, GetReport, GetTarget, OpenRevision,
    PartWriter, PlacedBuffer, Route, ShardedTensor, Source, UpsertOptions, Verify, WeightStore, explain_missing,
    next_generation, plan_replacement, resolve, safetensors,
};
use ballast_schemas::{
    BallastError, ErrorCode, LineageKey, ParticipantId, RevisionIdentity, SessionId, TenantId, UpsertMode,
    WeightStoragePolicy,
};
use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{raise, read_json, to_json};
use crate::opened::Opened;
use crate::placement::{Placement, TensorText};
use crate::progress::progress;
use crate::runtime::{Cancel, wait};
use crate::writer::{Put, Writer, report_text};

/// A revision that is waited for is looked at again after this long even without an event.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// A connection to a cluster.
#[pyclass(frozen, module = "ballast._native")]
pub(crate) struct Client {
    gateway: Gateway,
    store: WeightStore,
}

/// How to connect.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Connecting {
    nats: String,
    name: Option<String>,
    tenant: String,
    route: String,
    connect_seconds: f64,
    request_seconds: f64,
    default_policy: Option<WeightStoragePolicy>,
}

/// How to read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reading {
    holder: Option<String>,
    lease_ttl_ms: u64,
    verify: String,
}

/// How to replace.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Replacing {
    base: RevisionIdentity,
    target_generation: u64,
    expected_metadata_generation: u64,
    mode: UpsertMode,
    request_id: Option<String>,
    wait_completed: bool,
}

/// What a delta replaces.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Changing {
    base: RevisionIdentity,
    expected_metadata_generation: Option<u64>,
    request_id: Option<String>,
    wait_completed: bool,
}

/// Address and bytes of a member.
type MemberText = (usize, usize);
/// A sparse object: its metadata as JSON, its indices, values, tile coordinates and tile pointers.
type DeltaText = (String, MemberText, MemberText, MemberText, MemberText);

fn member(&(address, nbytes): &MemberText) -> &'static [u8] {
    match nbytes {
        0 => &[],
        // SAFETY: the Python side holds the objects whose memory this is for as long as the call, which is how long the
        // slice is used, and says where it lies.
        _ => unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) },
    }
}

fn object((metadata, indices, values, tile_coords, tile_ptr): &DeltaText) -> (&str, Members<'static>) {
    let members = Members {
        indices: member(indices),
        values: member(values),
        tile_coords: member(tile_coords),
        tile_ptr: member(tile_ptr),
    };
    (metadata, members)
}

/// How a put is shared among participants.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sharing {
    participants: Vec<ParticipantId>,
    participant: Option<ParticipantId>,
    session: Option<SessionId>,
    patience_seconds: f64,
}

impl Sharing {
    fn read(text: Option<&str>) -> Result<Option<Self>, BallastError> {
        text.map(|text| read_json("how the put is shared", text)).transpose()
    }

    /// The source as its coordinator puts it.
    fn coordinated(self, source: Source) -> Result<Source, BallastError> {
        let Self { participants, participant, session, patience_seconds } = self;
        let patience = seconds(patience_seconds)?;
        Ok(source.shared(ballast_client::Sharing { participants, participant, session_id: session, patience }))
    }
}

/// First element and extent.
type BoxText = (Vec<u64>, Vec<u64>);
/// A buffer: tensor, participant, box, dtype, shape, address, bytes.
type BufferText = (String, Option<String>, Option<BoxText>, Option<String>, Option<Vec<u64>>, usize, usize);

fn seconds(given: f64) -> Result<Duration, BallastError> {
    Duration::try_from_secs_f64(given).map_err(|error| BallastError::invalid(format!("{given} s: {error}")))
}

fn options(reading: &str, callback: Option<Py<PyAny>>) -> Result<GetOptions, BallastError> {
    let Reading { holder, lease_ttl_ms, verify } = read_json("how to read", reading)?;
    let verify = match verify.as_str() {
        "auto" => Verify::Auto,
        "always" => Verify::Always,
        "never" => Verify::Never,
        other => return Err(BallastError::invalid(format!("verify is {other:?}; auto, always or never"))),
    };
    Ok(GetOptions { holder, lease_ttl_ms, verify, progress: progress(callback) })
}

fn shards(tensors: &str) -> Result<Source, BallastError> {
    let tensors: Vec<TensorText> = read_json("the snapshot", tensors)?;
    let sharded = tensors.into_iter().map(|tensor| ShardedTensor {
        name: tensor.name,
        dtype: tensor.dtype,
        shape: tensor.shape,
        aliases: tensor.aliases,
        layer_id: tensor.layer_id,
        expert_id: tensor.expert_id,
        parallel_axes: tensor.parallel_axes,
        fragments: tensor.fragments,
    });
    Source::from_shards(sharded.collect())
}

/// Where a put's bytes come from: tensors that come later (JSON), or a file or folder.
async fn source(tensors: Option<String>, path: Option<PathBuf>) -> Result<Source, BallastError> {
    match (tensors, path) {
        (Some(tensors), None) => shards(&tensors),
        (None, Some(path)) => {
            let opened = tokio::task::spawn_blocking(move || safetensors::open(&path)).await;
            let opened =
                opened.map_err(|error| BallastError::invalid(format!("reading the headers failed: {error}")))?;
            Ok(opened?)
        }
        _ => Err(BallastError::invalid("give either tensors or a path")),
    }
}

fn report(report: &GetReport) -> Value {
    json!({
        "revision": report.revision,
        "manifest": String::from_utf8_lossy(&report.manifest.to_canonical_bytes()),
        "bytes": report.bytes,
        "hot_bytes": report.hot_bytes,
        "cold_bytes": report.cold_bytes,
        "seconds": report.elapsed.as_secs_f64(),
        "transport": report.transport.map(|transport| transport.to_string()),
        "why_not_rdma": report.why_not_rdma,
        "files": report.files,
    })
}

impl Client {
    /// What was read, or why not, with the generations that are there where this one is not.
    async fn explained<T>(
        &self,
        identity: &RevisionIdentity,
        read: Result<T, BallastError>,
    ) -> Result<T, BallastError> {
        match read {
            Err(error) => Err(explain_missing(&self.store, identity, error).await),
            read => read,
        }
    }
}

#[pymethods]
impl Client {
    /// Connects. `callback` hears of requests that are sent again.
    #[new]
    #[pyo3(signature = (connecting, callback=None, cancel=None))]
    fn new(py: Python<'_>, connecting: &str, callback: Option<Py<PyAny>>, cancel: Option<&Cancel>) -> PyResult<Self> {
        let connecting: Connecting = read_json("how to connect", connecting).map_err(|error| raise(py, &error))?;
        let Connecting { nats, name, tenant, route, connect_seconds, request_seconds, default_policy } = connecting;
        let gateway = wait(py, None, cancel, async move {
            let mut options = ConnectOptions::new(nats);
            options.name = name.unwrap_or(options.name);
            options.tenant = TenantId::new(&tenant).map_err(|error| BallastError::invalid(error.to_string()))?;
            options.connect_patience = seconds(connect_seconds)?;
            options.request_deadline = seconds(request_seconds)?;
            options.route = match route.as_str() {
                "best" => Route::Best,
                "unix" => Route::Unix,
                "rdma" => Route::Rdma,
                "tcp" => Route::Tcp,
                other => return Err(BallastError::invalid(format!("route is {other:?}; best, unix, rdma or tcp"))),
            };
            options.waiting = progress(callback);
            options.address_flag = "nats= (or BALLAST_NATS)";
            Gateway::connect(&options).await
        })?;
        let store = match default_policy {
            Some(policy) => WeightStore::with_default_policy(gateway.clone(), policy),
            None => WeightStore::new(gateway.clone()),
        };
        Ok(Self { gateway, store })
    }

    /// Calls a verb with a JSON body; answers the reply's JSON.
    #[pyo3(signature = (tenant, verb, body, cancel=None))]
    fn call(&self, py: Python<'_>, tenant: &str, verb: &str, body: &str, cancel: Option<&Cancel>) -> PyResult<String> {
        wait(py, Some(&self.gateway), cancel, async {
            let tenant = TenantId::new(tenant).map_err(|error| BallastError::invalid(error.to_string()))?;
            let body: Value = read_json("the request", body)?;
            let reply: Value = self.gateway.call(&tenant, verb, &body).await?;
            to_json(&reply)
        })
    }

    /// Begins a put.
    #[pyo3(signature = (identity, tensors, path, policy, sharing=None, callback=None, cancel=None))]
    #[expect(clippy::too_many_arguments, reason = "one for each of the caller's")]
    fn put(
        &self,
        py: Python<'_>,
        identity: &str,
        tensors: Option<String>,
        path: Option<PathBuf>,
        policy: Option<&str>,
        sharing: Option<&str>,
        callback: Option<Py<PyAny>>,
        cancel: Option<&Cancel>,
    ) -> PyResult<Writer> {
        let writer = wait(py, Some(&self.gateway), cancel, async {
            let identity: RevisionIdentity = read_json("the identity", identity)?;
            let policy = policy.map(|policy| read_json("the policy", policy)).transpose()?;
            let source = source(tensors, path).await?;
            let source = match Sharing::read(sharing)? {
                None => source,
                // Without participants to declare it joins those that another put has declared.
                Some(Sharing { participants, participant: Some(own), session: Some(session), .. })
                    if participants.is_empty() =>
                {
                    let joined =
                        PartWriter::join(&self.store, source, &identity, &session, &own, progress(callback)).await;
                    return joined.map(Put::part);
                }
                Some(sharing) => sharing.coordinated(source)?,
            };
            self.store.weight_put(source, &identity, policy, progress(callback)).await.map(Put::whole)
        })?;
        Ok(Writer::new(self.gateway.clone(), writer))
    }

    /// Begins a replacement.
    #[pyo3(signature = (replacing, tensors, path, policy, sharing=None, callback=None, cancel=None))]
    #[expect(clippy::too_many_arguments, reason = "one for each of the caller's")]
    fn upsert(
        &self,
        py: Python<'_>,
        replacing: &str,
        tensors: Option<String>,
        path: Option<PathBuf>,
        policy: Option<&str>,
        sharing: Option<&str>,
        callback: Option<Py<PyAny>>,
        cancel: Option<&Cancel>,
    ) -> PyResult<Writer> {
        let writer = wait(py, Some(&self.gateway), cancel, async {
            let replacing: Replacing = read_json("the replacement", replacing)?;
            let policy = policy.map(|policy| read_json("the policy", policy)).transpose()?;
            let source = source(tensors, path).await?;
            let source = match Sharing::read(sharing)? {
                None => source,
                Some(sharing) => sharing.coordinated(source)?,
            };
            let Replacing { base, target_generation, expected_metadata_generation, mode, request_id, wait_completed } =
                replacing;
            let options = UpsertOptions { mode, policy, request_id, wait_completed };
            let progress = progress(callback);
            let begun = self.store.weight_upsert(
                source,
                &base,
                target_generation,
                expected_metadata_generation,
                options,
                progress,
            );
            begun.await.map(Put::whole)
        })?;
        Ok(Writer::new(self.gateway.clone(), writer))
    }

    /// Applies sparse deltas; answers the report of the upsert as JSON. The caller keeps the members until this returns.
    #[pyo3(signature = (replacing, deltas, semantics, policy, callback=None, cancel=None))]
    #[expect(clippy::too_many_arguments, reason = "one for each of the caller's")]
    fn delta(
        &self,
        py: Python<'_>,
        replacing: &str,
        deltas: Vec<DeltaText>,
        semantics: &str,
        policy: Option<&str>,
        callback: Option<Py<PyAny>>,
        cancel: Option<&Cancel>,
    ) -> PyResult<String> {
        wait(py, Some(&self.gateway), cancel, async {
            let Changing { base, expected_metadata_generation, request_id, wait_completed } =
                read_json("the replacement", replacing)?;
            let policy = policy.map(|policy| read_json("the policy", policy)).transpose()?;
            let semantics = match semantics {
                "overwrite" => Semantics::Overwrite,
                "additive" => Semantics::Additive,
                other => {
                    return Err(BallastError::invalid(format!("semantics is {other:?}; overwrite or additive")));
                }
            };
            let deltas = SparseDelta::read_all(&deltas.iter().map(object).collect::<Vec<_>>())?;
            let options = UpsertOptions { policy, request_id, wait_completed, ..UpsertOptions::default() };
            let progress = progress(callback);
            let applied = delta::upsert(
                &self.store,
                deltas.into(),
                semantics,
                &base,
                expected_metadata_generation,
                options,
                progress,
            );
            report_text(applied.await?)
        })
    }

    /// Reads into buffers; answers the report as JSON. The caller keeps the buffers until this returns.
    #[pyo3(signature = (identity, placement, participant, buffers, reading, callback=None, cancel=None))]
    #[expect(clippy::too_many_arguments, reason = "one for each of the caller's")]
    fn get(
        &self,
        py: Python<'_>,
        identity: &str,
        placement: Option<&Placement>,
        participant: Option<&str>,
        buffers: Vec<BufferText>,
        reading: &str,
        callback: Option<Py<PyAny>>,
        cancel: Option<&Cancel>,
    ) -> PyResult<String> {
        let placed = buffers.into_iter().map(|(tensor, participant, region, dtype, shape, address, nbytes)| {
            // SAFETY: the Python side holds the objects whose memory this is, which are writable, for as long as this call.
            let mut buffer = unsafe { PlacedBuffer::from_raw(tensor, address as *mut u8, nbytes) };
            (buffer.participant, buffer.region, buffer.dtype, buffer.shape) = (participant, region, dtype, shape);
            buffer
        });
        let buffers: Vec<PlacedBuffer<'_>> = placed.collect();
        wait(py, Some(&self.gateway), cancel, async {
            let identity: RevisionIdentity = read_json("the identity", identity)?;
            let options = options(reading, callback)?;
            let target = placement.map(|placement| placement.target(participant)).transpose()?;
            let target = GetTarget::Placed { target, buffers };
            to_json(&report(&self.explained(&identity, self.store.weight_get(&identity, target, options).await).await?))
        })
    }

    /// Reads into a folder; answers the report as JSON.
    #[pyo3(signature = (identity, path, overwrite, reading, callback=None, cancel=None))]
    #[expect(clippy::too_many_arguments, reason = "one for each of the caller's")]
    fn get_folder(
        &self,
        py: Python<'_>,
        identity: &str,
        path: PathBuf,
        overwrite: bool,
        reading: &str,
        callback: Option<Py<PyAny>>,
        cancel: Option<&Cancel>,
    ) -> PyResult<String> {
        wait(py, Some(&self.gateway), cancel, async {
            let identity: RevisionIdentity = read_json("the identity", identity)?;
            let options = options(reading, callback)?;
            let target = GetTarget::Directory { path: &path, overwrite };
            to_json(&report(&self.explained(&identity, self.store.weight_get(&identity, target, options).await).await?))
        })
    }

    /// Opens a revision in place.
    #[pyo3(signature = (identity, reading, callback=None, cancel=None))]
    fn open(
        &self,
        py: Python<'_>,
        identity: &str,
        reading: &str,
        callback: Option<Py<PyAny>>,
        cancel: Option<&Cancel>,
    ) -> PyResult<Opened> {
        let opened = wait(py, Some(&self.gateway), cancel, async {
            let identity: RevisionIdentity = read_json("the identity", identity)?;
            let opened = OpenRevision::open(&self.store, &identity, options(reading, callback)?).await;
            self.explained(&identity, opened).await
        })?;
        Ok(Opened::new(self.gateway.clone(), opened))
    }

    /// The identity that a short name stands for just now, as JSON.
    #[pyo3(signature = (name, cancel=None))]
    fn resolve(&self, py: Python<'_>, name: &str, cancel: Option<&Cancel>) -> PyResult<String> {
        wait(py, Some(&self.gateway), cancel, async { to_json(&resolve(&self.store, name).await?) })
    }

    /// The identity that a put without a generation takes, as JSON.
    #[pyo3(signature = (name, cancel=None))]
    fn next_generation(&self, py: Python<'_>, name: &str, cancel: Option<&Cancel>) -> PyResult<String> {
        wait(py, Some(&self.gateway), cancel, async {
            let (lineage, _) =
                LineageKey::parse_short_name(name).map_err(|error| BallastError::invalid(error.to_string()))?;
            to_json(&next_generation(&self.store, &lineage).await?)
        })
    }

    /// What a replacement of the newest READY generation needs, as JSON.
    #[pyo3(signature = (name, mode, cancel=None))]
    fn plan_replacement(&self, py: Python<'_>, name: &str, mode: &str, cancel: Option<&Cancel>) -> PyResult<String> {
        wait(py, Some(&self.gateway), cancel, async {
            let (lineage, generation) =
                LineageKey::parse_short_name(name).map_err(|error| BallastError::invalid(error.to_string()))?;
            let mode = UpsertMode::from_name(mode)
                .ok_or_else(|| BallastError::invalid(format!("mode {mode:?} is not PUT_FIRST or DELETE_FIRST")))?;
            let plan = plan_replacement(&self.store, &lineage, generation, mode).await?;
            to_json(&json!({
                "base": plan.base,
                "target_generation": plan.target_generation,
                "expected_metadata_generation": plan.expected_metadata_generation,
                "mode": plan.mode,
                "request_id": plan.request_id,
            }))
        })
    }

    /// Waits until a generation of the lineage that is at least `min_generation` is READY; answers its identity as JSON.
    #[pyo3(signature = (name, min_generation, timeout=None, cancel=None))]
    fn wait_ready(
        &self,
        py: Python<'_>,
        name: &str,
        min_generation: u64,
        timeout: Option<f64>,
        cancel: Option<&Cancel>,
    ) -> PyResult<String> {
        wait(py, Some(&self.gateway), cancel, async {
            let timeout = timeout.map(seconds).transpose()?;
            let deadline = timeout.map(|timeout| Instant::now() + timeout);
            let (lineage, generation) =
                LineageKey::parse_short_name(name).map_err(|error| BallastError::invalid(error.to_string()))?;
            let least = min_generation.max(generation.unwrap_or(0));
            // Followed before it is looked, so that nothing falls in between.
            let filter = EventFilter::Lineage(lineage.clone());
            let mut feed = EventFeed::follow(&self.gateway, filter, EventStart::New).await?;
            loop {
                match resolve(&self.store, &lineage.to_string()).await {
                    Ok(found) if found.weight_generation >= least => return to_json(&found),
                    Err(error) if error.code != ErrorCode::NotFound => return Err(error),
                    Ok(_) | Err(_) => {}
                }
                let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                if left.is_some_and(|left| left.is_zero()) {
                    let waited = timeout.unwrap_or_default().as_secs_f64();
                    let message = format!("no generation of {lineage} from {least} on became READY within {waited} s");
                    let details = json!({"lineage": lineage.to_string(), "min_generation": least});
                    return Err(BallastError::new(ErrorCode::NotReady, message).with_details(details));
                }
                let patience = left.map_or(LOOK_EVERY, |left| left.min(LOOK_EVERY));
                // An event or not, the store is looked at again.
                let _ = tokio::time::timeout(patience, feed.next()).await;
            }
        })
    }

    /// Waits until releases and aborts that go on in the background have ended, or `patience` seconds are over.
    fn settle(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        wait(py, None, None, async {
            self.gateway.settle(seconds(patience)?).await;
            Ok(())
        })
    }
}
