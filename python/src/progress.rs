//! Progress told to a Python callable: every change of phase, every end of one, and in between no more than Python can
//! listen to.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballast_client::{Phase, Progress};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

const TELL_EVERY: Duration = Duration::from_millis(50);

/// Progress that calls `callback(phase, done_bytes, total_bytes, note)`. What it raises is shown and ignored.
pub(crate) fn progress(callback: Option<Py<PyAny>>) -> Progress {
    let Some(callback) = callback else { return Progress::none() };
    let told: Mutex<Option<(Phase, Instant)>> = Mutex::new(None);
    Progress::new(move |update| {
        {
            let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
            let is_end = update.total_bytes > 0 && update.done_bytes == update.total_bytes;
            let is_due = told.is_none_or(|(phase, at)| phase != update.phase || at.elapsed() >= TELL_EVERY);
            if !is_due && !is_end {
                return;
            }
            *told = Some((update.phase, Instant::now()));
        }
        Python::attach(|py| {
            let phase = update.phase.to_string();
            let arguments = (phase, update.done_bytes, update.total_bytes, update.note.clone());
            match callback.call1(py, arguments) {
                Ok(_) => {}
                // Ctrl-C while Python was listening: sent on, so that it ends the call and not only the callback.
                // SAFETY: it only marks the signal as come, and the interpreter is attached.
                Err(error) if error.is_instance_of::<PyKeyboardInterrupt>(py) => unsafe {
                    pyo3::ffi::PyErr_SetInterrupt()
                },
                Err(error) => error.write_unraisable(py, None),
            }
        });
    })
}
