//! Why a placement, a part of one or a runtime binding is refused: one sentence that begins with the path of the field.

use crate::manifest::ManifestError;

/// A topology, placement or binding that can not be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("placement {path}: {reason}")]
pub struct PlacementError {
    /// The field, as in `parts[3].fragments[0].nbytes`, or the tensor, as in `tensors["lm_head"]`; `document` for the
    /// whole.
    pub path: String,
    /// What was expected and what was found.
    pub reason: String,
}

impl PlacementError {
    pub(super) fn new(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { path: path.into(), reason: reason.into() }
    }

    /// About a tensor as a whole.
    pub(super) fn tensor(tensor_id: &str, reason: impl Into<String>) -> Self {
        Self::new(format!("tensors[{tensor_id:?}]"), reason)
    }
}

/// The documents share their reader and their tensor descriptors.
impl From<ManifestError> for PlacementError {
    fn from(error: ManifestError) -> Self {
        Self { path: error.path, reason: error.reason }
    }
}

impl From<PlacementError> for crate::BallastError {
    fn from(error: PlacementError) -> Self {
        let details = serde_json::json!({"field": error.path});
        crate::BallastError::invalid(error.to_string()).with_details(details)
    }
}
