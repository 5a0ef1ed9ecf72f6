//! Clients: processes that publish, read, replace, migrate, remove, and ask things of operations, through whichever gateway
//! answers. They crash, fall asleep in the middle of anything, and come back to find the world changed.

mod administer;
mod publish;
mod read;
mod replace;
mod share;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ballast_schemas::{
    Availability, BallastError, COMMAND_WINDOW_MS, Command, ErrorCode, HotRatio, LogTime, MigrationMode, Reply,
    Residency, RevisionIdentity, WeightRevisionMetadata, WeightStoragePolicy,
};

use ballast_workflows::State;

use super::faults::Target;
use super::gateway::{Gateway, unavailable};
use super::invariants::every_revision;
use super::net::{Patience, Service, ask};
use super::runtime::{MS, ProcessId, SECOND};
use super::world::{Slot, W};

pub(crate) use read::read_all;

/// How long a client waits for one gateway before it asks another.
const GATEWAY: Patience = Patience { may_double: true, ..Patience::new(8 * SECOND) };
/// From a reading of the log clock, how long a mutation is good: as the product's client, within the time for which the fold
/// remembers a repeat of it.
const MUTATION_GOOD_FOR_MS: u64 = COMMAND_WINDOW_MS + 30_000;
/// How long it repeats one request, under one id.
const REQUEST_DEADLINE: u64 = 30 * SECOND;
/// The data plane is a connection of one's own.
pub(crate) const DATA_PLANE: Patience = Patience { lively: true, ..Patience::new(5 * SECOND) };
/// Things that one client does at a time.
const AT_ONCE: u32 = 3;

/// What a client may do.
#[derive(Clone, Copy, Debug)]
enum Action {
    Put,
    Share,
    PutFirst,
    DeleteFirst,
    Get,
    Migrate,
    Press,
    Policy,
    Remove,
    Control,
    Abort,
    Purge,
    Configure,
    Discover,
}

pub(crate) struct Client {
    pub w: W,
    pub slot: Rc<Slot<Client>>,
    pub process: ProcessId,
    /// The machine that it runs on, if there is a node on it.
    pub host: Option<usize>,
    busy: Cell<u32>,
}

impl Service for Client {
    fn process(&self) -> ProcessId {
        self.process
    }
}

/// Starts a run.
pub(crate) fn start(w: &W, slot: &Rc<Slot<Client>>) {
    let process = w.rt.start_process();
    slot.process.set(Some(process));
    let host = w.draw(|rng| (!rng.chance(3_000)).then(|| rng.index(w.nodes.len())));
    let client = Rc::new(Client { w: Rc::clone(w), slot: Rc::clone(slot), process, host, busy: Cell::new(0) });
    *slot.current.borrow_mut() = Some(Rc::clone(&client));
    w.rt.spawn(process, client.live());
}

impl Client {
    async fn live(self: Rc<Self>) {
        let w = &self.w;
        let actions = &w.plan.actions;
        let weights = [
            (actions.put, Action::Put),
            (actions.share, Action::Share),
            (actions.put_first, Action::PutFirst),
            (actions.delete_first, Action::DeleteFirst),
            (actions.get, Action::Get),
            (actions.migrate, Action::Migrate),
            (actions.press, Action::Press),
            (actions.policy, Action::Policy),
            (actions.remove, Action::Remove),
            (actions.control, Action::Control),
            (actions.abort, Action::Abort),
            (actions.purge, Action::Purge),
            (actions.configure, Action::Configure),
            (actions.discover, Action::Discover),
        ];
        loop {
            w.work(actions.every_ns).await;
            if w.closing.get() {
                return;
            }
            if self.busy.get() >= AT_ONCE || w.log.last_seq() > w.plan.entries_max {
                continue;
            }
            let Some(action) = w.draw(|rng| rng.weighted(&weights)) else { continue };
            let client = Rc::clone(&self);
            self.busy.set(self.busy.get() + 1);
            w.rt.spawn(self.process, async move {
                let done = client.act(action).await;
                if let Err(error) = done {
                    let message: String = error.message.chars().take(160).collect();
                    client.w.trace(format!("{} {action:?}: {}, {message}", client.slot.name, error.code));
                }
                client.busy.set(client.busy.get() - 1);
            });
        }
    }

    async fn act(self: &Rc<Self>, action: Action) -> Result<(), BallastError> {
        match action {
            Action::Put => self.put_next().await,
            Action::Share => self.put_shared().await,
            Action::PutFirst => self.replace(ballast_schemas::UpsertMode::PutFirst).await,
            Action::DeleteFirst => self.replace(ballast_schemas::UpsertMode::DeleteFirst).await,
            Action::Get => self.get().await,
            Action::Migrate => self.migrate().await,
            Action::Press => self.press().await,
            Action::Policy => self.update_policy().await,
            Action::Remove => self.remove().await,
            Action::Control => self.control().await,
            Action::Abort => self.abort_replacement().await,
            Action::Purge => self.purge().await,
            Action::Configure => self.configure().await,
            Action::Discover => self.discover().await,
        }
    }

    /// Falls asleep now and then: what it does next, it does as if no time had passed.
    async fn nap(&self) {
        let w = &self.w;
        let at = w.clients.iter().position(|other| Rc::ptr_eq(other, &self.slot)).unwrap_or_default();
        w.may_die(&self.slot, Target::Client(at)).await;
        if w.strikes(if w.plan.strikes.pause > 0 { 500 } else { 0 }, "client nap") {
            w.rt.sleep(w.draw(|rng| rng.between(2, 70)) * SECOND).await;
        }
    }

    fn gateway(&self) -> Rc<Slot<Gateway>> {
        let gateways = &self.w.gateways;
        Rc::clone(&gateways[self.w.draw(|rng| rng.index(gateways.len()))])
    }

    /// One call of a gateway, and of another when that one does not answer, until one does or the deadline passes.
    async fn call<T: 'static, F, Fut>(&self, deadline_ns: u64, handler: F) -> Result<T, BallastError>
    where
        F: Fn(Rc<Gateway>) -> Fut + Clone + 'static,
        Fut: std::future::Future<Output = Result<T, BallastError>> + 'static,
    {
        let w = &self.w;
        let give_up_at = w.now() + deadline_ns;
        loop {
            let asked = ask(w, &self.slot.link, &self.gateway(), GATEWAY, handler.clone()).await;
            match asked {
                Some(Err(error)) if error.code == ErrorCode::Unavailable && w.now() < give_up_at => {}
                Some(answer) => return answer,
                None if w.now() >= give_up_at => return Err(unavailable("no gateway answers")),
                None => {}
            }
            w.work(SECOND).await;
        }
    }

    /// As [`Client::call`] for what changes something: no gateway carries it out after the end that it has through all its
    /// repeats, however late one of them arrives.
    async fn mutate<T: 'static, F, Fut>(&self, deadline_ns: u64, handler: F) -> Result<T, BallastError>
    where
        F: Fn(Rc<Gateway>, LogTime) -> Fut + Clone + 'static,
        Fut: std::future::Future<Output = Result<T, BallastError>> + 'static,
    {
        let clock =
            self.call(deadline_ns, |gateway: Rc<Gateway>| async move { Ok(gateway.replica.read(State::log_clock)) });
        let until = clock.await?.plus_ms(MUTATION_GOOD_FOR_MS);
        self.call(deadline_ns, move |gateway| handler(gateway, until)).await
    }

    /// A mutation under one id through all its repeats.
    async fn submit(&self, command: Command) -> Result<Reply, BallastError> {
        let id = self.w.command_id();
        let handler = move |gateway: Rc<Gateway>, until| {
            let (id, command) = (id.clone(), command.clone());
            async move { gateway.submit(id, until, command).await }
        };
        self.mutate(REQUEST_DEADLINE, handler).await
    }

    /// Looks at some gateway's state.
    async fn look<T: 'static>(&self, look: impl Fn(&State) -> T + Clone + 'static) -> Result<T, BallastError> {
        let handler = move |gateway: Rc<Gateway>| {
            let look = look.clone();
            async move { Ok(gateway.replica.read(look)) }
        };
        self.call(20 * SECOND, handler).await
    }

    async fn revisions(&self) -> Result<Vec<WeightRevisionMetadata>, BallastError> {
        self.look(every_revision).await
    }

    /// Some revision of this availability.
    async fn some(
        &self,
        wanted: impl Fn(&WeightRevisionMetadata) -> bool,
    ) -> Result<WeightRevisionMetadata, BallastError> {
        let fit: Vec<WeightRevisionMetadata> = self.revisions().await?.into_iter().filter(wanted).collect();
        let picked = self.w.draw(|rng| rng.pick(&fit).cloned());
        picked.ok_or_else(|| BallastError::new(ErrorCode::NotFound, "no such revision"))
    }

    async fn some_ready(&self) -> Result<WeightRevisionMetadata, BallastError> {
        self.some(|record| record.availability == Availability::Ready).await
    }

    fn some_lineage(&self) -> RevisionIdentity {
        let n = self.w.draw(|rng| rng.below(self.w.plan.lineages));
        identity(n, 1)
    }

    fn some_policy(&self) -> WeightStoragePolicy {
        self.w.draw(|rng| {
            let preferred = [Residency::Hot, Residency::Cold, Residency::Mixed];
            let modes = [MigrationMode::Pinned, MigrationMode::Manual, MigrationMode::Auto, MigrationMode::Auto];
            let ratio = HotRatio::from_ppm(rng.between(50_000, 950_000) as u32).unwrap_or(HotRatio::HALF);
            let preferred = rng.pick(&preferred).copied().unwrap_or(Residency::Hot);
            let mode = rng.pick(&modes).copied().unwrap_or(MigrationMode::Auto);
            WeightStoragePolicy::new(preferred, ratio, mode).unwrap_or_default()
        })
    }
}

pub(crate) fn identity(lineage: u64, generation: u64) -> RevisionIdentity {
    RevisionIdentity::new("default", "sim", &format!("model-{lineage}"), "main", generation)
        .expect("short names and a generation of at least 1 are an identity")
}

/// Which generation comes next in a lineage, and whether it is to be another's on purpose.
fn next_generation(records: &[WeightRevisionMetadata], any: &RevisionIdentity) -> u64 {
    let lineage = any.lineage();
    let of = records.iter().filter(|record| record.identity.lineage() == lineage);
    of.map(|record| record.identity.weight_generation).max().unwrap_or(0) + 1
}

/// Ends with the first of two futures, and remembers nothing of the other.
type Shared<T> = Rc<RefCell<T>>;

const SHORT: u64 = 200 * MS;
