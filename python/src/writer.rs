//! A put under way, of a whole revision or of one participant's part.

use std::sync::{Mutex, PoisonError};

use ballast_client::{Gateway, PartReport, PartWriter, PutReport, PutWriter};
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
    inner: Mutex<Option<Owned<Put>>>,
}

/// What is being put.
pub(crate) enum Put {
    Whole(Box<PutWriter>),
    Part(Box<PartWriter>),
}

impl Put {
    pub(crate) fn whole(writer: PutWriter) -> Self {
        Self::Whole(Box::new(writer))
    }

    pub(crate) fn part(writer: PartWriter) -> Self {
        Self::Part(Box::new(writer))
    }
}

impl Writer {
    pub(crate) fn new(gateway: Gateway, writer: Put) -> Self {
        Self { gateway, inner: Mutex::new(Some(Owned::new(writer))) }
    }

    fn take(&self, py: Python<'_>) -> PyResult<Put> {
        let taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gone = || BallastError::new(ErrorCode::Conflict, "the writer has ended, or is in use by another thread");
        taken.and_then(Owned::take).ok_or_else(|| raise(py, &gone()))
    }

    fn put_back(&self, writer: Put) {
        *self.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(Owned::new(writer));
    }
}

#[pymethods]
impl Writer {
    /// The replacement that is under way, as JSON; `None` for a plain put.
    #[getter]
    fn claim(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let claim = match inner.as_ref().and_then(Owned::get) {
            Some(Put::Whole(writer)) => writer.claim().map(to_json),
            Some(Put::Part(_)) | None => None,
        };
        claim.transpose().map_err(|error| raise(py, &error))
    }

    /// The session that several participants share; `None` where there is one writer.
    #[getter]
    fn session(&self) -> Option<String> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let session = match inner.as_ref().and_then(Owned::get) {
            Some(Put::Whole(writer)) => writer.session_id(),
            Some(Put::Part(writer)) => Some(writer.session_id()),
            None => None,
        };
        session.map(ToString::to_string)
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
            match (&mut writer, &region) {
                (Put::Whole(writer), None) => writer.put_tensor(&name, bytes).await,
                (Put::Whole(writer), Some((offset, shape))) => writer.put_fragment(&name, offset, shape, bytes).await,
                (Put::Part(writer), None) => writer.put_tensor(&name, bytes).await,
                (Put::Part(writer), Some((offset, shape))) => writer.put_fragment(&name, offset, shape, bytes).await,
            }
        });
        self.put_back(writer);
        put
    }

    /// Publishes the revision, or finishes the part; answers its report as JSON.
    #[pyo3(signature = (cancel=None))]
    fn commit(&self, py: Python<'_>, cancel: Option<&Cancel>) -> PyResult<String> {
        let text = match self.take(py)? {
            Put::Whole(writer) => report_text(wait(py, Some(&self.gateway), cancel, writer.commit())?),
            Put::Part(writer) => {
                let report = wait(py, Some(&self.gateway), cancel, writer.finish())?;
                let PartReport { identity: _, participant, bytes, sent_bytes, elapsed, transport } = report;
                to_json(&json!({
                    "participant": participant,
                    "bytes": bytes,
                    "sent_bytes": sent_bytes,
                    "seconds": elapsed.as_secs_f64(),
                    "transport": transport.to_string(),
                }))
            }
        };
        text.map_err(|error| raise(py, &error))
    }

    /// Gives the import up; a participant only leaves it, and so does a coordinator after an error (`failed`) if the session
    /// is not its own. Does nothing once the writer has ended.
    #[pyo3(signature = (cancel=None, failed=false))]
    fn abort(&self, py: Python<'_>, cancel: Option<&Cancel>, failed: bool) -> PyResult<()> {
        let taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        match taken.and_then(Owned::take) {
            Some(Put::Whole(writer)) if failed => wait(py, Some(&self.gateway), cancel, writer.give_up()),
            Some(Put::Whole(writer)) => wait(py, Some(&self.gateway), cancel, writer.abort()),
            Some(Put::Part(writer)) => wait(py, Some(&self.gateway), cancel, async {
                drop(writer);
                Ok(())
            }),
            None => Ok(()),
        }
    }
}
