//! What can be wrong with a checkpoint on disk, each with the file, what was expected and what was found.

use std::io;
use std::path::PathBuf;

use ballast_schemas::BallastError;
use serde_json::json;

/// Why a file or folder can not be imported. Nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// There is nothing there.
    #[error("{path} does not exist; give a safetensors file or a folder that holds one", path = path.display())]
    Missing {
        /// What was named.
        path: PathBuf,
    },
    /// The operating system refuses.
    #[error("can not {action} {path}: {source}", path = path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is not what its format says.
    #[error("{path} is not a sound safetensors file: {reason}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Expected and found.
        reason: String,
    },
    /// The index does not fit its shards.
    #[error("{path} is not a sound index: {reason}", path = path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// Expected and found.
        reason: String,
    },
    /// The folder can not travel as it is.
    #[error("{path} can not be imported: {reason}", path = path.display())]
    Folder {
        /// The folder, or the entry in it.
        path: PathBuf,
        /// What is in the way and what to do.
        reason: String,
    },
}

impl SafetensorsError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { path },
            _ => Self::Io { action, path, source },
        }
    }

    pub(crate) fn file(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::File { path: path.into(), reason: reason.into() }
    }

    pub(crate) fn folder(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::Folder { path: path.into(), reason: reason.into() }
    }
}

impl From<SafetensorsError> for BallastError {
    fn from(error: SafetensorsError) -> Self {
        let (SafetensorsError::Missing { path }
        | SafetensorsError::Io { path, .. }
        | SafetensorsError::File { path, .. }
        | SafetensorsError::Index { path, .. }
        | SafetensorsError::Folder { path, .. }) = &error;
        let details = json!({"path": path.display().to_string()});
        BallastError::invalid(error.to_string()).with_details(details)
    }
}
