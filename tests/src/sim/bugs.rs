//! Planted bugs: for every safety invariant, and for every mistake that a design like this invites, a switch that makes the
//! model (or, where the rule lives in the fold, a wrapper around it) do the wrong thing. A simulation that does not catch
//! each of them proves nothing; `tests/planted_bugs.rs` demands that it does.

use std::fmt;

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident => $caught_by:literal,)+) => {
        /// A mistake that a simulation can be told to make.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Bug {
            $($(#[$doc])* $name,)+
        }

        impl Bug {
            /// Every planted bug.
            pub const ALL: &'static [Bug] = &[$(Bug::$name,)+];

            /// Its name on the command line and in reports.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Bug::$name => stringify!($name),)+ }
            }

            /// Beginnings of the names of the invariants that may catch it, separated by `|`.
            #[must_use]
            pub fn caught_by(self) -> &'static str {
                match self { $(Bug::$name => $caught_by,)+ }
            }
        }
    };
}

bugs! {
    // The six that ARCHITECTURE.md, How it is proved, names.
    /// A worker reports a cancelled release as fenced off without having the nodes obey a later fence: the old release
    /// strikes under a lease granted since.
    StaleReleaseAfterCancel => "5,",
    /// A worker deletes the base of a PUT_FIRST after its leases drained without looking at the target once more.
    TargetLostWhileBaseDrains => "12,",
    /// A worker takes a hint off the queue when it is done instead of when its claim is accepted, and nobody repeats hints:
    /// the wake-up that came meanwhile is refused as a double, and then its predecessor is acknowledged.
    HintAckedAfterItsWakeUp => "liveness",
    /// A gateway that sends an append again stamps its commands anew and never gives up: an envelope that comes after the
    /// window of the command table happens a second time.
    LateEnvelopeStampedAnew => "once|liveness",
    /// A gateway stamps a request when it reads it, however long it lay in its connection: one that comes after the window of
    /// the command table happens a second time.
    LateRequestStampedAfresh => "once|identity of bytes|nothing left|liveness",
    /// A node serves what it found in its folders without asking the log, and never drops what the log knows to be deleted.
    OldInstanceReadopted => "nothing left|identity of bytes|liveness",
    /// A node knows of readers that map a segment only by counting in its process: a restart forgets them.
    WorkerKilledUnderMapping => "readers",

    // One for every safety invariant of the RFC, some with several.
    /// 1: a commit references another revision's manifest.
    OtherManifestIdentity => "1,",
    /// 2: a gateway commits on the importer's word, without a receipt from every node.
    CommitWithoutReceipts => "2,",
    /// 2: a node takes what a participant offers for what it holds.
    OffersCountUnread => "2,",
    /// 2: the fold publishes an import although a participant that was joined has not finished.
    CommitWithoutAPart => "participants",
    /// 2: the fold publishes an import that has not been committed.
    ReadyWhileImporting => "2,|state table",
    /// 3: the manifest reference changes after READY.
    ManifestChanges => "3,",
    /// 4: a record changes without a new metadata generation.
    GenerationStands => "4,",
    /// 4: a watermark falls.
    WatermarkFalls => "4,",
    /// 5: a worker releases memory without asking the log for leave.
    ReleaseWithoutLeave => "5,",
    /// 5: a node tells a reader what is hot, and guards it only afterwards.
    GuardAfterDescribe => "readers",
    /// 6: a node takes the copy on disk on trust when it frees the one in memory.
    ReleaseWithoutWitness => "6,",
    /// 6: a copy on disk counts without being read back.
    CopyCountsUnverified => "6,",
    /// 7: the eviction of ordinary objects takes what belongs to a managed group.
    EvictionTakesManaged => "7,",
    /// 8: a tombstone keeps its operation.
    TombstoneKeepsOperation => "8,|state table",
    /// 9: a worker writes the names of units into an operation's note.
    UnitsInMetadata => "9,",
    /// 10: a worker finishes a migration on recorded progress, without looking at the nodes.
    TrustsRecordedProgress => "10,",
    /// 11: a client takes the watermark for the generation that is served.
    WatermarkAsHead => "11,",
    /// 12: the fold retires a base before its target is READY.
    BaseRetiredEarly => "12,",

    // Beyond the twelve.
    /// The fold hears a run of a participant that was replaced.
    ReplacedPartIsHeard => "participants",
    /// The fold hears a run of a coordinator that was replaced.
    ReplacedCoordinatorIsHeard => "participants",
    /// The state table: a READY revision that is ABSENT.
    ReadyAndAbsent => "state table",
    /// A round of demotions begins as soon as the last one's migrations have ended, on figures from before.
    RoundNotAwaited => "pressure",
    /// Workers ask for no repair of what was lost.
    LossNotRepaired => "liveness",
    /// An operation's cursor goes back.
    ProgressGoesBack => "operations",
    /// A replica decides something by itself.
    ReplicaDecidesAlone => "replicas agree",
    /// A worker's deletion forgets all holders but the first.
    DeletionForgetsHolder => "nothing left",
    /// A node deletes an instance that the log does not know yet.
    UnknownIsDropped => "identity of bytes|2,|6,|5,",
    /// A node answers for whatever instance of the group it holds.
    LooksUpByGroup => "identity of bytes|nothing left",
    /// A node's fences do not survive its process.
    FencesForgotten => "5,|6,|10,",
    /// A reader counts what it read although its lease had lapsed.
    LapseIgnored => "counted reads",
}

impl fmt::Display for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Bug {
    /// Reads [`Bug::name`], in any case.
    #[must_use]
    pub fn from_name(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|bug| bug.name().eq_ignore_ascii_case(text))
    }
}
