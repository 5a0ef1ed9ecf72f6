//! The enumerations of the RFC's state model, with their names and wire numbers.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! wire_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $number:literal as $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// Every value, in the order of the wire numbers.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The number other implementations use on the wire.
            #[must_use]
            pub fn wire_number(self) -> u8 {
                match self { $($name::$variant => $number,)+ }
            }

            /// The RFC's name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }

            /// Reads the RFC's name, in any case.
            #[must_use]
            pub fn from_name(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.name().eq_ignore_ascii_case(text))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

wire_enum! {
    /// Whether a revision is complete and can be safely discovered and read.
    Availability {
        /// Its session is open; invisible to ordinary discovery and reads.
        Importing = 0 as "IMPORTING",
        /// The manifest and every required payload have a readable replica.
        Ready = 1 as "READY",
        /// A required member has lost all readable replicas.
        Degraded = 2 as "DEGRADED",
        /// Being deleted; refuses new leases.
        Deleting = 3 as "DELETING",
        /// A tombstone.
        Deleted = 4 as "DELETED",
    }
}

wire_enum! {
    /// Aggregate physical state of the required payloads.
    Residency {
        /// Not known yet (IMPORTING).
        Unknown = 0 as "UNKNOWN",
        /// Every unit has a memory replica.
        Hot = 1 as "HOT",
        /// Every unit has a cold replica and none is in memory.
        Cold = 2 as "COLD",
        /// Anything readable in between.
        Mixed = 3 as "MIXED",
        /// Nothing readable.
        Absent = 4 as "ABSENT",
    }
}

wire_enum! {
    /// What may change residency after the initial convergence.
    MigrationMode {
        /// Nothing.
        Pinned = 0 as "PINNED",
        /// Explicit `weight_migrate` only.
        Manual = 1 as "MANUAL",
        /// Access and memory pressure, and explicit requests.
        Auto = 2 as "AUTO",
    }
}

wire_enum! {
    /// What a background operation does. 0 and 1 are the RFC's; 2 and 3 are ours, so that deletion and
    /// replacement have an id, progress and an end like every other job.
    OperationKind {
        /// Moves units between the tiers.
        Migrating = 0 as "MIGRATING",
        /// Copies units that lack readable replicas.
        Repairing = 1 as "REPAIRING",
        /// Deletes a whole group.
        Deleting = 2 as "DELETING",
        /// Drives a replacement claim.
        Replacing = 3 as "REPLACING",
    }
}

wire_enum! {
    /// How a generation is replaced.
    UpsertMode {
        /// Publish the target, then retire the base.
        PutFirst = 0 as "PUT_FIRST",
        /// Delete the base, then import the target.
        DeleteFirst = 1 as "DELETE_FIRST",
    }
}

wire_enum! {
    /// Where a replacement claim stands.
    ClaimPhase {
        /// PUT_FIRST: waiting for the target's import to begin.
        PreparingTarget = 0 as "PREPARING_TARGET",
        /// The target is being imported.
        TargetImporting = 1 as "TARGET_IMPORTING",
        /// The base is being deleted.
        DeletingBase = 2 as "DELETING_BASE",
        /// PUT_FIRST: the base is fenced and its leases drain.
        RetiringBase = 3 as "RETIRING_BASE",
        /// The watermark is the target's generation.
        Completed = 4 as "COMPLETED",
        /// Ended without a successor.
        Aborted = 5 as "ABORTED",
    }
}

impl ClaimPhase {
    /// Whether the claim has ended.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, ClaimPhase::Completed | ClaimPhase::Aborted)
    }
}

wire_enum! {
    /// Where an operation stands.
    OperationStatus {
        /// Wants a worker.
        Runnable = 0 as "RUNNABLE",
        /// A worker holds the claim.
        Claimed = 1 as "CLAIMED",
        /// Waits for a condition that the fold or a timer will see; costs no attempt.
        Parked = 2 as "PARKED",
        /// Waits after a failed attempt.
        BackingOff = 3 as "BACKING_OFF",
        /// Stopped by a person until resumed.
        Paused = 4 as "PAUSED",
        /// Ended well.
        Succeeded = 5 as "SUCCEEDED",
        /// Ended: impossible, or out of attempts.
        Failed = 6 as "FAILED",
        /// Ended by a person.
        Cancelled = 7 as "CANCELLED",
        /// Ended because something else took its place.
        Superseded = 8 as "SUPERSEDED",
    }
}

impl OperationStatus {
    /// Whether the operation has ended.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled | Self::Superseded)
    }
}

wire_enum! {
    /// Why an operation waits without costing an attempt.
    ParkReason {
        /// Active leases on the revision must end first.
        LeaseDrain = 0 as "LEASE_DRAIN",
        /// The target of a replacement is not READY yet.
        TargetImport = 1 as "TARGET_IMPORT",
        /// The base of a replacement is not deleted yet.
        BaseDeletion = 2 as "BASE_DELETION",
        /// The cooldown after the last migration has not passed.
        Cooldown = 3 as "COOLDOWN",
        /// No memory to promote into.
        Memory = 4 as "MEMORY",
        /// A reader still maps what is to be released.
        Readers = 5 as "READERS",
        /// A node that holds the bytes does not answer.
        Node = 6 as "NODE",
    }
}

wire_enum! {
    /// What started a migration.
    MigrationTrigger {
        /// Convergence to the preferred residency after publication.
        Initial = 0 as "INITIAL",
        /// `weight_migrate`.
        Explicit = 1 as "EXPLICIT",
        /// A read of a revision that is colder than preferred.
        Access = 2 as "ACCESS",
        /// Memory pressure.
        Pressure = 3 as "PRESSURE",
        /// The end of memory pressure.
        PressureRelief = 4 as "PRESSURE_RELIEF",
        /// A changed policy.
        Policy = 5 as "POLICY",
    }
}

wire_enum! {
    /// The two tiers of a node.
    Tier {
        /// tmpfs, mapped.
        Memory = 0 as "MEMORY",
        /// Local disk.
        Cold = 1 as "COLD",
    }
}

wire_enum! {
    /// Command families that a cluster must confirm before they are accepted (RFC, HA and Upgrade).
    Capability {
        /// Families 8 to 11.
        WeightManagement = 0 as "weight_management",
        /// Family 12.
        WeightLineage = 1 as "weight_lineage",
        /// Family 13: imports with several writers.
        WeightSharing = 2 as "weight_sharing",
    }
}

impl Capability {
    /// The command families behind this gate.
    #[must_use]
    pub fn families(self) -> &'static [u8] {
        match self {
            Self::WeightManagement => &[8, 9, 10, 11],
            Self::WeightLineage => &[12],
            Self::WeightSharing => &[13],
        }
    }
}
