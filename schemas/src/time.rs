//! Log time: milliseconds of the log clock, which only measures durations (see ARCHITECTURE.md, Log clock).
//! Not a wall-clock time; those are `*_unix_ms` fields, kept for display only.

use serde::{Deserialize, Serialize};

/// A moment on the log clock, in milliseconds since the cluster was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LogTime(pub u64);

impl LogTime {
    /// The last moment there is; a deadline that never comes.
    pub const MAX: LogTime = LogTime(u64::MAX);

    /// This moment plus `ms` milliseconds, saturating.
    #[must_use]
    pub fn plus_ms(self, ms: u64) -> LogTime {
        LogTime(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to this moment; zero when `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: LogTime) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
