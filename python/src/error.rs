//! Errors on their way to Python: `ballast._errors` has one exception class for each code.

use ballast_schemas::BallastError;
use pyo3::prelude::*;

/// The exception for an error; when even that can not be made, why not.
pub(crate) fn raise(py: Python<'_>, error: &BallastError) -> PyErr {
    let make = || -> PyResult<Bound<'_, PyAny>> {
        let details = (!error.details.is_null()).then(|| error.details.to_string());
        let module = py.import("ballast._errors")?;
        module.call_method1("make", (error.code.name(), error.code.number(), error.message.as_str(), details))
    };
    match make() {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// INVALID_ARGUMENT for JSON of our own Python side that does not parse.
pub(crate) fn read_json<T: serde::de::DeserializeOwned>(what: &str, text: &str) -> Result<T, BallastError> {
    ballast_schemas::read_json(what, text.as_bytes())
}

/// JSON for our own Python side.
pub(crate) fn to_json(value: &impl serde::Serialize) -> Result<String, BallastError> {
    serde_json::to_string(value).map_err(|error| BallastError::invalid(format!("not writable as JSON: {error}")))
}
