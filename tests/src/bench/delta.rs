//! A sparse delta beside the full upsert of the same generation: how much sooner it is READY, and how many of the bytes go over
//! the wire. A real server, a gateway and a node with its tiers, all in this process; client and node speak TCP.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_client::delta::{self, Members, Semantics, SparseDelta};
use ballast_client::{
    ConnectOptions, Gateway, GetOptions, GetTarget, Progress, Route, Source, TensorData, TensorSource, UpsertOptions,
    WeightStore,
};
use ballast_schemas::{Availability, BallastError, MigrationMode, RevisionIdentity};
use ballast_transfer::{HugePages, MemoryOptions};
use ballast_workers::{TransferWorker, TransferWorkerOptions, WorkflowWorker, WorkflowWorkerOptions};
use bytes::Bytes;
use rustix::mount::{UnmountFlags, unmount};
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::report::{Row, Runs, shown};
use super::site::{GatewayAtWork, Site};
use super::world::{name, node, policy};
use super::{Error, Options};

/// Of the elements.
const CHANGED_PERCENT: usize = 1;
const SPEED_UP: f64 = 5.0;
const WIRE_BYTES_PER_SECOND: u64 = 10_000_000_000 / 8;
/// How far a wire may run ahead of its speed: less than a timer can wait.
const WIRE_SLACK: Duration = Duration::from_millis(2);
/// Of the model's bytes.
const WIRE_SHARE: f64 = 0.03;
/// Columns of every tensor, and the side of a tile.
const COLUMNS: usize = 2048;
const TILE: usize = 256;
const READY_PATIENCE: Duration = Duration::from_secs(30);

pub(super) async fn measure(options: &Options) -> Result<Vec<Row>, Error> {
    let mut rows = vec![
        both_ways(options, None, "delta of 1 % until READY, no wire").await?,
        both_ways(options, Some(Relay::of(WIRE_BYTES_PER_SECOND)), "delta of 1 % until READY, 10 Gbit/s").await?,
    ];

    // Once more through a relay that only counts; nothing is timed there.
    let relay = Relay::default();
    let mut world = World::start(options, Some(relay.clone())).await?;
    world.put().await?;
    world.change();
    let before = relay.bytes();
    world.replace_by_delta().await?;
    let wire = (relay.bytes() - before) as f64;
    world.expect_content().await?;
    let bytes = world.model_bytes() as f64;
    world.stop().await?;

    rows.push(
        Row::cost("bytes of that delta over the wire", "MB", &Runs::new(vec![wire / 1e6]), bytes * WIRE_SHARE / 1e6)
            .against("3 % of the model, limit")
            .under(format!(
                "{bytes} bytes of BF16; counted both ways by a relay, {} % of the model",
                shown(wire / bytes * 100.0)
            )),
    );
    Ok(rows)
}

/// A full upsert and a delta in turns, through a relay or straight over the loopback.
async fn both_ways(options: &Options, relay: Option<Relay>, line: &str) -> Result<Row, Error> {
    let wire = if relay.is_some() {
        "through a relay that lets 10 Gbit/s pass each way, in this process too"
    } else {
        "over the loopback, which is no slower than the copies at its ends"
    };
    let mut world = World::start(options, relay).await?;
    let (mut full, mut delta) = (Vec::new(), Vec::new());
    world.put().await?;
    for _ in 0..options.runs {
        world.change();
        full.push(world.replace_in_full().await?.as_secs_f64());
        world.change();
        delta.push(world.replace_by_delta().await?.as_secs_f64());
    }
    world.expect_content().await?;
    let bytes = world.model_bytes();
    world.stop().await?;
    let full = Runs::new(full);
    Ok(Row::cost(line, "s", &Runs::new(delta), full.median()).against("full upsert").against_target(SPEED_UP).under(format!(
        "{bytes} bytes of BF16 in tensors of 32 MiB, {CHANGED_PERCENT} % of the elements of each; client, gateway and node in one process, \
         TCP {wire}; the full upsert took {} to {} s",
        shown(full.least()),
        shown(full.most())
    )))
}

/// A cluster of one node, and a model on it whose newest generation is known here too.
struct World {
    site: Site,
    gateway: GatewayAtWork,
    store: WeightStore,
    stop: watch::Sender<bool>,
    services: Vec<JoinHandle<Result<(), String>>>,
    _memory: Memory,
    /// The tensors as they are to be.
    tensors: Vec<Vec<u8>>,
    /// What was changed last: tensor by tensor, the entries sorted by tile, and their values.
    changes: Vec<(Vec<[u32; 2]>, Vec<u8>)>,
    generation: u64,
    dice: u64,
}

impl World {
    async fn start(options: &Options, relay: Option<Relay>) -> Result<Self, Error> {
        let site = Site::start(options).await?;
        let gateway = site.gateway_alone().await?;
        let stop = watch::Sender::new(false);
        let mut services = Vec::new();
        let memory = Memory::new()?;
        let port = free_port().await?;
        let advertised = match relay {
            Some(relay) => Some(relay.start(port).await?),
            None => None,
        };
        let node_options = TransferWorkerOptions {
            client: site.connect().await?,
            node: node(0),
            // Two generations, and room for the layout's rounding.
            memory: MemoryOptions {
                folder: memory.folder(),
                budget_bytes: options.delta_bytes * 2 + (64 << 20),
                huge_pages: HugePages::Auto,
            },
            cold: None,
            unix_socket: None,
            tcp_listen: Some(port.to_string()),
            tcp_advertise: advertised.map(|address| address.to_string()),
            labels: Default::default(),
        };
        let worker = TransferWorker::open(node_options).await?;
        services.push(tokio::spawn(ended(worker.run(told(&stop)))));
        let worker_options = WorkflowWorkerOptions {
            streams: site.streams.clone(),
            replica: gateway.replica.clone(),
            directory: gateway.directory.clone(),
            worker: name("bench-worker"),
            concurrency: 4,
        };
        let workflow = WorkflowWorker::new(worker_options)?;
        let shutdown = told(&stop);
        services.push(tokio::spawn(async move {
            workflow.run(shutdown).await;
            Ok(())
        }));
        let heard = gateway.directory.wait_for(READY_PATIENCE, |directory| directory.node(&node(0))).await;
        heard.ok_or("the gateway did not hear of the node")?;
        let connecting = ConnectOptions { route: Route::Tcp, ..ConnectOptions::new(site.server.url()) };
        let store = WeightStore::new(Gateway::connect(&connecting).await?);
        let tensor_bytes = (options.delta_bytes as usize).min(32 << 20);
        let mut world = Self {
            site,
            gateway,
            store,
            stop,
            services,
            _memory: memory,
            tensors: Vec::new(),
            changes: Vec::new(),
            generation: 1,
            dice: 88_172_645_463_325_252,
        };
        for _ in 0..options.delta_bytes as usize / tensor_bytes {
            let tensor: Vec<u8> = (0..tensor_bytes / 8).flat_map(|_| world.roll().to_le_bytes()).collect();
            world.tensors.push(tensor);
        }
        Ok(world)
    }

    fn roll(&mut self) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice
    }

    fn rows(&self) -> usize {
        self.tensors[0].len() / 2 / COLUMNS
    }

    fn model_bytes(&self) -> usize {
        self.tensors.iter().map(Vec::len).sum()
    }

    fn identity(&self) -> RevisionIdentity {
        RevisionIdentity::new("default", "default", "model", "main", self.generation).expect("a plain identity")
    }

    /// Gives one in a hundred elements of every tensor another value, spread over all of it.
    fn change(&mut self) {
        let rows = self.rows();
        self.changes.clear();
        for at in 0..self.tensors.len() {
            let (mut indices, mut values) = (Vec::new(), Vec::new());
            for top in (0..rows).step_by(TILE) {
                for left in (0..COLUMNS).step_by(TILE) {
                    for stratum in 0..TILE * TILE * CHANGED_PERCENT / 100 {
                        let within = stratum * 100 / CHANGED_PERCENT + self.roll() as usize % 100;
                        let place = [(top + within / TILE) as u32, (left + within % TILE) as u32];
                        let value = (self.roll() as u16).to_le_bytes();
                        indices.push(place);
                        values.extend(value);
                        let byte = (place[0] as usize * COLUMNS + place[1] as usize) * 2;
                        self.tensors[at][byte..byte + 2].copy_from_slice(&value);
                    }
                }
            }
            self.changes.push((indices, values));
        }
    }

    fn source(&self) -> Result<Source, BallastError> {
        let tensors = self.tensors.iter().enumerate().map(|(at, bytes)| TensorSource {
            name: format!("layer.{at:03}"),
            dtype: "BF16".into(),
            shape: vec![self.rows() as u64, COLUMNS as u64],
            aliases: Vec::new(),
            data: TensorData::Bytes(Bytes::copy_from_slice(bytes)),
        });
        Source::from_tensors(tensors.collect())
    }

    async fn put(&mut self) -> Result<(), Error> {
        let policy = policy(MigrationMode::Manual);
        let writer = self.store.weight_put(self.source()?, &self.identity(), Some(policy), Progress::none()).await?;
        writer.commit().await?;
        Ok(())
    }

    async fn replace_in_full(&mut self) -> Result<Duration, Error> {
        let (source, base) = (self.source()?, self.identity());
        let expected = self.store.weight_get_metadata(&base).await?.metadata.metadata_generation;
        let started = Instant::now();
        let next = self.generation + 1;
        let options = UpsertOptions::default();
        let writer = self.store.weight_upsert(source, &base, next, expected, options, Progress::none()).await?;
        writer.commit().await?;
        let taken = started.elapsed();
        self.retired(&base).await?;
        Ok(taken)
    }

    async fn replace_by_delta(&mut self) -> Result<Duration, Error> {
        let base = self.identity();
        let objects: Vec<(String, [Vec<u8>; 4])> = self.objects();
        let started = Instant::now();
        let described = objects.iter().map(|(metadata, [indices, values, tile_coords, tile_ptr])| {
            (metadata.as_str(), Members { indices, values, tile_coords, tile_ptr })
        });
        let deltas = SparseDelta::read_all(&described.collect::<Vec<_>>())?;
        let options = UpsertOptions::default();
        delta::upsert(&self.store, &deltas, Semantics::Overwrite, &base, None, options, Progress::none()).await?;
        let taken = started.elapsed();
        self.retired(&base).await?;
        Ok(taken)
    }

    /// The last changes as sparse objects: metadata and members.
    fn objects(&self) -> Vec<(String, [Vec<u8>; 4])> {
        let shape = [self.rows(), COLUMNS];
        let per_tile = TILE * TILE * CHANGED_PERCENT / 100;
        let object = |(at, (indices, values)): (usize, &(Vec<[u32; 2]>, Vec<u8>))| {
            let tile_columns = COLUMNS / TILE;
            let tiles = indices.len() / per_tile;
            let coords = (0..tiles).flat_map(|tile| [(tile / tile_columns) as u32, (tile % tile_columns) as u32]);
            let metadata = json!({
                "schema": "mooncake.sparse_object", "version": 1, "coordinate_space": "global",
                "tensor_id": format!("layer.{at:03}"), "global_shape": shape, "global_offset": [0, 0], "local_shape": shape,
                "tile_shape": [TILE, TILE], "base_generation": self.generation, "delta_generation": self.generation + 1,
                "index_dtype": "uint32", "value_dtype": "bfloat16", "apply": "overwrite",
                "members": {
                    "indices": {"dtype": "uint32", "shape": [indices.len(), 2]},
                    "values": {"dtype": "bfloat16", "shape": [indices.len()]},
                    "tile_coords": {"dtype": "uint32", "shape": [tiles, 2]},
                    "tile_ptr": {"dtype": "uint64", "shape": [tiles + 1]},
                },
            });
            let members = [
                indices.iter().flatten().flat_map(|index| index.to_le_bytes()).collect(),
                values.clone(),
                coords.flat_map(u32::to_le_bytes).collect(),
                (0..=tiles as u64).flat_map(|tile| (tile * per_tile as u64).to_le_bytes()).collect(),
            ];
            (metadata.to_string(), members)
        };
        self.changes.iter().enumerate().map(object).collect()
    }

    /// The base is gone, so that the next generation finds the same room.
    async fn retired(&mut self, base: &RevisionIdentity) -> Result<(), Error> {
        let deadline = Instant::now() + READY_PATIENCE;
        self.generation += 1;
        loop {
            let view = self.store.weight_get_metadata(base).await?;
            let status = self.gateway.directory.node(&node(0)).ok_or("the node is away")?;
            // Its status shows what is free a moment later.
            let free = status.memory_capacity_bytes - status.memory_used_bytes > self.model_bytes() as u64;
            if view.metadata.availability == Availability::Deleted && free {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("{base} was not retired: {}", view.metadata.availability).into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What is stored is what it was to become.
    async fn expect_content(&self) -> Result<(), Error> {
        let names: Vec<String> = (0..self.tensors.len()).map(|at| format!("layer.{at:03}")).collect();
        let mut found: Vec<Vec<u8>> = self.tensors.iter().map(|tensor| vec![0; tensor.len()]).collect();
        let buffers = names.into_iter().zip(found.iter_mut().map(Vec::as_mut_slice)).collect();
        self.store.weight_get(&self.identity(), GetTarget::Buffers(buffers), GetOptions::default()).await?;
        if found == self.tensors { Ok(()) } else { Err("what is stored is not what was published".into()) }
    }

    async fn stop(self) -> Result<(), Error> {
        self.stop.send_replace(true);
        for service in self.services {
            service.await??;
        }
        self.gateway.stop().await?;
        drop(self.site);
        Ok(())
    }
}

/// Resolves once it is told to stop.
fn told(stop: &watch::Sender<bool>) -> impl Future<Output = ()> + Send + use<> {
    let mut stop = stop.subscribe();
    async move {
        let _ = stop.wait_for(|stop| *stop).await;
    }
}

async fn ended<E: std::fmt::Display>(service: impl Future<Output = Result<(), E>>) -> Result<(), String> {
    service.await.map_err(|error| error.to_string())
}

/// Stands between clients and the node, counts what passes, both ways, and lets it pass no faster than a wire does.
#[derive(Clone, Default)]
struct Relay {
    bytes: Arc<AtomicU64>,
    /// Of a wire, for each way, when it is free again.
    wire: Option<Wire>,
}

#[derive(Clone)]
struct Wire {
    bytes_per_second: u64,
    free_at: [Arc<Mutex<Instant>>; 2],
}

impl Relay {
    fn of(bytes_per_second: u64) -> Self {
        let free_at = [(); 2].map(|()| Arc::new(Mutex::new(Instant::now())));
        Self { wire: Some(Wire { bytes_per_second, free_at }), ..Self::default() }
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Listens; answers where.
    async fn start(self, node: SocketAddr) -> Result<SocketAddr, Error> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(node) = TcpStream::connect(node).await else { continue };
                let ((from_client, to_client), (from_node, to_node)) = (client.into_split(), node.into_split());
                tokio::spawn(self.clone().pump(0, from_client, to_node));
                tokio::spawn(self.clone().pump(1, from_node, to_client));
            }
        });
        Ok(address)
    }

    async fn pump(self, way: usize, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
        let mut piece = vec![0; 256 << 10];
        loop {
            // An end that is gone ends the other one; the measurement fails by itself if it was too early.
            let Ok(bytes) = from.read(&mut piece).await else { return };
            if bytes == 0 {
                return;
            }
            if let Some(wire) = &self.wire {
                wire.carry(way, bytes).await;
            }
            if to.write_all(&piece[..bytes]).await.is_err() {
                return;
            }
            self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

impl Wire {
    /// Waits until the wire has carried this, after what others have given it before.
    async fn carry(&self, way: usize, bytes: usize) {
        let now = Instant::now();
        let done = {
            let mut free_at = self.free_at[way].lock().expect("nobody panics with it");
            *free_at = (*free_at).max(now) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
            *free_at
        };
        if done > now + WIRE_SLACK {
            tokio::time::sleep_until(done.into()).await;
        }
    }
}

async fn free_port() -> Result<SocketAddr, Error> {
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?)
}

/// The folder of a memory tier, on which the node mounts a tmpfs of huge pages where it may.
struct Memory(TempDir);

impl Memory {
    fn new() -> Result<Self, Error> {
        Ok(Self(tempfile::Builder::new().prefix("ballast-bench-").tempdir_in("/dev/shm")?))
    }

    fn folder(&self) -> std::path::PathBuf {
        self.0.path().join("tier")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Where nothing was mounted there is nothing to unmount.
        let _ = unmount(self.folder(), UnmountFlags::DETACH);
    }
}
