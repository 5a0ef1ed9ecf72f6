//! What does not slow down with the number of revisions: a list page, a lease command, a tick of the memory pressure.

use std::hint::black_box;
use std::time::Duration;

use ballast_schemas::{
    Command, ListRequest, MigrationMode, MigrationTrigger, RelievePressure, Reply, RevisionIdentity, TenantId,
};
use ballast_workflows::State;

use super::report::{Row, Runs, on_core};
use super::world::{MODEL_BYTES, World, acquire, identity, node, release, uuid_of};
use super::{Error, Options};

/// A tree of a million is twice as deep as one of a thousand; a scan would take a thousand times as long.
const GOAL: f64 = 0.5;
const NODES: usize = 20;
const LOOKS: usize = 2_000;
/// Revisions that are in use, whatever the others are: leased, or on the pages that are asked for.
const IN_USE: usize = 1_000;
const PAGE: usize = 100;
/// Revisions that one tick moves a step colder.
const MOVED: u64 = 16;

/// Microseconds of one of each.
struct Figures {
    page: Vec<f64>,
    any_page: Vec<f64>,
    lease: Vec<f64>,
    any_lease: Vec<f64>,
    plan: Vec<f64>,
    tick: Vec<f64>,
}

pub(super) fn measure(options: &Options) -> Result<Vec<Row>, Error> {
    let few = figures(options.few_revisions, options)?;
    let many = figures(options.many_revisions, options)?;
    let row = |what: &str, many: Vec<f64>, few: Vec<f64>, how: &str| {
        Row::cost(what, "us", &Runs::new(many), Runs::new(few).median())
            .against(format!("among {}", options.few_revisions))
            .against_target(GOAL)
            .under(format!(
                "{how}; one thread, time on its core; {} revisions beside {}",
                options.many_revisions, options.few_revisions
            ))
    };
    Ok(vec![
        row("list page of 100", many.page, few.page, "1,000 revisions page by page, again and again"),
        row("list page of 100 that begins anywhere", many.any_page, few.any_page, "not asked for lately").explaining(),
        row(
            "lease command",
            many.lease,
            few.lease,
            "on 1,000 revisions in use: an envelope of one command, granted and released in turns",
        ),
        row("lease command on any revision", many.any_lease, few.any_lease, "not touched lately").explaining(),
        row("AUTO tick that looks", many.plan, few.plan, "State::plan_round"),
        row("AUTO tick that moves 16", many.tick, few.tick, "RelievePressure folded, each on another node"),
    ])
}

fn figures(revisions: usize, options: &Options) -> Result<Figures, Error> {
    let mut world = World::with(revisions, NODES, MigrationMode::Auto)?;
    world.come_to_rest()?;
    let mut found = Figures {
        page: Vec::new(),
        any_page: Vec::new(),
        lease: Vec::new(),
        any_lease: Vec::new(),
        plan: Vec::new(),
        tick: Vec::new(),
    };
    let places = |place: &dyn Fn(usize) -> usize| (0..LOOKS).map(|n| identity(place(n))).collect::<Vec<_>>();
    // All over the order of identities, which makes it hard.
    let scattered = |n: usize| n.wrapping_mul(7_919 * 7_907) % revisions;
    let in_use = places(&|n| scattered(n % IN_USE));
    let pages_in_use = places(&|n| scattered(n % (IN_USE / PAGE)));
    // The first time makes them those in use.
    for run in 0..=options.runs {
        let (page, lease) = (pages(&world.state, &pages_in_use)?, leases(&mut world, &in_use, run)?);
        if run > 0 {
            found.page.push(page);
            found.lease.push(lease);
        }
        found.plan.push(plans(&world.state));
    }
    for run in options.runs + 1..=2 * options.runs {
        let anywhere = places(&|n| scattered(run * LOOKS + n));
        found.any_page.push(pages(&world.state, &anywhere)?);
        found.any_lease.push(leases(&mut world, &anywhere, run)?);
    }
    // A node is at rest again only after a while, so that every tick is on another one.
    for n in 0..NODES {
        found.tick.push(tick(&mut world, n)?);
    }
    Ok(found)
}

fn each(time: Duration, count: usize) -> f64 {
    time.as_secs_f64() * 1e6 / count as f64
}

fn pages(state: &State, places: &[RevisionIdentity]) -> Result<f64, Error> {
    let tenant = TenantId::default_tenant();
    let tokens = places
        .iter()
        .map(|at| [at.namespace.as_str(), at.resource_id.as_str(), at.revision.as_str(), "1"].join("\u{1f}"));
    let requests = tokens.map(|page_token| {
        let request: ListRequest =
            serde_json::from_value(serde_json::json!({"limit": PAGE, "page_token": page_token}))?;
        Ok(request)
    });
    let requests = requests.collect::<Result<Vec<ListRequest>, Error>>()?;
    let before = on_core();
    for request in &requests {
        black_box(state.list(&tenant, request)?);
    }
    Ok(each(on_core() - before, requests.len()))
}

fn leases(world: &mut World, places: &[RevisionIdentity], run: usize) -> Result<f64, Error> {
    let ids: Vec<String> = (0..places.len()).map(|n| uuid_of((run * LOOKS + n) as u64)).collect();
    let before = on_core();
    for (place, id) in places.iter().zip(&ids) {
        world.append(1, vec![acquire(place, id)])?;
        world.append(1, vec![release(place, id)])?;
    }
    Ok(each(on_core() - before, places.len() * 2))
}

fn bytes_to_move() -> u64 {
    // Half of each: HOT to MIXED.
    MOVED * (MODEL_BYTES / 2)
}

fn plans(state: &State) -> f64 {
    let before = on_core();
    for n in 0..LOOKS {
        black_box(state.plan_round(&node(n % NODES), MigrationTrigger::Pressure, bytes_to_move(), u64::MAX));
    }
    each(on_core() - before, LOOKS)
}

fn tick(world: &mut World, n: usize) -> Result<f64, Error> {
    let (node, round) = (node(n), 0);
    let command = RelievePressure {
        node,
        round,
        trigger: MigrationTrigger::Pressure,
        bytes: bytes_to_move(),
        cold_free_bytes: u64::MAX,
    };
    let before = on_core();
    let (_, applied) = world.append(1, vec![Command::RelievePressure(command)])?;
    let time = on_core() - before;
    match applied.outcomes.first() {
        Some(Ok(Reply::Round(started))) if !started.is_empty() => Ok(each(time, 1)),
        other => Err(format!("a tick moved nothing: {other:?}").into()),
    }
}
