//! Weights in another shape than they were saved in: how fast they come, and how long it takes to plan.

use std::sync::Arc;
use std::time::Instant;

use ballast_client::reshard::{Limits, PlanSource, PlanTarget, plan};
use ballast_client::{
    GetOptions, GetTarget, PlacedBuffer, Progress, Route, ShardedTensor, Source, Transport, WeightStore,
};
use ballast_schemas::manifest::{AxisKind, Manifest, ManifestPlan, ParallelAxis, PlannedTensor, Tensor};
use ballast_schemas::placement::{AxisSizes, ParallelTopology, Placement, PlacementIdentity};
use ballast_schemas::{MigrationMode, RevisionIdentity};

use super::cluster::Cluster;
use super::report::{Row, Runs, on_core};
use super::world::policy;
use super::{Error, Options};

/// BF16, 64 MiB each.
const SHAPE: [u64; 3] = [64, 512, 1024];
const ITEM_BYTES: u64 = 2;
const SAVED: u32 = 4;
const LOADED: u32 = 8;
/// Beside a plain copy of the same bytes: rows that stay whole, and rows that are cut.
const SAME_DIM_GOAL: f64 = 0.7;
const OTHER_DIM_GOAL: f64 = 0.4;
const PLAN_SECONDS: f64 = 0.5;

pub(super) async fn measure(options: &Options) -> Result<Vec<Row>, Error> {
    let mut rows = executed(options).await?;
    rows.extend(planned(options)?);
    Ok(rows)
}

/// What a tensor is called.
fn name(at: usize) -> String {
    format!("model.layers.{at}.mlp.experts.weight")
}

fn split(dim: u32) -> Vec<ParallelAxis> {
    vec![ParallelAxis::Split { kind: AxisKind::Tp, dim }]
}

fn tensor(at: usize, shape: &[u64], dim: u32) -> Tensor {
    let plain = Tensor::plain(name(at), "BF16", ITEM_BYTES, shape.to_vec());
    Tensor { shard_dims: vec![dim], parallel_axes: split(dim), ..plain }
}

/// Tensors split over `ranks` along one dimension.
fn placement(
    identity: &RevisionIdentity,
    count: usize,
    shape: &[u64],
    ranks: u32,
    dim: u32,
) -> Result<Placement, Error> {
    let identity = PlacementIdentity {
        resource_id: identity.resource_id.to_string(),
        revision: identity.revision.to_string(),
        weight_generation: identity.weight_generation,
        placement_set_id: "bench".to_owned(),
    };
    let topology = ParallelTopology::grid(AxisSizes { dp: 1, pp: 1, ep: 1, tp: ranks })?;
    let tensors: Vec<Arc<Tensor>> = (0..count).map(|at| Arc::new(tensor(at, shape, dim))).collect();
    Ok(Placement::from_axes(identity, topology, &tensors, |_, _| true)?)
}

/// First element and extent of each rank's box along dimension 0.
fn boxes(shape: &[u64], ranks: u32) -> Vec<(Vec<u64>, Vec<u64>)> {
    let each = shape[0] / u64::from(ranks);
    let one = |rank: u32| {
        let (mut offset, mut extent) = (vec![0; shape.len()], shape.to_vec());
        (offset[0], extent[0]) = (each * u64::from(rank), each);
        (offset, extent)
    };
    (0..ranks).map(one).collect()
}

/// A model saved by four ranks, read by eight: into their buffers in one process, from the memory of the node.
async fn executed(options: &Options) -> Result<Vec<Row>, Error> {
    let tensor_bytes = SHAPE.iter().product::<u64>() * ITEM_BYTES;
    let count = options.model_bytes.div_ceil(tensor_bytes).max(1) as usize;
    let total = tensor_bytes * count as u64;
    let cluster = Cluster::start(options, 2 * total + (256 << 20)).await?;
    let store = WeightStore::new(cluster.connect(Route::Best).await?);
    let identity = RevisionIdentity::new("default", "default", "resharded", "main", 1)?;
    let saved = (0..count).map(|at| ShardedTensor {
        name: name(at),
        dtype: "BF16".to_owned(),
        shape: SHAPE.to_vec(),
        aliases: Vec::new(),
        layer_id: None,
        expert_id: None,
        parallel_axes: split(0),
        fragments: boxes(&SHAPE, SAVED),
    });
    let source = Source::from_shards(saved.collect())?;
    let policy = Some(policy(MigrationMode::Manual));
    let mut writer = store.weight_put(source, &identity, policy, Progress::none()).await?;
    let noise: Vec<u8> = (0..total / count as u64 / u64::from(SAVED)).map(|at| (at % 251) as u8).collect();
    for at in 0..count {
        for (offset, extent) in boxes(&SHAPE, SAVED) {
            writer.put_fragment(&name(at), &offset, &extent, &noise).await?;
        }
    }
    writer.commit().await?;
    // Touched before anything is measured, as a serving process has its buffers.
    let (mut from, mut to) = (vec![1_u8; total as usize], vec![2_u8; total as usize]);
    copy(&from, &mut to);
    let mut rows = Vec::new();
    for (dim, goal) in [(0, SAME_DIM_GOAL), (1, OTHER_DIM_GOAL), (2, OTHER_DIM_GOAL)] {
        let placement = placement(&identity, count, &SHAPE, LOADED, dim)?;
        let (mut ours, mut plain, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for run in 0..=options.runs {
            let started = Instant::now();
            copy(&from, &mut to);
            let copied = total as f64 / started.elapsed().as_secs_f64() / 1e9;
            let target = GetTarget::Placed {
                target: Some(PlanTarget::Whole(&placement)),
                buffers: buffers(&placement, &mut to),
            };
            let started = Instant::now();
            let report = store.weight_get(&identity, target, GetOptions::default()).await?;
            let read = total as f64 / started.elapsed().as_secs_f64() / 1e9;
            if report.hot_bytes != total || report.transport != Some(Transport::Local) {
                return Err(format!(
                    "read {} of {total} bytes from memory, by {:?}",
                    report.hot_bytes, report.transport
                )
                .into());
            }
            // The first one makes the plan.
            if run > 0 {
                ours.push(read);
                plain.push(copied);
                ratios.push(read / copied);
            }
        }
        check(&placement, &to, &noise)?;
        // What is copied from is not always the same memory.
        from.iter_mut().step_by(4096).for_each(|byte| *byte ^= 1);
        rows.push(
            Row::rate(format!("reshard TP{SAVED} on dim 0 to TP{LOADED} on dim {dim}"), "GB/s", &Runs::new(ours), Runs::new(plain).median())
                .against("a plain copy")
                .against_target(goal)
                .with_ratio(Runs::new(ratios).median())
                .under(format!(
                    "{count} tensors of BF16 {SHAPE:?}, HOT on this host, by shared memory: lease, mapping, copy, lease confirmed; the copy on as many threads; ratios run by run"
                )),
        );
    }
    Ok(rows)
}

/// A piece of `memory` for every box of every rank.
fn buffers<'a>(placement: &Placement, mut memory: &'a mut [u8]) -> Vec<PlacedBuffer<'a>> {
    let mut buffers = Vec::new();
    for part in placement.parts() {
        for fragment in part.fragments() {
            let (buffer, rest) = memory.split_at_mut(fragment.nbytes as usize);
            memory = rest;
            let mut buffer = PlacedBuffer::new(fragment.tensor_id(), buffer);
            buffer.participant = Some(part.participant().participant_id.clone());
            buffer.region = Some((fragment.global_offset.clone(), fragment.local_shape.clone()));
            buffers.push(buffer);
        }
    }
    buffers
}

/// Every byte against what each rank saved, which was the same for all.
fn check(placement: &Placement, mut memory: &[u8], saved: &[u8]) -> Result<(), Error> {
    let [_, rows, columns] = SHAPE;
    for fragment in placement.parts().iter().flat_map(|part| part.fragments()) {
        let (buffer, rest) = memory.split_at(fragment.nbytes as usize);
        memory = rest;
        let (from, extent) = (&fragment.global_offset, &fragment.local_shape);
        let places = (0..extent[0]).flat_map(|plane| (0..extent[1]).map(move |row| (plane, row)));
        for ((plane, row), found) in places.zip(buffer.chunks((extent[2] * ITEM_BYTES) as usize)) {
            let at = ((from[0] + plane) * rows + from[1] + row) * columns + from[2];
            let at = (at * ITEM_BYTES) as usize % saved.len();
            if saved[at..at + found.len()] != *found {
                return Err(
                    format!("{} at {from:?} has other bytes in row {row} of {plane}", fragment.tensor_id()).into()
                );
            }
        }
    }
    Ok(())
}

/// A plain copy with as many threads as there are processors.
fn copy(from: &[u8], to: &mut [u8]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = from.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(each).zip(to.chunks_mut(each)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

/// How long it takes to plan for a model of many tensors.
fn planned(options: &Options) -> Result<Vec<Row>, Error> {
    const SHAPE: [u64; 2] = [64, 64];
    let count = options.planned_tensors;
    let identity = RevisionIdentity::new("default", "default", "many", "main", 1)?;
    let tensors = (0..count).map(|at| PlannedTensor {
        tensor: tensor(at, &SHAPE, 0),
        aliases: Vec::new(),
        fragments: boxes(&SHAPE, SAVED),
    });
    let manifest = ManifestPlan::new(&identity, tensors.collect(), Vec::new())?;
    let units = vec![0; manifest.unit_count() as usize];
    let manifest = manifest.seal(&units)?;
    let bytes = manifest.to_canonical_bytes();
    let placement = placement(&identity, count, &SHAPE, LOADED, 0)?;
    let one = placement.parts()[0].participant().participant_id.clone();
    let (mut parsing, mut local, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    let (mut local_regions, mut whole_regions) = (0, 0);
    for _ in 0..options.runs {
        let before = on_core();
        let parsed = Manifest::parse(&bytes)?;
        parsing.push((on_core() - before).as_secs_f64());
        let timed = |target: PlanTarget<'_>| -> Result<(f64, usize), Error> {
            let before = on_core();
            let made = plan(PlanSource::Stored(&parsed), target, &Limits::default())?;
            Ok(((on_core() - before).as_secs_f64(), made.regions().len()))
        };
        let (seconds, regions) = timed(PlanTarget::Local(&placement, &one))?;
        local.push(seconds);
        local_regions = regions;
        let (seconds, regions) = timed(PlanTarget::Whole(&placement))?;
        whole.push(seconds);
        whole_regions = regions;
    }
    let under = format!("{count} tensors saved by TP{SAVED}; one thread, time on its core");
    Ok(vec![
        Row::cost(format!("plan of one rank of TP{LOADED}"), "s", &Runs::new(local), PLAN_SECONDS)
            .under(format!("{under}; {local_regions} regions")),
        Row::cost(format!("plan of all ranks of TP{LOADED}"), "s", &Runs::new(whole), PLAN_SECONDS)
            .under(format!("{under}; {whole_regions} regions")),
        Row::cost("manifest parsed and checked", "s", &Runs::new(parsing), PLAN_SECONDS)
            .under(format!("{under}; {} bytes", bytes.len())),
    ])
}
