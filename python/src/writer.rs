//! A put under way.

use std::sync::{Mutex, PoisonError};

use ballast_client::{Gateway, PutReport, PutWriter};
use ballast_schemas::{BallastError, ErrorCode};
use pyo3::prelude::*;
use serde_json::json;

use crate::error::{raise, to_json};
use crate::runtime::{Cancel, Owned, wait};

/// What a put did, as JSON.
pub(crate) fn report_text(report: PutReport) -> Result<String, BallastError> {
    let PutReport { revision, claim, existed, bytes, elapsed, transport, reused_bytes } = report;
    to_json(&json!({
        "revision": revision,
        "claim": claim,
        "existed": existed,
        "bytes": bytes,
        "seconds": elapsed.as_secs_f64(),
        "transport": transport.map(|transport| transport.to_string()),
        "reused_bytes": reused_bytes,
    }))
}

/// A revision being published.
#[pyclass(frozen, module = "ballast._native")]
pub(crate) struct Writer {
    gateway: Gateway,
    /// `None` while a call works with it, and once it has ended.
    inner: Mutex<Option<Owned<PutWriter>>>,
}

impl Writer {
    pub(crate) fn new(gateway: Gateway, writer: PutWriter) -> Self {
        Self { gateway, inner: Mutex::new(Some(Owned::new(writer))) }
    }

    fn take(&self, py: Python<'_>) -> PyResult<PutWriter> {
        let taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gone = || BallastError::new(ErrorCode::Conflict, "the writer has ended, or is in use by another thread");
        taken.and_then(Owned::take).ok_or_else(|| raise(py, &gone()))
    }

    fn put_back(&self, writer: PutWriter) {
        *self.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(Owned::new(writer));
    }
}

#[pymethods]
impl Writer {
    /// The replacement that is under way, as JSON; `None` for a plain put.
    #[getter]
    fn claim(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let claim = inner.as_ref().and_then(Owned::get).and_then(PutWriter::claim).map(to_json);
        claim.transpose().map_err(|error| raise(py, &error))
    }

    /// Sends a tensor, or one box of it, from `nbytes` bytes at `address`.
    #[pyo3(signature = (name, region, address, nbytes, cancel=None))]
    fn put(
        &self,
        py: Python<'_>,
        name: String,
        region: Option<(Vec<u64>, Vec<u64>)>,
        address: usize,
        nbytes: usize,
        cancel: Option<&Cancel>,
    ) -> PyResult<()> {
        let mut writer = self.take(py)?;
        let bytes: &[u8] = match nbytes {
            0 => &[],
            // SAFETY: the Python side holds the object whose memory this is for as long as this call, and says where it lies.
            _ => unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) },
        };
        let put = wait(py, Some(&self.gateway), cancel, async {
            match &region {
                None => writer.put_tensor(&name, bytes).await,
                Some((offset, shape)) => writer.put_fragment(&name, offset, shape, bytes).await,
            }
        });
        self.put_back(writer);
        put
    }

    /// Publishes the revision; answers its report as JSON.
    #[pyo3(signature = (cancel=None))]
    fn commit(&self, py: Python<'_>, cancel: Option<&Cancel>) -> PyResult<String> {
        let writer = self.take(py)?;
        let report = wait(py, Some(&self.gateway), cancel, writer.commit())?;
        let text = report_text(report);
        text.map_err(|error| raise(py, &error))
    }

    /// Gives the import up. Does nothing once the writer has ended.
    #[pyo3(signature = (cancel=None))]
    fn abort(&self, py: Python<'_>, cancel: Option<&Cancel>) -> PyResult<()> {
        let taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        match taken.and_then(Owned::take) {
            Some(writer) => wait(py, Some(&self.gateway), cancel, writer.abort()),
            None => Ok(()),
        }
    }
}
