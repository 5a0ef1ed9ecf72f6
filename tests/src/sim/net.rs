//! Requests between components: lost, slow, duplicated, late, and answered by whatever run of the asked one is there when
//! they arrive. A paused one takes them when it goes on.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;

use super::runtime::{MS, ProcessId, SECOND, Signal};
use super::world::{Link, Slot, W};

/// How a request is sent and waited for.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    /// Given up after this long without an answer.
    pub silence_ns: u64,
    /// The asked one shows signs of life while it works: silence counts from its last one.
    pub lively: bool,
    /// It may arrive twice (a connection of one's own does not do that).
    pub may_double: bool,
    /// It arrives only after this long: whoever sends it falls asleep with it in hand.
    pub late_ns: Option<u64>,
}

impl Patience {
    pub const fn new(silence_ns: u64) -> Self {
        Self { silence_ns, lively: false, may_double: false, late_ns: None }
    }
}

struct Exchange<T> {
    /// `Some(None)`: nobody listens there.
    answer: RefCell<Option<Option<T>>>,
    answered: Signal,
    at_work: Cell<u32>,
    worker: Cell<Option<ProcessId>>,
}

impl<T> Exchange<T> {
    fn answer(&self, answer: Option<T>) {
        let mut slot = self.answer.borrow_mut();
        // An answer is better than a refusal of its double.
        if slot.is_none() {
            *slot = Some(answer);
        }
        drop(slot);
        self.answered.notify();
    }
}

/// Something that takes requests: a slot and the process that its present run works in.
pub(crate) trait Service: 'static {
    fn process(&self) -> ProcessId;
}

/// Asks and waits. `None`: no answer; it may have been carried out all the same.
pub(crate) async fn ask<S, T, F, Fut>(w: &W, from: &Link, to: &Rc<Slot<S>>, patience: Patience, handler: F) -> Option<T>
where
    S: Service,
    T: 'static,
    F: Fn(Rc<S>) -> Fut + 'static,
    Fut: Future<Output = T> + 'static,
{
    let exchange = Rc::new(Exchange {
        answer: RefCell::new(None),
        answered: Signal::default(),
        at_work: Cell::new(0),
        worker: Cell::new(None),
    });
    let handler = Rc::new(handler);
    let network = &w.plan.network;
    if !from.is_cut(w.now()) && !w.strikes(network.lose, "request lost") {
        deliver(w, from, to, &exchange, &handler, patience.late_ns.unwrap_or_else(|| w.hop()));
    }
    if patience.may_double && w.strikes(network.duplicate, "request duplicated") {
        let late = w.strikes(network.late, "request late");
        let delay = w.draw(|rng| if late { rng.between(SECOND, 300 * SECOND) } else { rng.between(MS, 500 * MS) });
        deliver(w, from, to, &exchange, &handler, delay);
    }
    loop {
        let answer = exchange.answered.wait_for(|| exchange.answer.borrow_mut().take());
        if let Some(answer) = w.rt.timeout(patience.silence_ns, answer).await {
            return answer;
        }
        let alive = exchange.worker.get().is_some_and(|process| w.rt.is_running(process));
        let heard = !from.is_cut(w.now()) && !to.link.is_cut(w.now());
        if !(patience.lively && exchange.at_work.get() > 0 && alive && heard) {
            return None;
        }
    }
}

fn deliver<S, T, F, Fut>(w: &W, from: &Link, to: &Rc<Slot<S>>, exchange: &Rc<Exchange<T>>, handler: &Rc<F>, delay: u64)
where
    S: Service,
    T: 'static,
    F: Fn(Rc<S>) -> Fut + 'static,
    Fut: Future<Output = T> + 'static,
{
    let (world, from, to) = (Rc::clone(w), from.clone(), Rc::clone(to));
    let (exchange, handler) = (Rc::clone(exchange), Rc::clone(handler));
    w.rt.spawn(w.network, async move {
        let w = world;
        w.rt.sleep(delay).await;
        if to.link.is_cut(w.now()) {
            return;
        }
        let Some(service) = to.get() else {
            w.rt.sleep(w.hop()).await;
            exchange.answer(None);
            return;
        };
        let process = service.process();
        let world = Rc::clone(&w);
        w.rt.spawn(process, async move {
            exchange.at_work.set(exchange.at_work.get() + 1);
            exchange.worker.set(Some(process));
            let answer = handler(service).await;
            exchange.at_work.set(exchange.at_work.get() - 1);
            let lost = world.strikes(world.plan.network.lose, "reply lost");
            if lost || to.link.is_cut(world.now()) {
                return;
            }
            let hop = world.hop();
            let w = Rc::clone(&world);
            world.rt.spawn(world.network, async move {
                w.rt.sleep(hop).await;
                if !from.is_cut(w.now()) {
                    exchange.answer(Some(answer));
                }
            });
        });
    });
}
