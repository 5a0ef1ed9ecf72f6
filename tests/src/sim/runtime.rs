//! Virtual time and processes: a single-threaded executor whose clock moves only when nothing is left to do, and whose
//! tasks belong to processes that can be killed (their tasks are dropped where they stand) or paused (their tasks are not
//! polled, and go on later as if no time had passed: zombies).
//!
//! Everything is woken and polled in one order that follows from the seed alone.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

pub(crate) const MS: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000 * MS;

type TaskId = u64;
type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;

/// One run of a process: a restart is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProcessId(usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Running,
    Paused,
    Dead,
}

struct Process {
    life: Life,
    /// Tasks woken while it was paused, in order.
    deferred: Vec<TaskId>,
}

struct Task {
    process: ProcessId,
    /// Taken out while it is polled.
    future: Option<LocalFuture>,
    waker: Waker,
    woken: Arc<Woken>,
}

/// `Waker` wants `Send`; all of it stays on one thread.
struct Woken {
    task: TaskId,
    queued: AtomicBool,
    ready: Arc<Mutex<VecDeque<TaskId>>>,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.ready.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.task);
        }
    }
}

#[derive(Clone)]
pub(crate) struct Runtime(Rc<Inner>);

struct Inner {
    now_ns: Cell<u64>,
    stopped: Cell<bool>,
    next_id: Cell<u64>,
    tasks: RefCell<BTreeMap<TaskId, Task>>,
    timers: RefCell<BTreeMap<(u64, u64), Waker>>,
    ready: Arc<Mutex<VecDeque<TaskId>>>,
    processes: RefCell<Vec<Process>>,
}

impl Runtime {
    pub fn new() -> Self {
        Self(Rc::new(Inner {
            now_ns: Cell::new(0),
            stopped: Cell::new(false),
            next_id: Cell::new(0),
            tasks: RefCell::default(),
            timers: RefCell::default(),
            ready: Arc::default(),
            processes: RefCell::default(),
        }))
    }

    /// Nanoseconds since the simulation began.
    pub fn now(&self) -> u64 {
        self.0.now_ns.get()
    }

    fn next_id(&self) -> u64 {
        let id = self.0.next_id.get();
        self.0.next_id.set(id + 1);
        id
    }

    pub fn start_process(&self) -> ProcessId {
        let mut processes = self.0.processes.borrow_mut();
        processes.push(Process { life: Life::Running, deferred: Vec::new() });
        ProcessId(processes.len() - 1)
    }

    fn life(&self, process: ProcessId) -> Life {
        self.0.processes.borrow().get(process.0).map_or(Life::Dead, |process| process.life)
    }

    pub fn is_alive(&self, process: ProcessId) -> bool {
        self.life(process) != Life::Dead
    }

    pub fn is_running(&self, process: ProcessId) -> bool {
        self.life(process) == Life::Running
    }

    /// Drops every task of the process where it stands.
    pub fn kill(&self, process: ProcessId) {
        if let Some(process) = self.0.processes.borrow_mut().get_mut(process.0) {
            process.life = Life::Dead;
            process.deferred.clear();
        }
        let ids: Vec<TaskId> = {
            let tasks = self.0.tasks.borrow();
            tasks.iter().filter(|(_, task)| task.process == process).map(|(id, _)| *id).collect()
        };
        for id in ids {
            // Dropped outside of the borrow: a future's end may wake or look at others.
            let task = self.0.tasks.borrow_mut().remove(&id);
            drop(task);
        }
    }

    pub fn pause(&self, process: ProcessId) {
        if let Some(process) = self.0.processes.borrow_mut().get_mut(process.0).filter(|it| it.life == Life::Running) {
            process.life = Life::Paused;
        }
    }

    /// The tasks that were woken meanwhile go on.
    pub fn resume(&self, process: ProcessId) {
        let mut processes = self.0.processes.borrow_mut();
        let Some(process) = processes.get_mut(process.0).filter(|process| process.life == Life::Paused) else { return };
        process.life = Life::Running;
        let mut ready = self.0.ready.lock().unwrap_or_else(PoisonError::into_inner);
        ready.extend(process.deferred.drain(..));
    }

    /// Begins a task of a process; nothing happens when the process is dead.
    pub fn spawn(&self, process: ProcessId, future: impl Future<Output = ()> + 'static) {
        if !self.is_alive(process) {
            return;
        }
        let id = self.next_id();
        let woken = Arc::new(Woken { task: id, queued: AtomicBool::new(false), ready: Arc::clone(&self.0.ready) });
        let waker = Waker::from(Arc::clone(&woken));
        let task = Task { process, future: Some(Box::pin(future)), waker: waker.clone(), woken };
        self.0.tasks.borrow_mut().insert(id, task);
        waker.wake();
    }

    /// Ends the run as soon as the task at hand yields.
    pub fn stop(&self) {
        self.0.stopped.set(true);
    }

    pub fn is_stopped(&self) -> bool {
        self.0.stopped.get()
    }

    /// Drops everything: tasks hold what holds them.
    pub fn clear(&self) {
        let tasks = std::mem::take(&mut *self.0.tasks.borrow_mut());
        drop(tasks);
        self.0.timers.borrow_mut().clear();
    }

    /// Runs until `end_ns`, until nothing is left to wait for, or until stopped.
    pub fn run_until(&self, end_ns: u64) {
        while !self.is_stopped() {
            let next = self.0.ready.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            if let Some(task) = next {
                self.poll(task);
                continue;
            }
            let timer = self.0.timers.borrow().first_key_value().map(|(key, _)| *key);
            match timer {
                Some((at, id)) if at <= end_ns => {
                    self.0.now_ns.set(at.max(self.now()));
                    let waker = self.0.timers.borrow_mut().remove(&(at, id));
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                }
                _ => {
                    self.0.now_ns.set(end_ns.max(self.now()));
                    return;
                }
            }
        }
    }

    fn poll(&self, id: TaskId) {
        let (mut future, waker, process) = {
            let mut tasks = self.0.tasks.borrow_mut();
            let Some(task) = tasks.get_mut(&id) else { return };
            if let Some(process) = self.0.processes.borrow_mut().get_mut(task.process.0)
                && process.life == Life::Paused
            {
                process.deferred.push(id);
                return;
            }
            task.woken.queued.store(false, Ordering::Relaxed);
            let Some(future) = task.future.take() else { return };
            (future, task.waker.clone(), task.process)
        };
        let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
        let mut tasks = self.0.tasks.borrow_mut();
        match (polled, tasks.get_mut(&id)) {
            (Poll::Pending, Some(task)) if self.is_alive(process) => task.future = Some(future),
            _ => {
                let task = tasks.remove(&id);
                drop(tasks);
                drop(task);
                drop(future);
            }
        }
    }

    pub fn sleep(&self, ns: u64) -> Sleep {
        self.sleep_until(self.now().saturating_add(ns))
    }

    pub fn sleep_until(&self, at_ns: u64) -> Sleep {
        Sleep { runtime: self.clone(), at_ns, timer: None }
    }

    /// `None` when the time is over first.
    pub async fn timeout<T>(&self, ns: u64, future: impl Future<Output = T>) -> Option<T> {
        match either(future, self.sleep(ns)).await {
            Either::First(value) => Some(value),
            Either::Second(()) => None,
        }
    }
}

pub(crate) struct Sleep {
    runtime: Runtime,
    at_ns: u64,
    timer: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.runtime.now() >= self.at_ns {
            return Poll::Ready(());
        }
        let id = match self.timer {
            Some(id) => id,
            None => self.runtime.next_id(),
        };
        self.timer = Some(id);
        self.runtime.0.timers.borrow_mut().insert((self.at_ns, id), context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(id) = self.timer {
            self.runtime.0.timers.borrow_mut().remove(&(self.at_ns, id));
        }
    }
}

pub(crate) enum Either<A, B> {
    First(A),
    Second(B),
}

/// Whichever ends first; the first one when both do.
pub(crate) async fn either<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> Either<A, B> {
    let (mut a, mut b) = (Box::pin(a), Box::pin(b));
    poll_fn(move |context| {
        if let Poll::Ready(value) = a.as_mut().poll(context) {
            return Poll::Ready(Either::First(value));
        }
        b.as_mut().poll(context).map(Either::Second)
    })
    .await
}

/// Says that something changed; whoever waits looks again.
#[derive(Clone, Default)]
pub(crate) struct Signal(Rc<RefCell<Vec<Waker>>>);

impl Signal {
    pub fn notify(&self) {
        let wakers = std::mem::take(&mut *self.0.borrow_mut());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits until `look` finds something; it is asked at once and after every change.
    pub async fn wait_for<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        poll_fn(|context| match look() {
            Some(found) => Poll::Ready(found),
            None => {
                self.0.borrow_mut().push(context.waker().clone());
                Poll::Pending
            }
        })
        .await
    }
}

/// One effect at a time.
#[derive(Clone, Default)]
pub(crate) struct Turnstile {
    held: Rc<Cell<bool>>,
    freed: Signal,
}

pub(crate) struct Turn(Turnstile);

impl Turnstile {
    pub async fn enter(&self) -> Turn {
        self.freed.wait_for(|| (!self.held.replace(true)).then_some(())).await;
        Turn(self.clone())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.held.set(false);
        self.0.freed.notify();
    }
}

/// A value that one task gives and another waits for.
struct Slot<T> {
    value: Option<T>,
    waker: Option<Waker>,
    closed: bool,
}

pub(crate) struct Giver<T>(Rc<RefCell<Slot<T>>>);
pub(crate) struct Taker<T>(Rc<RefCell<Slot<T>>>);

pub(crate) fn oneshot<T>() -> (Giver<T>, Taker<T>) {
    let slot = Rc::new(RefCell::new(Slot { value: None, waker: None, closed: false }));
    (Giver(Rc::clone(&slot)), Taker(slot))
}

impl<T> Giver<T> {
    /// The first value counts.
    pub fn give(self, value: T) {
        let mut slot = self.0.borrow_mut();
        if slot.value.is_none() {
            slot.value = Some(value);
        }
    }
}

impl<T> Drop for Giver<T> {
    fn drop(&mut self) {
        let mut slot = self.0.borrow_mut();
        slot.closed = true;
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
    }
}

impl<T> Future for Taker<T> {
    type Output = Option<T>;

    /// `None` when the giver is gone without a word.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut slot = self.0.borrow_mut();
        if let Some(value) = slot.value.take() {
            return Poll::Ready(Some(value));
        }
        if slot.closed {
            return Poll::Ready(None);
        }
        slot.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_moves_only_when_nothing_is_left_to_do_and_a_pause_keeps_a_task_where_it_is() {
        let runtime = Runtime::new();
        let (seen, process) = (Rc::new(RefCell::new(Vec::new())), runtime.start_process());
        for delay in [30, 10, 20] {
            let (rt, log) = (runtime.clone(), Rc::clone(&seen));
            runtime.spawn(process, async move {
                rt.sleep(delay).await;
                log.borrow_mut().push((delay, rt.now()));
            });
        }
        runtime.run_until(15);
        assert_eq!(*seen.borrow(), [(10, 10)]);
        runtime.pause(process);
        runtime.run_until(100);
        assert_eq!(seen.borrow().len(), 1);
        runtime.resume(process);
        runtime.run_until(100);
        assert_eq!(*seen.borrow(), [(10, 10), (20, 100), (30, 100)]);
    }

    #[test]
    fn a_killed_process_loses_its_tasks_and_what_they_hold() {
        let runtime = Runtime::new();
        let process = runtime.start_process();
        let (giver, taker) = oneshot::<u32>();
        let rt = runtime.clone();
        runtime.spawn(process, async move {
            rt.sleep(10).await;
            giver.give(1);
        });
        let other = runtime.start_process();
        let (heard, rt) = (Rc::new(Cell::new(None)), runtime.clone());
        let told = Rc::clone(&heard);
        runtime.spawn(other, async move {
            told.set(Some(taker.await));
            rt.stop();
        });
        runtime.run_until(5);
        runtime.kill(process);
        runtime.run_until(100);
        assert_eq!(heard.get(), Some(None));
        assert_eq!(runtime.now(), 5);
    }
}
