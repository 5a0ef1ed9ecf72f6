//! A nats-server child with JetStream on disk: loopback only, synced on every write, restarted when it dies, gone when its
//! parent goes.
//!
//! One plain thread owns the child for its whole life. It must be a thread of its own because the kernel's
//! "die with the parent" signal follows the *thread* that started the child, and a runtime may end its threads at any time.
//! Not here: finding the binary (`locate.rs`), a server that runs by itself (`ops/nats.conf`).

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::sync::watch;

use super::locate::{LocateError, NatsServerBinary, locate_nats_server};

const READY_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a new start waits for an earlier server on the same folder to be gone.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const STOP_TIMEOUT: Duration = Duration::from_secs(15);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// A child that lived this long starts the back-off afresh when it dies.
const STABLE_AFTER: Duration = Duration::from_secs(30);
const PORT_ATTEMPTS: usize = 5;

/// How to start the child.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Holds the configuration, the port, the log and JetStream's files.
    pub data_dir: PathBuf,
    /// The loopback port; 0 takes the folder's last port if it is free, else any free one.
    pub port: u16,
    /// The binary; `None` looks for it.
    pub binary: Option<NatsServerBinary>,
}

impl ServerOptions {
    /// A server in `data_dir` on a port of its own choice.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self { data_dir: data_dir.into(), port: 0, binary: None }
    }
}

/// What the supervised child is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerStatus {
    Running {
        pid: u32,
        restarts: u32,
    },
    /// It ended unexpectedly and is started again after a back-off.
    Restarting {
        reason: String,
    },
    Stopped,
}

/// Why the child could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartServerError {
    #[error(transparent)]
    Locate(#[from] LocateError),
    #[error("cannot use {} for the NATS server's data: {source}", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("the NATS data folder {} is in use by another process ({holder}): stop it first, or choose another folder", path.display())]
    InUse { path: PathBuf, holder: String },
    #[error("port {port} on 127.0.0.1 cannot be used for the NATS server: {source}")]
    Port { port: u16, source: std::io::Error },
    #[error("nats-server did not start: {reason}; its log is {}", log.display())]
    NotReady { reason: String, log: PathBuf },
}

/// The running child. Dropping it stops the child without waiting; [`EmbeddedServer::stop`] waits.
#[derive(Debug)]
pub struct EmbeddedServer {
    port: u16,
    shared: Arc<Shared>,
    status: watch::Receiver<ServerStatus>,
    binary: NatsServerBinary,
}

/// What the supervising thread and the handle share.
#[derive(Debug)]
struct Shared {
    control: Mutex<Control>,
    /// Wakes the thread from its back-off when it shall stop.
    stop_requested: std::sync::Condvar,
}

#[derive(Debug)]
struct Control {
    stopping: bool,
    /// The child's pid while it is not reaped; a signal sent under the lock can not hit a recycled pid.
    pid: Option<Pid>,
}

impl Shared {
    fn control(&self) -> MutexGuard<'_, Control> {
        // No code panics while holding it, and its two plain fields are valid at any point.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request_stop(&self) {
        let mut control = self.control();
        control.stopping = true;
        if let Some(pid) = control.pid {
            // It may have died a moment ago; then there is nothing to stop.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
        self.stop_requested.notify_all();
    }
}

impl EmbeddedServer {
    /// Starts the child and returns once it answers.
    pub async fn start(options: ServerOptions) -> Result<Self, StartServerError> {
        // All of it is file and process work, a few milliseconds to a few seconds: off the runtime's threads.
        match tokio::task::spawn_blocking(move || start_blocking(options)).await {
            Ok(started) => started,
            Err(error) => Err(StartServerError::NotReady {
                reason: format!("the starting thread failed: {error}"),
                log: PathBuf::new(),
            }),
        }
    }

    /// `nats://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The binary that runs.
    pub fn binary(&self) -> &NatsServerBinary {
        &self.binary
    }

    /// The child's process id while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.shared.control().pid.map(|pid| pid.as_raw_nonzero().get().unsigned_abs())
    }

    /// Follows the child: an unexpected end shows as [`ServerStatus::Restarting`].
    pub fn status(&self) -> watch::Receiver<ServerStatus> {
        self.status.clone()
    }

    /// Asks the child to end (SIGTERM: it closes its streams in order) and waits until it did.
    pub async fn stop(self) {
        self.shared.request_stop();
        if tokio::time::timeout(STOP_TIMEOUT, self.stopped()).await.is_err() {
            tracing::warn!("nats-server did not end within {} s of SIGTERM: killing it", STOP_TIMEOUT.as_secs());
            if let Some(pid) = self.shared.control().pid {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            self.stopped().await;
        }
    }

    async fn stopped(&self) {
        // An error means that the supervising thread is gone, and the child with it.
        let _ = self.status.clone().wait_for(|status| *status == ServerStatus::Stopped).await;
    }
}

impl Drop for EmbeddedServer {
    fn drop(&mut self) {
        self.shared.request_stop();
    }
}

/// Everything the supervising thread needs to start the child again.
#[derive(Debug)]
struct Launcher {
    binary: PathBuf,
    config: PathBuf,
    log: PathBuf,
    port: u16,
    /// Locked (flock) by this process and, through inheritance, by the child: whoever lives last keeps the folder.
    lock: File,
}

fn start_blocking(options: ServerOptions) -> Result<EmbeddedServer, StartServerError> {
    let binary = match options.binary {
        Some(binary) => binary,
        None => locate_nats_server()?,
    };
    let in_folder = |source| StartServerError::Folder { path: options.data_dir.clone(), source };
    if !options.data_dir.exists() {
        // A folder is not made for a port that can not be had: once it is there, it keeps the port that it was started with.
        choose_port(&options.data_dir, options.port)?;
    }
    std::fs::create_dir_all(&options.data_dir).map_err(in_folder)?;
    let data_dir = options.data_dir.canonicalize().map_err(in_folder)?;
    let lock = lock_folder(&data_dir)?;

    let mut failed = None;
    for _ in 0..PORT_ATTEMPTS {
        let port = choose_port(&data_dir, options.port)?;
        let config = data_dir.join("nats.conf");
        std::fs::write(&config, config_text(&data_dir, port)).map_err(in_folder)?;
        std::fs::write(data_dir.join("port"), format!("{port}\n")).map_err(in_folder)?;
        let lock = lock.try_clone().map_err(in_folder)?;
        let launcher =
            Launcher { binary: binary.path.clone(), config, log: data_dir.join("nats-server.log"), port, lock };
        match supervise(launcher) {
            Ok((shared, status)) => return Ok(EmbeddedServer { port, shared, status, binary }),
            // Somebody may have taken the free port between our look and the child's start.
            Err(error @ StartServerError::NotReady { .. }) if options.port == 0 && !is_port_free(port) => {
                failed = Some(error)
            }
            Err(error) => return Err(error),
        }
    }
    Err(failed.unwrap_or_else(|| StartServerError::NotReady {
        reason: "no free port".to_owned(),
        log: data_dir.join("nats-server.log"),
    }))
}

fn lock_folder(data_dir: &Path) -> Result<File, StartServerError> {
    let path = data_dir.join("lock");
    let in_folder = |source| StartServerError::Folder { path: path.clone(), source };
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(in_folder)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    let mut told = false;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                if !told {
                    let mut holder = String::new();
                    let _ = file.read_to_string(&mut holder).and_then(|_| file.seek(SeekFrom::Start(0)));
                    tracing::warn!(folder = %data_dir.display(), process = holder.trim(), "waiting for another process to leave the NATS data folder");
                    told = true;
                }
                std::thread::sleep(Duration::from_millis(50))
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                return Err(StartServerError::InUse {
                    path: data_dir.to_owned(),
                    holder: format!("process {}", holder.trim()),
                });
            }
            Err(error) => return Err(in_folder(error.into())),
        }
    }
    file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).map_err(in_folder)?;
    writeln!(file, "{}", std::process::id()).map_err(in_folder)?;
    Ok(file)
}

fn is_port_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

fn choose_port(data_dir: &Path, wanted: u16) -> Result<u16, StartServerError> {
    let bind = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).and_then(|listener| listener.local_addr());
    if wanted != 0 {
        return bind(wanted)
            .map(|address| address.port())
            .map_err(|source| StartServerError::Port { port: wanted, source });
    }
    // The same folder keeps its port, so clients of an earlier run find the server again.
    let last = std::fs::read_to_string(data_dir.join("port")).ok().and_then(|text| text.trim().parse::<u16>().ok());
    if let Some(port) = last.filter(|port| *port != 0 && is_port_free(*port)) {
        return Ok(port);
    }
    bind(0).map(|address| address.port()).map_err(|source| StartServerError::Port { port: 0, source })
}

fn config_text(data_dir: &Path, port: u16) -> String {
    let store = data_dir.join("jetstream").display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
    format!(
        "# Written at every start by the process that runs this server; changes are lost.\n\
         server_name: ballast-embedded\n\
         listen: 127.0.0.1:{port}\n\
         max_payload: 1048576\n\
         jetstream {{\n  store_dir: \"{store}\"\n  # Every acknowledged command survives a power cut.\n  sync_interval: always\n}}\n"
    )
}

/// Starts the thread and waits for the first child to answer.
fn supervise(launcher: Launcher) -> Result<(Arc<Shared>, watch::Receiver<ServerStatus>), StartServerError> {
    let shared = Arc::new(Shared {
        control: Mutex::new(Control { stopping: false, pid: None }),
        stop_requested: std::sync::Condvar::new(),
    });
    let (status_tx, status) = watch::channel(ServerStatus::Restarting { reason: "not started yet".to_owned() });
    let (ready_tx, ready_rx) = std::sync::mpsc::channel();
    let log = launcher.log.clone();
    let thread_shared = Arc::clone(&shared);
    std::thread::Builder::new()
        .name("nats-server".to_owned())
        .spawn(move || {
            run_supervisor(&launcher, &thread_shared, &status_tx, &ready_tx);
            // The lock goes before "stopped" is told, so that whoever waited may start on the folder at once.
            drop(launcher);
            status_tx.send_replace(ServerStatus::Stopped);
        })
        .map_err(|error| StartServerError::NotReady { reason: error.to_string(), log: log.clone() })?;
    match ready_rx.recv() {
        Ok(Ok(())) => Ok((shared, status)),
        Ok(Err(reason)) => Err(StartServerError::NotReady { reason, log }),
        Err(_) => Err(StartServerError::NotReady { reason: "the supervising thread ended".to_owned(), log }),
    }
}

fn run_supervisor(
    launcher: &Launcher,
    shared: &Shared,
    status: &watch::Sender<ServerStatus>,
    ready: &std::sync::mpsc::Sender<Result<(), String>>,
) {
    let mut restarts = 0;
    let mut backoff = BACKOFF_FIRST;
    let mut first = true;
    loop {
        let started = Instant::now();
        let reason = match launch(launcher, shared) {
            Ok(mut child) => {
                let answered = wait_until_ready(launcher.port, &mut child, shared);
                if answered.is_ok() {
                    status.send_replace(ServerStatus::Running { pid: child.id(), restarts });
                    if first {
                        first = false;
                        let _ = ready.send(Ok(()));
                    }
                } else {
                    let _ = child.kill();
                }
                let ended = reap(&mut child, shared);
                match answered {
                    Ok(()) => format!("it ended: {ended}"),
                    Err(reason) => format!("{reason} ({ended}){}", last_log_line(&launcher.log)),
                }
            }
            Err(error) => format!("it could not be run: {error}"),
        };
        if first {
            let _ = ready.send(Err(reason));
            return;
        }
        if started.elapsed() >= STABLE_AFTER {
            backoff = BACKOFF_FIRST;
        }
        let control = shared.control();
        if control.stopping {
            return;
        }
        tracing::warn!(reason, "nats-server ended unexpectedly: starting it again");
        status.send_replace(ServerStatus::Restarting { reason });
        let waited = shared.stop_requested.wait_timeout_while(control, backoff, |control| !control.stopping);
        if waited.unwrap_or_else(PoisonError::into_inner).0.stopping {
            return;
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
        restarts += 1;
    }
}

fn launch(launcher: &Launcher, shared: &Shared) -> std::io::Result<Child> {
    let log = OpenOptions::new().create(true).append(true).open(&launcher.log)?;
    let parent = rustix::process::getpid();
    let lock_fd = launcher.lock.as_raw_fd();
    let mut command = Command::new(&launcher.binary);
    command.arg("-c").arg(&launcher.config).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // A terminal's Ctrl-C goes to the parent alone, which then stops its parts in order.
    command.process_group(0);
    // SAFETY: the closure runs between fork and exec and makes three system calls, no allocation, no locks.
    unsafe {
        command.pre_exec(move || {
            // The child keeps the folder's lock even when the parent is killed.
            // SAFETY: `launcher.lock` is open for as long as the supervisor runs, and so in the forked child.
            let lock = BorrowedFd::borrow_raw(lock_fd);
            rustix::io::fcntl_setfd(lock, rustix::io::FdFlags::empty())?;
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the line above; then no signal would ever come.
            match rustix::process::getppid() == Some(parent) {
                true => Ok(()),
                false => Err(std::io::Error::from(rustix::io::Errno::SRCH)),
            }
        });
    }
    let mut control = shared.control();
    if control.stopping {
        return Err(std::io::Error::other("it was asked to stop"));
    }
    let child = command.spawn()?;
    control.pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    Ok(child)
}

/// Ready = it accepts a connection on the port and greets with `INFO`.
fn wait_until_ready(port: u16, child: &mut Child, shared: &Shared) -> Result<(), String> {
    let deadline = Instant::now() + READY_TIMEOUT;
    let mut last = String::new();
    while Instant::now() < deadline {
        if shared.control().stopping {
            return Err("it was asked to stop".to_owned());
        }
        if has_ended(child) {
            return Err("it ended while starting".to_owned());
        }
        match greeting(port) {
            Ok(true) => return Ok(()),
            Ok(false) => last = format!("port {port} is answered by something that is not a NATS server"),
            Err(error) => last = error.to_string(),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(format!("it did not answer within {} s: {last}", READY_TIMEOUT.as_secs()))
}

fn greeting(port: u16) -> std::io::Result<bool> {
    let address = std::net::SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = std::net::TcpStream::connect_timeout(&address, Duration::from_millis(500))?;
    stream.set_read_timeout(Some(Duration::from_millis(500)))?;
    let mut first = [0_u8; 5];
    stream.read_exact(&mut first)?;
    Ok(&first == b"INFO ")
}

/// Whether the child ended, without reaping it (its pid must stay ours until `reap`).
fn has_ended(child: &Child) -> bool {
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else { return true };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    !matches!(rustix::process::waitid(WaitId::Pid(pid), options), Ok(None))
}

/// Waits for the child's end and says how it ended.
fn reap(child: &mut Child, shared: &Shared) -> String {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // Wait without reaping first: the pid can not be recycled before it is taken out of reach of `request_stop`.
        while matches!(
            rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT),
            Err(rustix::io::Errno::INTR)
        ) {}
    }
    shared.control().pid = None;
    match child.wait() {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    }
}

fn last_log_line(log: &Path) -> String {
    const TAIL_BYTES: u64 = 4096;
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    // The reason is the last error; ordinary shutdown lines may follow it.
    let line = text
        .lines()
        .rev()
        .find(|line| line.contains("[FTL]") || line.contains("[ERR]"))
        .or_else(|| text.lines().last());
    line.map(|line| format!(": {}", line.trim())).unwrap_or_default()
}
