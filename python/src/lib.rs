//! The Rust side of the Python package `ballast`: connections, writers, reads and open revisions, with the GIL released
//! while they work. Records cross as JSON and bytes as addresses, which keeps one build right for every Python; what they
//! mean to a Python programmer is `python/ballast`'s matter.

mod client;
mod error;
mod opened;
mod placement;
mod progress;
mod runtime;
mod writer;

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs one command line of the `ballast` command; answers the exit code.
#[pyfunction]
fn cli_main(py: Python<'_>, arguments: Vec<OsString>) -> i32 {
    py.detach(|| ballast_cli::main(arguments))
}

/// The module `ballast._native`.
#[pymodule(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<client::Client>()?;
    module.add_class::<opened::Opened>()?;
    module.add_class::<opened::View>()?;
    module.add_class::<placement::Placement>()?;
    module.add_class::<runtime::Cancel>()?;
    module.add_class::<writer::Writer>()?;
    module.add_function(wrap_pyfunction!(cli_main, module)?)?;
    module.add_function(wrap_pyfunction!(placement::parse_name, module)?)?;
    module.add_function(wrap_pyfunction!(placement::identity_name, module)?)?;
    module.add_function(wrap_pyfunction!(placement::manifest_tensors, module)?)?;
    Ok(())
}
