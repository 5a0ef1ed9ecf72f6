//! The simulated cluster: everything there is, and the few things that every part of it needs (chance, time, trace, names,
//! and the place where a broken invariant is reported).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use ballast_schemas::{CommandId, Digest, InstanceId};

use super::client::Client;
use super::content::Content;
use super::faults::{self, Target};
use super::gateway::Gateway;
use super::hints::HintQueue;
use super::invariants::Watch;
use super::log::SharedLog;
use super::node::Node;
use super::plan::Plan;
use super::rng::Rng;
use super::runtime::{MS, ProcessId, Runtime, SECOND};
use super::trace::Trace;
use super::worker::Worker;

pub(crate) type W = Rc<World>;

/// An invariant that did not hold, with what led to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The seed that shows it again.
    pub seed: u64,
    /// Which invariant.
    pub invariant: String,
    /// Which record breaks it, and how.
    pub message: String,
    /// Log entries so far.
    pub entries: u64,
    /// The last lines of the run.
    pub last: Vec<String>,
}

/// A component that can be reached, killed, paused and cut off; its runs come and go.
pub(crate) struct Slot<S> {
    pub name: String,
    /// The run that answers now.
    pub current: RefCell<Option<Rc<S>>>,
    /// The process of the latest run, whether it answers or not.
    pub process: Cell<Option<ProcessId>>,
    pub link: Link,
}

/// A component's connection: no message passes while it is cut.
#[derive(Clone, Default)]
pub(crate) struct Link(Rc<Cell<u64>>);

impl Link {
    pub fn cut_until(&self, at_ns: u64) {
        self.0.set(self.0.get().max(at_ns));
    }

    pub fn mend(&self) {
        self.0.set(0);
    }

    pub fn is_cut(&self, now_ns: u64) -> bool {
        self.0.get() > now_ns
    }

    pub fn back_at(&self) -> u64 {
        self.0.get()
    }
}

impl<S> Slot<S> {
    pub fn new(name: String) -> Rc<Self> {
        Rc::new(Self { name, current: RefCell::new(None), process: Cell::new(None), link: Link::default() })
    }

    pub fn get(&self) -> Option<Rc<S>> {
        self.current.borrow().clone()
    }
}

pub(crate) struct World {
    pub rt: Runtime,
    pub plan: Plan,
    rng: RefCell<Rng>,
    trace: RefCell<Trace>,
    names: Cell<u64>,
    violations: RefCell<Vec<Violation>>,
    /// Messages under way belong to nobody.
    pub network: ProcessId,
    /// Faults have ended for good.
    pub calm: Cell<bool>,
    /// How long it took, once faults had ended, until nothing was left to do.
    pub rested_after_ns: Cell<u64>,
    /// Nobody begins anything new.
    pub closing: Cell<bool>,
    pub log: SharedLog,
    pub watch: RefCell<Watch>,
    pub hints: HintQueue,
    pub contents: RefCell<BTreeMap<Digest, Rc<Content>>>,
    pub gateways: Vec<Rc<Slot<Gateway>>>,
    pub workers: Vec<Rc<Slot<Worker>>>,
    pub nodes: Vec<Rc<Node>>,
    pub clients: Vec<Rc<Slot<Client>>>,
}

impl World {
    pub fn new(plan: Plan, echo: bool) -> W {
        let rt = Runtime::new();
        let network = rt.start_process();
        let mut rng = Rng::new(plan.seed);
        let slots = |kind: &str, count: usize| (0..count).map(move |at| format!("{kind}{at}")).collect::<Vec<_>>();
        let nodes = (0..plan.nodes).map(|at| Node::new(at, !rng.chance(plan.no_cold), plan.memory_units)).collect();
        Rc::new(Self {
            network,
            rng: RefCell::new(rng),
            trace: RefCell::new(Trace::new(echo)),
            names: Cell::new(0),
            violations: RefCell::default(),
            calm: Cell::new(false),
            closing: Cell::new(false),
            rested_after_ns: Cell::new(0),
            log: SharedLog::default(),
            watch: RefCell::default(),
            hints: HintQueue::default(),
            contents: RefCell::default(),
            gateways: slots("g", plan.gateways).into_iter().map(Slot::new).collect(),
            workers: slots("w", plan.workers).into_iter().map(Slot::new).collect(),
            clients: slots("c", plan.clients).into_iter().map(Slot::new).collect(),
            nodes,
            plan,
            rt,
        })
    }

    pub fn now(&self) -> u64 {
        self.rt.now()
    }

    pub fn bug(&self, bug: super::bugs::Bug) -> bool {
        self.plan.bug == Some(bug)
    }

    // Chance.

    pub fn draw<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.rng.borrow_mut())
    }

    /// Whether a fault of this kind strikes here.
    pub fn strikes(&self, parts: u32, kind: &'static str) -> bool {
        let strikes = !self.calm.get() && parts > 0 && self.draw(|rng| rng.chance(parts));
        if strikes {
            self.fault(kind);
        }
        strikes
    }

    /// About `mean` on average, from nearly nothing to several times as much.
    pub fn about(&self, mean_ns: u64) -> u64 {
        self.draw(|rng| match rng.below(4) {
            0 => rng.between(mean_ns / 8, mean_ns / 2),
            1 | 2 => rng.between(mean_ns / 2, mean_ns),
            _ => rng.between(mean_ns, mean_ns * 3),
        })
    }

    /// Work of about this long.
    pub async fn work(&self, mean_ns: u64) {
        let ns = self.about(mean_ns);
        self.rt.sleep(ns).await;
    }

    /// Mostly a moment, sometimes a while.
    pub fn hop(&self) -> u64 {
        if self.strikes(self.plan.network.slow, "message slow") {
            return self.draw(|rng| rng.between(50 * MS, 4 * SECOND));
        }
        self.draw(|rng| rng.between(MS / 20, 2 * MS))
    }

    /// The run of a component may end right here, before anything else happens.
    pub async fn may_die<S>(self: &Rc<Self>, slot: &Slot<S>, target: Target) {
        if !self.strikes(self.plan.network.die, "death at a step") {
            return;
        }
        let (w, process) = (Rc::clone(self), slot.process.get());
        self.trace(format!("{} dies at a step", slot.name));
        let dying = slot.name.clone();
        self.rt.spawn(self.network, async move {
            // Unless it has been killed and started again meanwhile.
            if process.is_some() && w.process_of(&dying) == process {
                faults::crash(&w, target);
            }
        });
        std::future::pending::<()>().await;
    }

    fn process_of(&self, name: &str) -> Option<ProcessId> {
        let named = |found: &str| found == name;
        let gateways = self.gateways.iter().filter(|slot| named(&slot.name)).map(|slot| slot.process.get());
        let workers = self.workers.iter().filter(|slot| named(&slot.name)).map(|slot| slot.process.get());
        let clients = self.clients.iter().filter(|slot| named(&slot.name)).map(|slot| slot.process.get());
        let nodes = self.nodes.iter().filter(|node| named(&node.slot.name)).map(|node| node.slot.process.get());
        gateways.chain(workers).chain(clients).chain(nodes).next().flatten()
    }

    // Names.

    pub fn name(&self, prefix: &str) -> String {
        let n = self.names.get() + 1;
        self.names.set(n);
        format!("{prefix}{n}")
    }

    pub fn command_id(&self) -> CommandId {
        CommandId::new(self.name("cmd-")).expect("a short ASCII name is a command id")
    }

    // Reporting.

    pub fn trace(&self, line: impl AsRef<str>) {
        self.trace.borrow_mut().line(self.now(), line.as_ref());
    }

    pub fn fault(&self, kind: &'static str) {
        self.trace.borrow_mut().fault(kind);
    }

    /// Reports a broken invariant and ends the run.
    pub fn violate(&self, invariant: &str, message: impl Into<String>) {
        let message = message.into();
        self.trace(format!("VIOLATION {invariant}: {message}"));
        let violation = Violation {
            seed: self.plan.seed,
            invariant: invariant.to_owned(),
            message,
            entries: self.log.last_seq(),
            last: self.trace.borrow().last(),
        };
        self.violations.borrow_mut().push(violation);
        self.rt.stop();
    }

    /// What the run came to: the trace's digest, the faults and the violations.
    pub fn results(&self) -> (String, BTreeMap<&'static str, u64>, Vec<Violation>) {
        let trace = self.trace.borrow();
        (trace.digest(), trace.faults.clone(), self.violations.borrow().clone())
    }

    pub fn content(&self, sha256: &Digest) -> Option<Rc<Content>> {
        self.contents.borrow().get(sha256).cloned()
    }

    pub fn node_named(&self, name: &ballast_schemas::NodeId) -> Option<Rc<Node>> {
        self.nodes.iter().find(|node| node.id == *name).cloned()
    }
}

/// An instance as a short word of the trace.
pub(crate) fn short(instance: &InstanceId) -> String {
    instance.position.to_string()
}
