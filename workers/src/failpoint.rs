//! Test aids: a place where the process kills itself, and a pause between steps. Off unless the environment asks.
//!
//! * `BALLAST_FAILPOINT=<machine>.<step>.<before|after>`: the process ends by SIGKILL at that place, as a crash would
//!   end it. Machines are `migration`, `repair`, `deletion`, `replacement`, `loss` (the watch; all in a workflow worker)
//!   and `node` (in a transfer worker); a step is the snake-case name of the node request (`copy_to_cold`) or of the command (`authorize_release`)
//!   that it consists of, and `claim`. On a node, effects on bytes also have a `middle`: some of the work is done.
//!   [`STEPS`] is the list, `ballast failpoints` prints it, and `make crash-sweep` strikes every one.
//! * `BALLAST_FAILPOINT_FILE=<path>`: the failpoint strikes only if it can create this file, so once in all, however
//!   often a supervisor restarts the process with the same environment.
//! * `BALLAST_STEP_DELAY_MS=<milliseconds>`: a workflow worker pauses this long before each step, so that a person (or
//!   a demonstration) can interrupt it in the middle. The claim is renewed meanwhile.
//! * `BALLAST_WATCH_DELAY_MS=<milliseconds>`: a workflow worker watches for losses only after this long, so that an
//!   operation meets one first.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::time::Duration;

use ballast_schemas::{Command, NodeRequest, OperationKind};

/// Longest accepted pause: a larger number is a mistyped one.
const DELAY_MAX: Duration = Duration::from_secs(600);
const STEP_DELAY: &str = "BALLAST_STEP_DELAY_MS";
const WATCH_DELAY: &str = "BALLAST_WATCH_DELAY_MS";

/// On which side of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Nothing of it has happened.
    Before,
    /// Some of it has happened.
    Middle,
    /// All of it has happened, and nobody has been told.
    After,
}

impl Side {
    const ALL: [Self; 3] = [Self::Before, Self::Middle, Self::After];

    fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::Middle => "middle",
            Self::After => "after",
        }
    }
}

/// Every step of every machine at which a process can be killed. A step that is executed and not listed here fails every
/// test that executes it ([`Failpoint::strike`]), so the sweep can not miss one.
const STEPS: [(&str, &[&str]); 6] = [
    (
        "migration",
        &[
            "claim",
            "renew_claim",
            "raise_fence",
            "copy_to_cold",
            "copy_to_memory",
            "authorize_release",
            "release_memory",
            "operation_advanced",
            "operation_finished",
            "park_operation",
            "operation_attempt_failed",
            "revision_degraded",
        ],
    ),
    (
        "repair",
        &[
            "claim",
            "renew_claim",
            "raise_fence",
            "copy_to_cold",
            "copy_to_memory",
            "operation_advanced",
            "operation_finished",
            "park_operation",
            "operation_attempt_failed",
            "revision_degraded",
        ],
    ),
    ("loss", &["revision_degraded", "revision_recovered", "start_repair"]),
    (
        "deletion",
        &[
            "claim",
            "renew_claim",
            "raise_fence",
            "delete_units",
            "delete_instance",
            "operation_advanced",
            "deletion_finished",
            "park_operation",
            "operation_attempt_failed",
        ],
    ),
    (
        "replacement",
        &[
            "claim",
            "renew_claim",
            "raise_fence",
            "copy_to_cold",
            "operation_advanced",
            "replacement_advanced",
            "park_operation",
            "operation_attempt_failed",
            "revision_degraded",
        ],
    ),
    (
        "node",
        &[
            "inventory",
            "receipt",
            "affinity_index",
            "raise_fence",
            "copy_to_cold",
            "copy_to_memory",
            "release_memory",
            "delete_units",
            "delete_instance",
            "verify",
        ],
    ),
];

/// Effects of a node that tell how far they have come.
const WITH_MIDDLE: [&str; 5] = ["copy_to_cold", "copy_to_memory", "release_memory", "delete_units", "delete_instance"];

/// Every value that `BALLAST_FAILPOINT` takes, in the order of the machines' steps.
#[must_use]
pub fn failpoints() -> Vec<String> {
    let steps = STEPS.iter().flat_map(|(machine, steps)| steps.iter().map(move |step| (*machine, *step)));
    let places = steps.flat_map(|(machine, step)| Side::ALL.map(|side| (machine, step, side)));
    let there = places
        .filter(|(machine, step, side)| *side != Side::Middle || (*machine == "node" && WITH_MIDDLE.contains(step)));
    there.map(|(machine, step, side)| format!("{machine}.{step}.{}", side.name())).collect()
}

/// What the environment asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failpoint {
    place: Option<String>,
    once_file: Option<PathBuf>,
    step_delay: Duration,
    watch_delay: Duration,
}

/// A test aid in the environment that makes no sense; ignoring it would let a test pass that tests nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailpointError {
    /// Not one of [`failpoints`].
    #[error(
        "BALLAST_FAILPOINT is {given:?}; it must be <machine>.<step>.<before|after>, like migration.copy_to_cold.after: `ballast failpoints` lists them all"
    )]
    Place {
        /// What was given.
        given: String,
    },
    /// Not a number of milliseconds.
    #[error("{name} is {given:?}; it must be a number of milliseconds up to 600000")]
    Delay {
        /// The variable.
        name: &'static str,
        /// What was given.
        given: String,
    },
}

impl Failpoint {
    /// Reads the four variables.
    pub(crate) fn from_env() -> Result<Self, FailpointError> {
        Self::from_values(
            std::env::var_os("BALLAST_FAILPOINT"),
            std::env::var_os("BALLAST_FAILPOINT_FILE"),
            std::env::var_os(STEP_DELAY),
            std::env::var_os(WATCH_DELAY),
        )
    }

    fn from_values(
        place: Option<OsString>,
        once_file: Option<OsString>,
        step_delay: Option<OsString>,
        watch_delay: Option<OsString>,
    ) -> Result<Self, FailpointError> {
        let text = |value: Option<OsString>| {
            value.map(|value| value.to_string_lossy().into_owned()).filter(|text| !text.is_empty())
        };
        let place = match text(place) {
            Some(given) if !failpoints().contains(&given) => return Err(FailpointError::Place { given }),
            place => place,
        };
        let delay = |name, value| match text(value) {
            None => Ok(Duration::ZERO),
            Some(given) => match given.parse().map(Duration::from_millis) {
                Ok(delay) if delay <= DELAY_MAX => Ok(delay),
                _ => Err(FailpointError::Delay { name, given }),
            },
        };
        let (step_delay, watch_delay) = (delay(STEP_DELAY, step_delay)?, delay(WATCH_DELAY, watch_delay)?);
        let once_file = once_file.filter(|path| !path.is_empty()).map(PathBuf::from);
        Ok(Self { place, once_file, step_delay, watch_delay })
    }

    /// Ends the process here if this is the place.
    pub(crate) fn strike(&self, machine: &str, step: &str, side: Side) {
        debug_assert!(
            STEPS.iter().any(|(name, steps)| *name == machine && steps.contains(&step)),
            "{machine}.{step} is not in the list of failpoints, so the crash sweep would miss it"
        );
        if !self.is_at(machine, step, side) || !self.may_strike() {
            return;
        }
        tracing::warn!(machine, step, ?side, "failpoint: killing this process");
        // Not `abort`: nothing may run after this point, as in a real crash.
        let killed = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        tracing::error!(?killed, "the failpoint could not kill this process");
    }

    fn is_at(&self, machine: &str, step: &str, side: Side) -> bool {
        self.place.as_ref().is_some_and(|place| place.split('.').eq([machine, step, side.name()]))
    }

    fn may_strike(&self) -> bool {
        match &self.once_file {
            None => true,
            Some(path) => OpenOptions::new().write(true).create_new(true).open(path).is_ok(),
        }
    }

    /// The pause before a step.
    pub(crate) async fn pause(&self) {
        if !self.step_delay.is_zero() {
            tokio::time::sleep(self.step_delay).await;
        }
    }

    /// The pause before the watch for losses begins.
    pub(crate) async fn pause_watch(&self) {
        tokio::time::sleep(self.watch_delay).await;
    }
}

/// The machine's name in a failpoint.
pub(crate) fn machine_name(kind: OperationKind) -> &'static str {
    match kind {
        OperationKind::Migrating => "migration",
        OperationKind::Repairing => "repair",
        OperationKind::Deleting => "deletion",
        OperationKind::Replacing => "replacement",
    }
}

/// A node request's name in a failpoint.
pub(crate) fn request_name(request: &NodeRequest) -> &'static str {
    match request {
        NodeRequest::Inventory { .. } => "inventory",
        NodeRequest::Receipt { .. } => "receipt",
        NodeRequest::AffinityIndex { .. } => "affinity_index",
        NodeRequest::RaiseFence { .. } => "raise_fence",
        NodeRequest::CopyToCold(_) => "copy_to_cold",
        NodeRequest::CopyToMemory(_) => "copy_to_memory",
        NodeRequest::ReleaseMemory(_) => "release_memory",
        NodeRequest::DeleteUnits(_) => "delete_units",
        NodeRequest::DeleteInstance { .. } => "delete_instance",
        NodeRequest::Verify { .. } => "verify",
    }
}

/// The name in a failpoint of a command that a workflow worker appends.
pub(crate) fn command_name(command: &Command) -> &'static str {
    match command {
        Command::ClaimOperation(_) => "claim",
        Command::RenewClaim(_) => "renew_claim",
        Command::OperationAdvanced(_) => "operation_advanced",
        Command::OperationAttemptFailed(_) => "operation_attempt_failed",
        Command::ParkOperation(_) => "park_operation",
        Command::AuthorizeRelease(_) => "authorize_release",
        Command::OperationFinished(_) => "operation_finished",
        Command::DeletionFinished(_) => "deletion_finished",
        Command::ReplacementAdvanced(_) => "replacement_advanced",
        Command::RevisionDegraded(_) => "revision_degraded",
        Command::RevisionRecovered(_) => "revision_recovered",
        Command::StartRepair(_) => "start_repair",
        // A worker appends no other; one that does is not in the list of steps.
        _ => "unlisted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(place: Option<&str>, delay: Option<&str>) -> Result<Failpoint, FailpointError> {
        Failpoint::from_values(place.map(OsString::from), None, delay.map(OsString::from), delay.map(OsString::from))
    }

    #[test]
    fn a_failpoint_is_only_at_its_own_place() {
        let failpoint = from(Some("migration.copy_to_cold.after"), None).unwrap();
        assert!(failpoint.is_at("migration", "copy_to_cold", Side::After));
        assert!(!failpoint.is_at("migration", "copy_to_cold", Side::Before));
        assert!(!failpoint.is_at("deletion", "copy_to_cold", Side::After));
        assert!(!from(None, None).unwrap().is_at("migration", "copy_to_cold", Side::After));
    }

    #[test]
    fn a_mistyped_test_aid_is_refused() {
        for wrong in [
            "migration",
            "migration.claim",
            "migration.claim.middle",
            "migration.claims.after",
            "..before",
            "a.b.c.after",
        ] {
            assert!(matches!(from(Some(wrong), None), Err(FailpointError::Place { .. })), "{wrong}");
        }
        for wrong in ["2s", "-1", "600001"] {
            assert!(matches!(from(None, Some(wrong)), Err(FailpointError::Delay { .. })), "{wrong}");
        }
        assert_eq!(from(Some(""), Some("")).unwrap(), Failpoint::default());
    }

    #[test]
    #[should_panic(expected = "not in the list of failpoints")]
    fn a_step_that_the_list_does_not_have_is_found_by_every_test_that_executes_it() {
        Failpoint::default().strike("deletion", "copy_to_memory", Side::Before);
    }

    #[test]
    fn every_failpoint_is_listed_once() {
        let all = failpoints();
        let distinct: std::collections::BTreeSet<&String> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        let effects = STEPS.iter().find(|(machine, _)| *machine == "node").unwrap().1;
        assert!(WITH_MIDDLE.iter().all(|step| effects.contains(step)));
    }

    #[test]
    fn with_a_file_a_failpoint_strikes_once_over_all_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let failpoint = Failpoint { once_file: Some(folder.path().join("struck")), ..Failpoint::default() };
        assert!(failpoint.may_strike());
        assert!(!failpoint.clone().may_strike());
    }
}
