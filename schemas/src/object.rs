//! Ordinary objects of a node: what is asked on `ballast.node.<node>.object` and answered (ARCHITECTURE.md, Ordinary
//! objects). A message is one line of JSON; what follows the line are the object's bytes. No revision is reached this way.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::BallastError;
use crate::limits::OBJECT_KEY_BYTES_MAX;
use crate::request::read_json;
use crate::text;

/// What a node is asked about its ordinary objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", try_from = "RawObjectRequest")]
pub enum ObjectRequest {
    /// Store the bytes that follow under a key, in place of what was there.
    Put {
        /// The key.
        key: ObjectKey,
    },
    /// Give the bytes.
    Get {
        /// The key.
        key: ObjectKey,
    },
    /// Remove one object.
    Remove {
        /// The key.
        key: ObjectKey,
    },
    /// Name the objects, in the order of their keys.
    List {
        /// Only keys after this one.
        after: String,
    },
    /// Remove every object.
    Clear {
        /// Only count.
        dry_run: bool,
    },
}

/// A request as it is read: flat, since a reader of tagged variants could not say which field is wrong.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawObjectRequest {
    op: Op,
    key: Option<ObjectKey>,
    after: Option<String>,
    dry_run: Option<bool>,
}

struct Op(&'static str);

impl<'de> Deserialize<'de> for Op {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text::one_of(deserializer, &["put", "get", "remove", "list", "clear"], |op| op).map(Self)
    }
}

impl TryFrom<RawObjectRequest> for ObjectRequest {
    type Error = String;

    fn try_from(raw: RawObjectRequest) -> Result<Self, String> {
        let RawObjectRequest { op: Op(op), key, after, dry_run } = raw;
        let takes =
            |field: &str, is_there: bool| if is_there { Err(format!("{op} takes no `{field}`")) } else { Ok(()) };
        if op != "list" {
            takes("after", after.is_some())?;
        }
        if op != "clear" {
            takes("dry_run", dry_run.is_some())?;
        }
        if matches!(op, "list" | "clear") {
            takes("key", key.is_some())?;
        }
        let key = || key.ok_or_else(|| format!("{op} needs a `key`"));
        Ok(match op {
            "put" => Self::Put { key: key()? },
            "get" => Self::Get { key: key()? },
            "remove" => Self::Remove { key: key()? },
            "list" => Self::List { after: after.unwrap_or_default() },
            _ => Self::Clear { dry_run: dry_run.unwrap_or_default() },
        })
    }
}

/// A node's answer to an [`ObjectRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectReply {
    /// It is there now.
    Stored {
        /// Its bytes.
        bytes: u64,
        /// Objects that gave way to it.
        evicted: u64,
    },
    /// Its bytes follow the line.
    Found {
        /// How many bytes.
        bytes: u64,
    },
    /// It is gone.
    Removed {
        /// Its bytes.
        bytes: u64,
    },
    /// Some of the objects.
    Listed {
        /// In the order of their keys.
        objects: Vec<ObjectEntry>,
        /// Whether there are more after the last one.
        more: bool,
    },
    /// What was cleared, or would be.
    Cleared {
        /// Objects.
        objects: u64,
        /// Their bytes.
        bytes: u64,
        /// Keys of managed groups that were met and left alone.
        skipped: u64,
    },
    /// Not done: the error as every face shows it, with its number.
    Failed(#[serde(serialize_with = "with_number")] BallastError),
}

fn with_number<S: serde::Serializer>(error: &BallastError, serializer: S) -> Result<S::Ok, S::Error> {
    error.to_body()["error"].serialize(serializer)
}

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectEntry {
    /// The key.
    pub key: String,
    /// Its bytes.
    pub bytes: u64,
}

/// The ordinary objects of a node, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectCounts {
    /// Objects held.
    pub count: u64,
    /// Their bytes, charged to the memory tier.
    pub bytes: u64,
    /// Objects that gave way to others or to managed groups since the node started.
    pub evicted: u64,
    /// Keys of managed groups that a generic path met and left alone since the node started, by path
    /// ([`GENERIC_PATHS`]).
    pub guard_skips: BTreeMap<String, u64>,
}

/// Every generic path that removes objects: room for a managed group, the watermark, a single key, everything.
pub const GENERIC_PATHS: [&str; 4] = ["evict", "quota", "remove", "clear"];

/// A key that is no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an object's key must have 1 to {OBJECT_KEY_BYTES_MAX} bytes and no control characters; {key:?} has {} bytes", key.len())]
pub struct ObjectKeyError {
    key: String,
}

/// The key of an ordinary object, or of a managed group's member that somebody takes for one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ObjectKey(String);

impl ObjectKey {
    /// A key from text.
    ///
    /// # Errors
    /// When it is empty, too long or has control characters.
    pub fn new(key: impl Into<String>) -> Result<Self, ObjectKeyError> {
        let key = key.into();
        if key.is_empty() || key.len() > OBJECT_KEY_BYTES_MAX || key.chars().any(char::is_control) {
            return Err(ObjectKeyError { key });
        }
        Ok(Self(key))
    }

    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key of the managed group that this one would be a member of: `weight:<sha256>` for what lies below it, the
    /// manifest's key for what lies below `weights/<ns>/<resource>/<revision>/<generation>`. `None` for an ordinary key.
    #[must_use]
    pub fn managed_owner(&self) -> Option<String> {
        if self.0.starts_with("weight:") {
            return self.0.split('/').next().map(str::to_owned);
        }
        let rest = self.0.strip_prefix("weights/")?;
        let base: Vec<&str> = rest.split('/').take(4).collect();
        Some(format!("weights/{}/manifest", base.join("/")))
    }
}

impl TryFrom<String> for ObjectKey {
    type Error = ObjectKeyError;

    fn try_from(key: String) -> Result<Self, ObjectKeyError> {
        Self::new(key)
    }
}

impl From<ObjectKey> for String {
    fn from(key: ObjectKey) -> Self {
        key.0
    }
}

impl std::fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

/// One message: a line of JSON, then bytes.
///
/// # Errors
/// When the head can not be written as JSON.
pub fn object_message<T: Serialize>(head: &T, bytes: &[u8]) -> Result<Vec<u8>, serde_json::Error> {
    let mut message = serde_json::to_vec(head)?;
    message.push(b'\n');
    message.extend_from_slice(bytes);
    Ok(message)
}

/// The head of a message, and where its bytes begin.
///
/// # Errors
/// `INVALID_ARGUMENT` when the first line is not the JSON expected.
pub fn object_head<T: DeserializeOwned>(message: &[u8]) -> Result<(T, usize), BallastError> {
    let line = message.iter().position(|byte| *byte == b'\n').unwrap_or(message.len());
    let head = read_json("the first line", message.get(..line).unwrap_or_default())?;
    Ok((head, line.saturating_add(1).min(message.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_a_line_and_bytes() {
        let request = ObjectRequest::Put { key: ObjectKey::new("a/b").unwrap() };
        let message = object_message(&request, b"\n\0x").unwrap();
        assert!(message.starts_with(b"{\"op\":\"put\",\"key\":\"a/b\"}\n"));
        let (head, at) = object_head::<ObjectRequest>(&message).unwrap();
        assert_eq!((head, &message[at..]), (request, b"\n\0x".as_slice()));
        let (head, at) = object_head::<ObjectRequest>(b"{\"op\":\"clear\"}").unwrap();
        assert_eq!((head, at), (ObjectRequest::Clear { dry_run: false }, 14));
        for wrong in ["", "{}", r#"{"op":"put","key":""}"#, r#"{"op":"get","key":"a\nb"}"#, r#"{"op":"burn"}"#] {
            assert!(object_head::<ObjectRequest>(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_wrong_request_names_its_field() {
        for (wrong, words) in [
            (r#"{"op":"burn"}"#, "`op`"),
            (r#"{"op":{"put":null}}"#, "`op`"),
            (r#"{"op":"put"}"#, "put needs a `key`"),
            (r#"{"op":"put","key":1}"#, "`key`"),
            (r#"{"op":"get","key":""}"#, "`key`"),
            (r#"{"op":"get","key":NaN}"#, "`key`"),
            (r#"{"op":"get","key":"a","key":"b"}"#, "`key`"),
            (r#"{"op":"list","after":3}"#, "`after`"),
            (r#"{"op":"list","key":"a"}"#, "list takes no `key`"),
            (r#"{"op":"clear","dry_run":"yes"}"#, "`dry_run`"),
            (r#"{"op":"get","key":"a","dry_run":true}"#, "get takes no `dry_run`"),
            (r#"{"op":"get","key":"a","color":1}"#, "`color`"),
            (r#"["clear"]"#, "first line"),
        ] {
            let error = object_head::<ObjectRequest>(wrong.as_bytes()).unwrap_err();
            assert!(error.message.contains(words), "{wrong}: {error}");
        }
        let long = format!(r#"{{"op":"get","key":"{}"}}"#, "k".repeat(1 << 20));
        assert!(object_head::<ObjectRequest>(long.as_bytes()).unwrap_err().message.len() < 2000);
    }

    #[test]
    fn keys_of_managed_groups_are_told_from_ordinary_ones() {
        let owner = |key: &str| ObjectKey::new(key).unwrap().managed_owner();
        assert_eq!(owner("weights/ns/m/main/1/manifest").as_deref(), Some("weights/ns/m/main/1/manifest"));
        assert_eq!(owner("weights/ns/m/main/1/payload/t/f").as_deref(), Some("weights/ns/m/main/1/manifest"));
        assert_eq!(owner("weight:ab12").as_deref(), Some("weight:ab12"));
        assert_eq!(owner("weight:ab12/payload/0").as_deref(), Some("weight:ab12"));
        assert_eq!(owner("kv/weights/x"), None);
    }
}
