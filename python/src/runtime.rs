//! Waiting for Rust from Python: without the GIL, ended by Ctrl-C or by whoever cancels, and never leaving a lease or an
//! import behind.

use std::future::Future;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use ballast_client::Gateway;
use ballast_schemas::{BallastError, ErrorCode};
use pyo3::prelude::*;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::error::raise;

/// How often Python is asked whether a signal has come.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);
/// How long a call that failed or was interrupted waits until its lease is released and its import aborted.
const SETTLE_PATIENCE: Duration = Duration::from_secs(3);

/// The runtime of this process. A fork has none of its parent's threads and gets one of its own. No lock, which a fork could
/// inherit held.
static RUNTIME: AtomicPtr<Own> = AtomicPtr::new(std::ptr::null_mut());

/// A runtime, and the process whose threads it has.
struct Own {
    process: u32,
    runtime: Runtime,
}

/// The runtime that everything runs on. It lives as long as the process.
pub(crate) fn runtime() -> Result<&'static Runtime, BallastError> {
    let process = std::process::id();
    let current = RUNTIME.load(Ordering::Acquire);
    // SAFETY: null, or a box that was leaked below.
    if let Some(own) = unsafe { current.as_ref() }
        && own.process == process
    {
        return Ok(&own.runtime);
    }
    let made = tokio::runtime::Builder::new_multi_thread().thread_name("ballast").enable_all().build();
    let made = made.map_err(|error| {
        BallastError::new(ErrorCode::Unavailable, format!("the runtime of the client does not start: {error}"))
    })?;
    let made = Box::into_raw(Box::new(Own { process, runtime: made }));
    match RUNTIME.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: leaked, so that it lives as long as the process.
        Ok(_) => Ok(unsafe { &(*made).runtime }),
        Err(_) => {
            // SAFETY: nobody else has seen it. Another thread was faster.
            unsafe { Box::from_raw(made) }.runtime.shutdown_background();
            runtime()
        }
    }
}

/// Ends a call from another thread.
#[pyclass(frozen, module = "ballast._native")]
pub(crate) struct Cancel {
    switch: watch::Sender<bool>,
}

#[pymethods]
impl Cancel {
    #[new]
    fn new() -> Self {
        Self { switch: watch::Sender::new(false) }
    }

    /// Ends the call that was given this, or the next one that is.
    fn cancel(&self) {
        self.switch.send_replace(true);
    }
}

enum End<T> {
    Done(T),
    Signal(PyErr),
    Cancelled,
}

/// Waits for `work` without the GIL. A signal handler that raises ends it, and so does `cancel`; what it had open is then
/// released before this returns.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    gateway: Option<&Gateway>,
    cancel: Option<&Cancel>,
    work: impl Future<Output = Result<T, BallastError>> + Send,
) -> PyResult<T> {
    // Progress is told in the middle of a call, on its thread.
    if tokio::runtime::Handle::try_current().is_ok() {
        let message =
            "Ballast was called out of a progress callback, which one of its calls waits for; do it after that call";
        return Err(raise(py, &BallastError::invalid(message)));
    }
    let runtime = runtime().map_err(|error| raise(py, &error))?;
    let mut cancelled = cancel.map(|cancel| cancel.switch.subscribe());
    let end = py.detach(|| {
        let end = runtime.block_on(async {
            let signal = async {
                loop {
                    tokio::time::sleep(SIGNALS_EVERY).await;
                    if let Err(error) = Python::attach(|py| py.check_signals()) {
                        return error;
                    }
                }
            };
            let cancelled = async {
                if let Some(switch) = &mut cancelled
                    && switch.wait_for(|thrown| *thrown).await.is_ok()
                {
                    return;
                }
                // A switch that is gone can not be thrown any more.
                std::future::pending().await
            };
            tokio::select! {
                done = work => End::Done(done),
                error = signal => End::Signal(error),
                () = cancelled => End::Cancelled,
            }
        });
        // What failed or was ended lets go of its lease, or its import, behind our back.
        if !matches!(end, End::Done(Ok(_)))
            && let Some(gateway) = gateway
        {
            runtime.block_on(gateway.settle(SETTLE_PATIENCE));
        }
        end
    });
    match end {
        End::Done(Ok(value)) => Ok(value),
        End::Done(Err(error)) => Err(raise(py, &error)),
        End::Signal(error) => Err(error),
        End::Cancelled => Err(raise(py, &BallastError::new(ErrorCode::Unavailable, "the call was cancelled"))),
    }
}

/// Something that releases or aborts in the background when it is dropped, which needs a runtime. It belongs to the process
/// that made it: a fork has a copy, and must not let go of what its parent still holds.
#[derive(Debug)]
pub(crate) struct Owned<T> {
    process: u32,
    value: Option<T>,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: std::process::id(), value: Some(value) }
    }

    /// What it is, in the process that made it.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref()
    }

    /// Takes it out, in the process that made it.
    pub(crate) fn take(mut self) -> Option<T> {
        if self.process == std::process::id() { self.value.take() } else { None }
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        let Some(value) = self.value.take() else { return };
        if self.process != std::process::id() {
            std::mem::forget(value);
        } else if let Ok(runtime) = runtime() {
            let _inside = runtime.enter();
            drop(value);
        }
    }
}
