//! Progress of a put or a get, told to whoever asked: phase, bytes, and what is being waited for.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// For something that another has to finish; the note says what.
    Waiting,
    /// Source bytes are read to compare them with what is stored.
    Comparing,
    /// Bytes go to the nodes.
    Writing,
    /// The nodes check and sync what they got.
    Sealing,
    /// The revision is published.
    Committing,
    /// Bytes come from the nodes.
    Reading,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Waiting => "waiting",
            Phase::Comparing => "comparing",
            Phase::Writing => "writing",
            Phase::Sealing => "sealing",
            Phase::Committing => "committing",
            Phase::Reading => "reading",
        })
    }
}

/// One report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgressUpdate {
    /// What is being done.
    pub phase: Phase,
    /// Bytes done in this phase.
    pub done_bytes: u64,
    /// Bytes to do in this phase; 0 when there are none to count.
    pub total_bytes: u64,
    /// What is being waited for.
    pub note: Option<String>,
}

type Callback = dyn Fn(&ProgressUpdate) + Send + Sync;

/// Where progress goes. Cheap to clone; the callback must not block.
#[derive(Clone, Default)]
pub struct Progress(Option<Arc<Callback>>);

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Progress(callback)" } else { "Progress(none)" })
    }
}

impl Progress {
    /// Tells nobody.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Calls `callback` with every report, from whichever thread makes progress.
    pub fn new(callback: impl Fn(&ProgressUpdate) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(callback)))
    }

    pub(crate) fn tell(&self, phase: Phase, done_bytes: u64, total_bytes: u64) {
        if let Some(callback) = &self.0 {
            callback(&ProgressUpdate { phase, done_bytes, total_bytes, note: None });
        }
    }

    pub(crate) fn waiting(&self, note: impl Into<String>) {
        if let Some(callback) = &self.0 {
            callback(&ProgressUpdate { phase: Phase::Waiting, done_bytes: 0, total_bytes: 0, note: Some(note.into()) });
        }
    }

    /// Counts the bytes of one phase from several threads.
    pub(crate) fn meter(&self, phase: Phase, total_bytes: u64) -> Meter {
        self.tell(phase, 0, total_bytes);
        Meter { progress: self.clone(), phase, total_bytes, done_bytes: Arc::new(AtomicU64::new(0)) }
    }
}

/// The counter of one phase.
#[derive(Clone, Debug)]
pub(crate) struct Meter {
    progress: Progress,
    phase: Phase,
    total_bytes: u64,
    done_bytes: Arc<AtomicU64>,
}

impl Meter {
    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.progress.tell(self.phase, done.min(self.total_bytes), self.total_bytes);
    }

    /// Takes back what must be done again.
    pub(crate) fn take_back(&self, bytes: u64) {
        self.done_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}
