//! Why a manifest is refused: one sentence that begins with the path of the field.

/// A manifest document, or the parts to make one of, that can not be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("manifest {path}: {reason}")]
pub struct ManifestError {
    /// The field, as in `fragments[3].nbytes`; `document` for the whole.
    pub path: String,
    /// What was expected and what was found.
    pub reason: String,
}

impl ManifestError {
    pub(crate) fn new(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { path: path.into(), reason: reason.into() }
    }
}

impl From<ManifestError> for crate::BallastError {
    fn from(error: ManifestError) -> Self {
        let details = serde_json::json!({"field": error.path});
        crate::BallastError::invalid(error.to_string()).with_details(details)
    }
}
