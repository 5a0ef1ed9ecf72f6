//! How the cold tier's bytes move: a small trait with two implementations, io_uring on a thread of its own and
//! positioned reads and writes on a few threads (see ARCHITECTURE.md, One layout, two tiers). Requests name memory
//! that stays where it is until they are done; what they mean is the cold tier's matter.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::mpsc::{Receiver, Sender, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Requests that an engine takes before it makes callers wait.
const IN_FLIGHT_MAX: usize = 64;
/// Threads of the positioned engine: as many requests as a disk gains anything from.
const POSITIONED_THREADS: usize = 4;

/// Memory that a request reads or fills. It keeps its owner alive until the request is done.
pub(crate) struct IoMemory {
    start: NonNull<u8>,
    bytes: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory belongs to `_owner`, which is Send and Sync, and `new`'s caller answers for exclusive use.
unsafe impl Send for IoMemory {}

impl IoMemory {
    /// Names `bytes` bytes at `start`.
    ///
    /// # Safety
    /// The memory is valid for as long as `owner` lives. Until the request that takes this is done, nobody else writes
    /// it, and when the request reads into it nobody else reads it either.
    pub(crate) unsafe fn new(start: NonNull<u8>, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, bytes, _owner: owner }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: valid and not written by others, by the promise of `new`; a finished request does not write it either.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoKind {
    /// Fills the memory from the file.
    Read,
    /// Writes the memory to the file.
    Write,
}

/// One read or write, whole or failed.
pub(crate) struct IoRequest {
    pub kind: IoKind,
    pub file: Arc<File>,
    pub offset: u64,
    pub memory: IoMemory,
    pub answer: Answer,
}

/// Where the end of a request is told. A request that is lost, because an engine stopped or panicked, is told as failed.
pub(crate) struct Answer {
    tag: usize,
    done: Option<Sender<IoDone>>,
}

impl Answer {
    /// An answer that carries `tag`.
    pub(crate) fn new(tag: usize, done: Sender<IoDone>) -> Self {
        Self { tag, done: Some(done) }
    }

    pub(crate) fn send(mut self, memory: IoMemory, result: io::Result<()>) {
        if let Some(done) = self.done.take() {
            // Whoever asked may have given up: then nobody misses the answer.
            let _ = done.send(IoDone { tag: self.tag, memory: Some(memory), result });
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            let result = Err(io::Error::new(io::ErrorKind::BrokenPipe, "the I/O engine has stopped"));
            // As in `send`.
            let _ = done.send(IoDone { tag: self.tag, memory: None, result });
        }
    }
}

/// The end of a request.
pub(crate) struct IoDone {
    pub tag: usize,
    /// The request's memory; `None` when the request was lost.
    pub memory: Option<IoMemory>,
    pub result: io::Result<()>,
}

/// Moves bytes between memory and files.
pub(crate) trait ColdEngine: Send + Sync + std::fmt::Debug {
    /// What to call it, and why it is not the first choice if it is not.
    fn describe(&self) -> String;

    /// Starts a request, waiting while too many are under way.
    fn submit(&self, request: IoRequest);
}

/// Bounds the requests under way.
#[derive(Debug, Default)]
struct Gate {
    in_flight: Mutex<usize>,
    freed: Condvar,
}

impl Gate {
    fn enter(&self) {
        let in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let mut in_flight =
            self.freed.wait_while(in_flight, |count| *count >= IN_FLIGHT_MAX).unwrap_or_else(PoisonError::into_inner);
        *in_flight += 1;
    }

    fn leave(&self) {
        *self.in_flight.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.freed.notify_one();
    }
}

/// The first engine that works here.
pub(crate) fn start(choice: EngineChoice) -> io::Result<Box<dyn ColdEngine>> {
    let why = match choice {
        EngineChoice::Auto => match UringEngine::start() {
            Ok(engine) => return Ok(Box::new(engine)),
            Err(error) => format!("io_uring is not available: {error}"),
        },
        EngineChoice::Positioned => "io_uring is switched off".to_owned(),
    };
    Ok(Box::new(PositionedEngine::start(why)?))
}

/// Which engine a cold tier runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring where the kernel allows it, positioned I/O otherwise.
    #[default]
    Auto,
    /// Positioned reads and writes.
    Positioned,
}

/// Positioned reads and writes on a few threads.
#[derive(Debug)]
struct PositionedEngine {
    why: String,
    requests: Option<SyncSender<IoRequest>>,
    threads: Vec<JoinHandle<()>>,
}

impl PositionedEngine {
    fn start(why: String) -> io::Result<Self> {
        let (requests, queue) = sync_channel(IN_FLIGHT_MAX);
        let queue = Arc::new(Mutex::new(queue));
        let mut engine = Self { why, requests: Some(requests), threads: Vec::new() };
        for number in 0..POSITIONED_THREADS {
            let queue = queue.clone();
            let thread = std::thread::Builder::new().name(format!("cold-io-{number}")).spawn(move || {
                while let Some(request) = next(&queue) {
                    serve(request)
                }
            })?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }
}

fn next(queue: &Mutex<Receiver<IoRequest>>) -> Option<IoRequest> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

fn serve(request: IoRequest) {
    let IoRequest { kind, file, offset, mut memory, answer } = request;
    let result = match kind {
        IoKind::Read => file.read_exact_at(memory.bytes_mut(), offset),
        IoKind::Write => file.write_all_at(memory.bytes(), offset),
    };
    // The file goes first, so that a segment removed after the answer is really gone.
    drop(file);
    answer.send(memory, result);
}

impl ColdEngine for PositionedEngine {
    fn describe(&self) -> String {
        format!("positioned I/O ({})", self.why)
    }

    fn submit(&self, request: IoRequest) {
        if let Some(requests) = &self.requests {
            // A request that comes back has nobody to serve it; dropping it tells so.
            let _ = requests.send(request);
        }
    }
}

impl Drop for PositionedEngine {
    fn drop(&mut self) {
        self.requests = None;
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing left to finish.
            let _ = thread.join();
        }
    }
}

/// io_uring on a thread of its own.
#[derive(Debug)]
struct UringEngine {
    gate: Arc<Gate>,
    requests: Option<tokio::sync::mpsc::UnboundedSender<IoRequest>>,
    thread: Option<JoinHandle<()>>,
}

impl UringEngine {
    fn start() -> io::Result<Self> {
        let (requests, queue) = tokio::sync::mpsc::unbounded_channel();
        let (ready, started) = sync_channel(1);
        let gate = Arc::new(Gate::default());
        let gate_inside = gate.clone();
        let thread = std::thread::Builder::new().name("cold-uring".to_owned()).spawn(move || {
            let runtime = tokio_uring::Runtime::new(tokio_uring::builder().entries(IN_FLIGHT_MAX as u32 * 2));
            match runtime {
                Ok(runtime) => {
                    // `start` is waiting for this; if it is gone, so is the queue's other end.
                    let _ = ready.send(Ok(()));
                    runtime.block_on(uring::run(queue, gate_inside));
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        })?;
        started.recv().map_err(|_| io::Error::other("the io_uring thread stopped at once"))??;
        Ok(Self { gate, requests: Some(requests), thread: Some(thread) })
    }
}

impl ColdEngine for UringEngine {
    fn describe(&self) -> String {
        "io_uring".to_owned()
    }

    fn submit(&self, request: IoRequest) {
        self.gate.enter();
        let Some(requests) = &self.requests else { return self.gate.leave() };
        if requests.send(request).is_err() {
            // The request came back and was dropped, which tells whoever asked.
            self.gate.leave();
        }
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // The thread ends once what is under way is done.
            let _ = thread.join();
        }
    }
}

/// What runs on the io_uring thread.
mod uring {
    use std::io;
    use std::sync::Arc;

    use tokio::sync::mpsc::UnboundedReceiver;
    use tokio::task::JoinSet;
    use tokio_uring::buf::{IoBuf, IoBufMut};
    use tokio_uring::fs::File;

    use super::{Gate, IoKind, IoMemory, IoRequest};

    /// Serves requests until the queue closes, then waits for what is under way.
    pub(super) async fn run(mut queue: UnboundedReceiver<IoRequest>, gate: Arc<Gate>) {
        let mut under_way = JoinSet::new();
        loop {
            tokio::select! {
                request = queue.recv() => match request {
                    Some(request) => {
                        let gate = gate.clone();
                        under_way.spawn_local(async move {
                            let leave = Leave(gate);
                            let IoRequest { kind, file, offset, memory, answer } = request;
                            let (result, memory) = serve(kind, &file, offset, memory).await;
                            drop((file, leave));
                            answer.send(memory, result);
                        });
                    }
                    None => break,
                },
                Some(_) = under_way.join_next() => {}
            }
        }
        while under_way.join_next().await.is_some() {}
    }

    /// Frees the place at the gate, also when the task panics.
    struct Leave(Arc<Gate>);

    impl Drop for Leave {
        fn drop(&mut self) {
            self.0.leave();
        }
    }

    async fn serve(kind: IoKind, file: &std::fs::File, offset: u64, memory: IoMemory) -> (io::Result<()>, IoMemory) {
        match file.try_clone() {
            Ok(file) => {
                let file = File::from_std(file);
                let moved = transfer(&file, kind, offset, memory).await;
                // Closed before the answer, so that a segment removed next is really gone. A failed close of a
                // duplicate loses nothing: data is synced through the original.
                let _ = file.close().await;
                moved
            }
            Err(error) => (Err(error), memory),
        }
    }

    async fn transfer(file: &File, kind: IoKind, offset: u64, mut memory: IoMemory) -> (io::Result<()>, IoMemory) {
        let mut moved = 0;
        while moved < memory.bytes {
            let piece = Piece { memory, moved };
            let at = offset + moved as u64;
            let (result, piece) = match kind {
                IoKind::Read => file.read_at(piece, at).await,
                IoKind::Write => file.write_at(piece, at).submit().await,
            };
            memory = piece.memory;
            match result {
                Ok(0) => {
                    let kind =
                        if kind == IoKind::Read { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::WriteZero };
                    return (Err(kind.into()), memory);
                }
                Ok(bytes) => moved += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (Err(error), memory),
            }
        }
        (Ok(()), memory)
    }

    /// The rest of a request's memory, as tokio-uring wants it.
    struct Piece {
        memory: IoMemory,
        moved: usize,
    }

    // SAFETY: the memory stays at its address while `IoMemory` lives, which the operation owns until it is complete.
    unsafe impl IoBuf for Piece {
        fn stable_ptr(&self) -> *const u8 {
            // SAFETY: `moved` never exceeds the length.
            unsafe { self.memory.start.as_ptr().add(self.moved) }
        }

        fn bytes_init(&self) -> usize {
            self.memory.bytes - self.moved
        }

        fn bytes_total(&self) -> usize {
            self.memory.bytes - self.moved
        }
    }

    // SAFETY: as above; the bytes are initialised from the start, so there is nothing to note.
    unsafe impl IoBufMut for Piece {
        fn stable_mut_ptr(&mut self) -> *mut u8 {
            // SAFETY: `moved` never exceeds the length.
            unsafe { self.memory.start.as_ptr().add(self.moved) }
        }

        unsafe fn set_init(&mut self, _bytes: usize) {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn engines() -> Vec<Box<dyn ColdEngine>> {
        let mut engines: Vec<Box<dyn ColdEngine>> = vec![start(EngineChoice::Positioned).unwrap()];
        match UringEngine::start() {
            Ok(engine) => engines.push(Box::new(engine)),
            Err(error) => println!("io_uring skipped: {error}"),
        }
        engines
    }

    fn memory(content: Vec<u8>) -> IoMemory {
        let owner = Arc::new(Mutex::new(content));
        let (start, bytes) = {
            let mut content = owner.lock().unwrap();
            (NonNull::new(content.as_mut_ptr()).unwrap(), content.len())
        };
        // SAFETY: the vector is never touched again except through this.
        unsafe { IoMemory::new(start, bytes, owner) }
    }

    #[test]
    fn what_is_written_is_read_back_by_either_engine() {
        let scratch = tempfile::tempdir().unwrap();
        for engine in engines() {
            let path = scratch.path().join("file");
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
            let file = Arc::new(file);
            let (done, answers) = channel();
            let count = 200;
            let submit = |kind, tag: usize, fill: u8| {
                let memory = memory(vec![fill; 1000]);
                let answer = Answer::new(tag, done.clone());
                engine.submit(IoRequest { kind, file: file.clone(), offset: tag as u64 * 1000, memory, answer });
            };
            for tag in 0..count {
                submit(IoKind::Write, tag, tag as u8);
            }
            for _ in 0..count {
                answers.recv().unwrap().result.unwrap();
            }
            for tag in 0..count {
                submit(IoKind::Read, tag, 0);
            }
            for _ in 0..count {
                let IoDone { tag, memory, result } = answers.recv().unwrap();
                result.unwrap();
                assert!(memory.unwrap().bytes().iter().all(|&byte| byte == tag as u8), "{}", engine.describe());
            }
        }
    }

    #[test]
    fn reading_past_the_end_is_an_error_and_not_a_short_success() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("file");
        std::fs::write(&path, [1; 100]).unwrap();
        for engine in engines() {
            let file = Arc::new(File::open(&path).unwrap());
            let (done, answers) = channel();
            let memory = memory(vec![0; 100]);
            engine.submit(IoRequest { kind: IoKind::Read, file, offset: 50, memory, answer: Answer::new(7, done) });
            let answer = answers.recv().unwrap();
            assert_eq!(answer.result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            assert_eq!(answer.tag, 7);
        }
    }

    #[test]
    fn a_request_that_is_lost_is_told_as_failed() {
        let (done, answers) = channel();
        let file = Arc::new(File::open("/dev/null").unwrap());
        let request =
            IoRequest { kind: IoKind::Read, file, offset: 0, memory: memory(vec![0; 1]), answer: Answer::new(3, done) };
        drop(request);
        let answer = answers.recv().unwrap();
        assert!(answer.memory.is_none() && answer.result.is_err());
    }
}
