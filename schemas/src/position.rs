//! Positions in the log and the names of the things that act on it: nodes, replicas, workers, sessions, leases.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::identity::GroupId;
use crate::text::serde_as_text;

/// Where a command stands in the log: the stream sequence of its envelope and its index inside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map of fields (a JSON object)")]
pub struct LogPosition {
    /// Stream sequence of the envelope, from 1; 0 is before everything.
    pub seq: u64,
    /// Index of the command inside the envelope.
    pub index: u32,
}

impl LogPosition {
    /// Before every entry of the log.
    pub const ZERO: LogPosition = LogPosition { seq: 0, index: 0 };
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.seq, self.index)
    }
}

/// A text that is not `<seq>.<index>`.
#[derive(Debug, thiserror::Error)]
#[error("log position {text:?} is not <sequence>.<index>")]
pub struct PositionError {
    text: String,
}

impl FromStr for LogPosition {
    type Err = PositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || PositionError { text: text.to_owned() };
        let (seq, index) = text.split_once('.').ok_or_else(error)?;
        Ok(LogPosition { seq: seq.parse().map_err(|_| error())?, index: index.parse().map_err(|_| error())? })
    }
}

/// A name for the bytes of one import and no others: the group and the log position of its `BeginImport`.
/// The bytes of a deleted revision can never be taken for its re-import.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map of fields (a JSON object)")]
pub struct InstanceId {
    /// The managed group, derived from the revision identity.
    pub group_id: GroupId,
    /// Log position of the `BeginImport` that made it.
    pub position: LogPosition,
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.group_id, self.position)
    }
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Accepts 1–128 bytes of visible ASCII without spaces.
            ///
            /// # Errors
            /// When the text is empty, longer, or holds another character.
            pub fn new(text: impl Into<String>) -> Result<Self, NameError> {
                Self::read(&text.into())
            }

            fn read(text: &str) -> Result<Self, NameError> {
                let fits = !text.is_empty() && text.len() <= 128 && text.bytes().all(|b| b.is_ascii_graphic());
                if fits { Ok(Self(text.into())) } else { Err(NameError { kind: stringify!($name), text: text.to_owned() }) }
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(text: String) -> Result<Self, NameError> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.as_str().to_owned()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = NameError;
            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::read(text)
            }
        }

        serde_as_text!($name, $name::read);
    };
}

/// A name that is empty, too long, or holds a space or a control character.
#[derive(Debug, thiserror::Error)]
#[error("{kind} {text:?} must be 1 to 128 visible ASCII characters without spaces")]
pub struct NameError {
    kind: &'static str,
    text: String,
}

name!(
    /// The identity of a cluster, chosen once when its log is created.
    ClusterId
);
name!(
    /// The idempotency key of a command: the same id with the same content is answered with the first outcome.
    CommandId
);
name!(
    /// A lease, named by its holder so that a repeated acquire finds it again.
    LeaseId
);
name!(
    /// A transfer worker's durable name.
    NodeId
);
name!(
    /// A background operation: `op-<seq>.<index>[.n]`, from the log position of the entry that created it.
    OperationId
);
name!(
    /// One of several writers of an import: a rank of a training job.
    ParticipantId
);
name!(
    /// A process that folds the log.
    ReplicaId
);
name!(
    /// An import session, named by the importer so that a repeated begin finds it again.
    SessionId
);
name!(
    /// A workflow worker's name for one run of its process.
    WorkerId
);
name!(
    /// One run of a participant, named by it so that a repeated join finds its own epoch again.
    WriterId
);

impl NodeId {
    /// Whether the name can stand as one subject token (no `.`, `*`, `>`).
    #[must_use]
    pub fn is_subject_token(&self) -> bool {
        !self.0.contains(['.', '*', '>'])
    }
}

impl OperationId {
    /// The id of the `n`-th operation that the command at `position` creates.
    #[must_use]
    pub fn at(position: LogPosition, n: u32) -> Self {
        if n == 0 { Self(format!("op-{position}").into()) } else { Self(format!("op-{position}.{n}").into()) }
    }

    /// What [`OperationId::at`] was given; `None` for a text that it never makes: one id, one spelling.
    #[must_use]
    pub fn parts(&self) -> Option<(LogPosition, u32)> {
        fn number<N: FromStr>(digits: &str) -> Option<N> {
            let canonical =
                digits.bytes().all(|digit| digit.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
            digits.parse().ok().filter(|_| canonical)
        }
        let mut parts = self.0.strip_prefix("op-")?.split('.');
        let position = LogPosition { seq: number(parts.next()?)?, index: number(parts.next()?)? };
        let n = match parts.next() {
            None => 0,
            Some(digits) => number(digits).filter(|n| *n != 0)?,
        };
        parts.next().is_none().then_some((position, n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_reads_back_from_its_text() {
        let position = LogPosition { seq: 57, index: 3 };
        assert_eq!(position.to_string().parse::<LogPosition>().unwrap(), position);
        for wrong in ["", "57", "57.", ".3", "a.b", "57.3.1"] {
            assert!(wrong.parse::<LogPosition>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_operation_id_has_one_spelling() {
        for (seq, index, n) in [(0, 0, 0), (57, 3, 0), (u64::MAX, u32::MAX, u32::MAX), (10, 0, 1)] {
            let position = LogPosition { seq, index };
            assert_eq!(OperationId::at(position, n).parts(), Some((position, n)));
        }
        let wrong = [
            "op-57",
            "op-57.3.0",
            "op-057.3",
            "op-57.03",
            "op-+57.3",
            "op-57.3.",
            "op-57.3.1.1",
            "57.3",
            "op-.3",
            "op-57.99999999999",
        ];
        for text in wrong {
            assert_eq!(OperationId::new(text).unwrap().parts(), None, "{text}");
        }
    }

    #[test]
    fn names_refuse_spaces_and_emptiness() {
        assert!(NodeId::new("node-1").is_ok());
        assert!(NodeId::new("").is_err());
        assert!(NodeId::new("a b").is_err());
        assert!(NodeId::new("x".repeat(129)).is_err());
    }
}
