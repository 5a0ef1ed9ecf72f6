//! The rival of the operations: DBOS, run by its own script (`ops/bench_dbos.py`) in turns with ours.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::Error;

/// What the script found.
#[derive(Debug, Deserialize)]
pub(super) struct Measured {
    pub workflows_per_second: f64,
    /// Version, database and how workflows were started.
    pub database: String,
}

pub(super) fn measure(
    python: &Path,
    script: &Path,
    folder: &Path,
    in_flight: usize,
    run_time: Duration,
) -> Result<Measured, Error> {
    let output = Command::new(python)
        .arg(script)
        .args(["--in-flight", &in_flight.to_string(), "--seconds", &run_time.as_secs_f64().to_string()])
        .arg("--folder")
        .arg(folder)
        .output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(said.trim().lines().last().unwrap_or("it ended with an error").to_owned().into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}
