//! Every limit of the system in one place (RFC, Configuration; ARCHITECTURE.md, Limits).

/// Bytes of one identity component.
pub const COMPONENT_BYTES_MAX: usize = 1024;
/// Affinity units of one revision.
pub const UNITS_MAX: u32 = 1_000_000;
/// Revisions on one list page.
pub const LIST_LIMIT_MAX: u32 = 1000;
/// Revisions on one list page when the caller names no limit.
pub const LIST_LIMIT_DEFAULT: u32 = 100;
/// Shortest lease.
pub const LEASE_TTL_MS_MIN: u64 = 1;
/// Longest lease: 24 hours.
pub const LEASE_TTL_MS_MAX: u64 = 86_400_000;
/// A lease whose caller names no time.
pub const LEASE_TTL_MS_DEFAULT: u64 = 60_000;
/// An import session whose caller names no time.
pub const IMPORT_TTL_MS_DEFAULT: u64 = 15_000;
/// Longest import session without a renewal.
pub const IMPORT_TTL_MS_MAX: u64 = 3_600_000;
/// Participants of one import.
pub const IMPORT_PARTICIPANTS_MAX: usize = 1024;
/// Bytes of their names: they stand in the log entry, in every replica and in every snapshot.
pub const IMPORT_PARTICIPANT_NAMES_BYTES_MAX: usize = 16 * 1024;
/// A worker's claim on an operation; renewed every third of it.
pub const CLAIM_TTL_MS: u64 = 6_000;
/// A command is refused by the fold this long after a gateway received it.
pub const COMMAND_WINDOW_MS: u64 = 60_000;
/// The most that one entry may advance the log clock.
pub const CLOCK_STEP_MS_MAX: u64 = 5_000;
/// Silence after which a replica appends a `Tick` while a deadline is pending.
pub const TICK_SILENCE_MS: u64 = 2_000;
/// Bytes of one envelope.
pub const ENVELOPE_BYTES_MAX: usize = 256 * 1024;
/// Commands of one envelope.
pub const ENVELOPE_COMMANDS_MAX: usize = 1_000;
/// Bytes of one JSON request body.
pub const REQUEST_BYTES_MAX: usize = 256 * 1024;
/// Parts of one subject token made from user text, before it is replaced by its digest.
pub const SUBJECT_TOKEN_BYTES_MAX: usize = 128;
/// Failed attempts before an operation ends as FAILED.
pub const RETRY_BUDGET: u32 = 8;
/// First back-off; doubles each time.
pub const BACK_OFF_MS_MIN: u64 = 1_000;
/// Longest back-off.
pub const BACK_OFF_MS_MAX: u64 = 30_000;
/// Bytes of one request's free text (holder, reason).
pub const TEXT_BYTES_MAX: usize = 1024;
/// Bytes of one ordinary object: it travels in one NATS message.
pub const OBJECT_BYTES_MAX: usize = 768 * 1024;
/// Bytes of an ordinary object's key.
pub const OBJECT_KEY_BYTES_MAX: usize = 1024;
/// Objects on one page of a listing.
pub const OBJECT_LIST_MAX: usize = 500;
