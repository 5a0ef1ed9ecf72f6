//! Deterministic simulation of whole clusters: the product's fold, step machines, planner and node rules, driven by modelled
//! gateways, workers, nodes and clients in one thread under virtual time, with every fault that a seed draws. After every log
//! entry every invariant is checked; in the end everything must come to rest (see ARCHITECTURE.md, How it is proved).

mod bugs;
mod client;
mod content;
mod faults;
mod fold_bugs;
mod gateway;
mod hints;
mod invariants;
mod log;
mod loss_watch;
mod net;
mod node;
mod plan;
mod reconciler;
mod replica;
mod rng;
mod runtime;
mod settle;
mod trace;
mod worker;
mod world;

use std::collections::BTreeMap;
use std::rc::Rc;

use ballast_schemas::{
    Capability, ClusterConfig, ClusterId, Command, CommandId, CommandRecord, CreateCluster, Envelope, LogTime,
};
use ballast_workflows::State;

pub use bugs::Bug;
use plan::Plan;
#[cfg(feature = "fuzz")]
pub(crate) use rng::Rng;
pub use world::Violation;
use world::World;

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A mistake to make.
    pub bug: Option<Bug>,
    /// Print every line of the run as it happens.
    pub echo: bool,
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Log entries folded and checked.
    pub entries: u64,
    /// Virtual milliseconds that passed.
    pub simulated_ms: u64,
    /// Virtual milliseconds from the end of the faults until nothing was left to do.
    pub rested_after_ms: u64,
    /// How often each kind of fault struck.
    pub faults: BTreeMap<&'static str, u64>,
    /// Invariants that did not hold; the run ends with the first.
    pub violations: Vec<Violation>,
    /// Digest of everything that happened, in order.
    pub trace: String,
    /// Digest of the final state.
    pub state: String,
}

/// Runs one seed from its beginning to its rest.
#[must_use]
pub fn run(seed: u64, options: Options) -> Run {
    let w = simulate(seed, options);
    let (trace, faults, violations) = w.results();
    let run = Run {
        entries: w.log.last_seq(),
        simulated_ms: w.now() / runtime::MS,
        rested_after_ms: w.rested_after_ns.get() / runtime::MS,
        faults,
        violations,
        trace,
        state: w.log.truth(State::digest).to_string(),
    };
    // Tasks hold the world, and the world holds them.
    w.rt.clear();
    run
}

/// The log that a run leaves: each entry's time in nanoseconds since 1970 and its bytes.
#[cfg(feature = "fuzz")]
pub(crate) fn record(seed: u64) -> Vec<(u64, Vec<u8>)> {
    let w = simulate(seed, Options::default());
    let entry = |seq| w.log.read(seq, |entry| (entry.unix_ns, entry.bytes.to_vec()));
    let entries = (1..=w.log.last_seq()).filter_map(entry).collect();
    w.rt.clear();
    entries
}

fn simulate(seed: u64, options: Options) -> world::W {
    let w = World::new(Plan::new(seed, options.bug), options.echo);
    w.trace(format!("{:?}", w.plan));
    create_cluster(&w);
    w.gateways.iter().for_each(|slot| gateway::start(&w, slot));
    w.workers.iter().for_each(|slot| worker::start(&w, slot));
    w.nodes.iter().for_each(|node| node::start(&w, node));
    w.clients.iter().for_each(|slot| client::start(&w, slot));
    let nemesis = w.rt.start_process();
    w.rt.spawn(nemesis, faults::nemesis(Rc::clone(&w)));
    w.rt.run_until(w.plan.chaos_ns);
    if !w.rt.is_stopped() {
        settle::settle(&w);
    }
    w
}

fn create_cluster(w: &world::W) {
    let cluster = CreateCluster {
        cluster_id: ClusterId::new("simulated").expect("a short ASCII name is a cluster id"),
        incarnation: 1,
        config: ClusterConfig {
            migration_cooldown_ms: 5_000,
            migration_max_members_per_round: 3,
            deletion_max_members_per_round: 3,
            ..ClusterConfig::default()
        },
        capabilities: Capability::ALL.to_vec(),
    };
    let record = CommandRecord {
        id: CommandId::new("create").expect("a short ASCII name is a command id"),
        not_after: LogTime(60_000),
        command: Command::CreateCluster(cluster),
    };
    match Envelope::seal("create".to_owned(), vec![record]) {
        Ok((envelope, bytes)) => drop(w.log.store(w, &Rc::new(envelope), &Rc::from(bytes))),
        Err(error) => w.violate("envelopes can be encoded", error.to_string()),
    }
}
