//! What resharding costs beside a plain copy of the same bytes in the same run, and how long planning takes.
//!
//! `cargo run --release -p ballast-client --example reshard_bench [MiB]`
//!
//! Figures are the best of several rounds, on one thread and on all; every page was touched before, sources and targets
//! are as many buffers as the two placements have shards. GB/s counts the bytes copied once.

use std::sync::Arc;
use std::time::Instant;

use ballast_client::reshard::{
    Coalescing, CopyOptions, Limits, PlanSource, PlanTarget, SourceFragment, Targets, WirePlan, copy_mapped, plan,
};
use ballast_schemas::RevisionIdentity;
use ballast_schemas::manifest::{AxisKind, Manifest, ManifestPlan, ParallelAxis, PlannedTensor, Tensor};
use ballast_schemas::placement::{AxisSizes, ParallelTopology, Placement, PlacementIdentity};

const ROUNDS: u32 = 5;

fn split(tensor: &Tensor, dim: u32) -> Tensor {
    let mut split = tensor.clone();
    split.parallel_axes = vec![ParallelAxis::Split { kind: AxisKind::Tp, dim }];
    split.shard_dims = vec![dim];
    split
}

/// The tensors stored in `parts` equal slices along a dimension.
fn stored(tensors: &[Tensor], parts: u64, dim: usize) -> Manifest {
    let slices = |tensor: &Tensor| {
        let length = tensor.global_shape[dim].div_ceil(parts);
        let slice = |part: u64| {
            let (mut offset, mut shape) = (vec![0; tensor.global_shape.len()], tensor.global_shape.clone());
            offset[dim] = part * length;
            shape[dim] = length.min(tensor.global_shape[dim] - part * length);
            (offset, shape)
        };
        PlannedTensor { tensor: tensor.clone(), aliases: vec![], fragments: (0..parts).map(slice).collect() }
    };
    let identity = RevisionIdentity::new("default", "default", "model", "main", 1).expect("a valid name");
    let planned = ManifestPlan::new(&identity, tensors.iter().map(slices).collect(), vec![]).expect("a valid model");
    let checksums = vec![0; planned.unit_count() as usize];
    planned.seal(&checksums).expect("one checksum for each unit")
}

/// The tensors split over `tp` ranks along a dimension.
fn wanted(tensors: &[Tensor], tp: u32, dim: u32) -> Placement {
    let identity = PlacementIdentity {
        resource_id: "model".into(),
        revision: "main".into(),
        weight_generation: 1,
        placement_set_id: "bench".into(),
    };
    let topology = ParallelTopology::grid(AxisSizes { tp, ..Default::default() }).expect("a valid grid");
    let tensors: Vec<_> = tensors.iter().map(|tensor| Arc::new(split(tensor, dim))).collect();
    Placement::from_axes(identity, topology, &tensors, |_, _| true).expect("a valid placement")
}

/// Bytes per second of the fastest of several rounds.
fn best(bytes: usize, mut round: impl FnMut()) -> f64 {
    let time = |_| {
        let started = Instant::now();
        round();
        started.elapsed().as_secs_f64()
    };
    bytes as f64 / (0..ROUNDS).map(time).fold(f64::INFINITY, f64::min)
}

/// A plain copy of as many buffers as there are targets, by so many threads.
fn plain_copy(source: &[u8], targets: &mut [Vec<u8>], threads: usize) {
    let mut at = 0;
    let mut pairs: Vec<(&[u8], &mut [u8])> = Vec::new();
    for target in targets {
        let next = at + target.len();
        pairs.push((&source[at..next], target));
        at = next;
    }
    if threads == 1 {
        return pairs.iter_mut().for_each(|(source, target)| target.copy_from_slice(source));
    }
    let each = pairs.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for pairs in pairs.chunks_mut(each) {
            scope.spawn(move || pairs.iter_mut().for_each(|(source, target)| target.copy_from_slice(source)));
        }
    });
}

fn measure(name: &str, tensor: &Tensor, from: usize, to: u32, total: usize) {
    let tensors = std::slice::from_ref(tensor);
    let (manifest, placement) = (stored(tensors, 4, from), wanted(tensors, 8, to));
    let plan = plan(PlanSource::Stored(&manifest), PlanTarget::Whole(&placement), &Limits::default()).expect("a plan");
    let source: Vec<u8> = (0..total).map(|at| (at * 2_654_435_761) as u8).collect();
    let mut buffers: Vec<Vec<u8>> = plan.targets().iter().map(|target| vec![1; target.nbytes as usize]).collect();
    let piece = total / 4;
    let bytes = |fragment: &SourceFragment| {
        let at = plan.sources().iter().position(|other| std::ptr::eq(other, fragment))?;
        Some(&source[at * piece..(at + 1) * piece])
    };
    let region = &plan.regions()[0];
    print!("{name:<22} runs of {:>9} B", region.inner_bytes);
    for threads in [1, std::thread::available_parallelism().map_or(1, usize::from)] {
        let plain = best(total, || plain_copy(&source, &mut buffers, threads));
        let slices = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let mut targets = Targets::new(&plan, slices).expect("buffers of the right sizes");
        let options = CopyOptions { threads, ..Default::default() };
        let reshard = best(total, || {
            copy_mapped(&plan, bytes, &mut targets, &options).expect("copied");
        });
        print!(
            "   {threads} thread(s): {:>5.2} GB/s, copy {:>5.2} GB/s, {:.2}x",
            reshard / 1e9,
            plain / 1e9,
            reshard / plain
        );
    }
    println!();
}

fn planning(tensors: u64) {
    let model: Vec<Tensor> = (0..tensors)
        .map(|n| {
            Tensor::plain(
                format!("model.layers.{:03}.mlp.experts.{:04}.w", n / 1000, n % 1000),
                "BF16",
                2,
                vec![64, 32],
            )
        })
        .collect();
    let (manifest, placement) = (stored(&model, 4, 0), wanted(&model, 8, 0));
    let crossing = wanted(&model, 8, 1);
    let time = |name: &str, target: PlanTarget<'_>| {
        let mut fastest = f64::INFINITY;
        let mut regions = 0;
        for _ in 0..ROUNDS {
            let started = Instant::now();
            let made = plan(PlanSource::Stored(&manifest), target, &Limits::default());
            fastest = fastest.min(started.elapsed().as_secs_f64());
            match made {
                Ok(made) => regions = made.regions().len(),
                Err(error) => return println!("plan {name}: {error}"),
            }
        }
        println!("plan {name}: {tensors} tensors, {regions} regions in {:.0} ms", fastest * 1e3);
    };
    time("TP4 -> TP8 dim 0, all ranks", PlanTarget::Whole(&placement));
    time("TP4 -> TP8 dim 0, one rank", PlanTarget::Local(&placement, "dp0-pp0-ep0-tp3"));
    time("TP4 dim 0 -> TP8 dim 1, one rank", PlanTarget::Local(&crossing, "dp0-pp0-ep0-tp3"));
    time("TP4 dim 0 -> TP8 dim 1, all ranks", PlanTarget::Whole(&crossing));
    let local = PlanTarget::Local(&crossing, "dp0-pp0-ep0-tp3");
    let local = plan(PlanSource::Stored(&manifest), local, &Limits::default()).expect("planned before");
    let started = Instant::now();
    let wire = WirePlan::new(&local, |_| true, &Coalescing::default(), &Limits::default()).expect("reads");
    println!(
        "lower the last but one to the wire: {} reads, {} ranges, {:.2}x the bytes, in {:.0} ms",
        wire.reads().len(),
        wire.segments(),
        wire.bytes() as f64 / local.bytes() as f64,
        started.elapsed().as_secs_f64() * 1e3
    );
}

fn main() {
    let mebibytes: usize = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1024);
    let total = mebibytes << 20;
    let rows = total as u64 / 2 / 4096 / 64;
    let tensor = Tensor::plain("w", "BF16", 2, vec![64, rows, 4096]);
    for (from, to) in [(0, 0), (0, 1), (0, 2), (2, 0), (2, 2)] {
        measure(&format!("TP4 dim {from} -> TP8 dim {to}"), &tensor, from, to, total);
    }
    planning(100_000);
}
