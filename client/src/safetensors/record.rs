//! How a revision's tensors were cut into files: the original header of each, kept as an extra object of the group so
//! that export writes the same bytes. It is not one of the model's files and is never exported.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Where the record stands among the extra files.
pub(crate) const RECORD_PATH: &str = ".ballast/safetensors.json";
/// The folder that a model can not have.
pub(crate) const RESERVED: &str = ".ballast";

/// Whether an extra file is ours and not the model's.
pub(crate) fn is_hidden(path: &str) -> bool {
    path.strip_prefix(RESERVED).is_some_and(|rest| rest.starts_with('/'))
}

/// The tensor files of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// In the order of the import.
    pub(crate) files: Vec<RecordFile>,
}

/// One tensor file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecordFile {
    /// The header's text, padding included.
    pub(crate) header: String,
    /// Path relative to the model's folder.
    pub(crate) path: String,
}

impl Record {
    pub(crate) fn to_bytes(&self) -> Bytes {
        // Strings in a list can always be written as JSON.
        Bytes::from(serde_json::to_vec(self).unwrap_or_default())
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|error| format!("the record {RECORD_PATH} is wrong: {error}"))
    }
}
