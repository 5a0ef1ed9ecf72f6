//! Open revisions and views of their tensors. The lease and the mapping live as long as the last view.

use std::sync::{Arc, Mutex, PoisonError};

use ballast_client::{Gateway, OpenRevision};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{raise, to_json};
use crate::runtime::{Cancel, Owned, wait};

/// What an open revision and its views share.
struct Shared(Owned<OpenRevision>);

impl Shared {
    fn get(&self) -> PyResult<&OpenRevision> {
        self.0.get().ok_or_else(|| pyo3::exceptions::PyValueError::new_err("the revision is closed"))
    }
}

/// First element, extent and bytes of a box.
type Fragment = (Vec<u64>, Vec<u64>, View);

/// An open revision.
#[pyclass(frozen, module = "ballast._native")]
pub(crate) struct Opened {
    gateway: Gateway,
    shared: Mutex<Option<Arc<Shared>>>,
}

impl Opened {
    pub(crate) fn new(gateway: Gateway, opened: OpenRevision) -> Self {
        Self { gateway, shared: Mutex::new(Some(Arc::new(Shared(Owned::new(opened))))) }
    }

    fn shared(&self) -> PyResult<Arc<Shared>> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner).clone();
        shared.ok_or_else(|| pyo3::exceptions::PyValueError::new_err("the revision is closed"))
    }
}

#[pymethods]
impl Opened {
    /// The revision's record, as JSON.
    fn revision(&self, py: Python<'_>) -> PyResult<String> {
        let shared = self.shared()?;
        to_json(shared.get()?.revision()).map_err(|error| raise(py, &error))
    }

    /// The manifest's canonical document.
    fn manifest(&self) -> PyResult<Vec<u8>> {
        Ok(self.shared()?.get()?.manifest().to_canonical_bytes())
    }

    /// The names of the tensors.
    fn names(&self) -> PyResult<Vec<String>> {
        let shared = self.shared()?;
        Ok(shared.get()?.manifest().tensors().iter().map(|tensor| tensor.tensor_id.clone()).collect())
    }

    /// The paths of the other files.
    fn files(&self) -> PyResult<Vec<String>> {
        let shared = self.shared()?;
        let files = shared.get()?.manifest().files().iter().map(|file| file.path.clone());
        Ok(files.filter(|path| !path.starts_with(".ballast/")).collect())
    }

    /// Bytes that are mapped, not copied.
    #[getter]
    fn mapped_bytes(&self) -> PyResult<u64> {
        Ok(self.shared()?.get()?.mapped_bytes())
    }

    /// Whether the lease is known to have ended.
    #[getter]
    fn lease_lapsed(&self) -> PyResult<bool> {
        Ok(self.shared()?.get()?.lease_lapsed())
    }

    /// A view of a tensor; `None` when it has no such one, or one that is stored in several boxes.
    fn tensor(&self, name: &str) -> PyResult<Option<View>> {
        let shared = self.shared()?;
        let opened = shared.get()?;
        let (Some(view), Some(shape)) = (opened.tensor(name), opened.shape(name)) else { return Ok(None) };
        let (address, nbytes, dtype) = (view.bytes.as_ptr() as usize, view.bytes.len(), view.dtype.to_owned());
        Ok(Some(View { _shared: shared.clone(), address, nbytes, dtype, shape }))
    }

    /// Views of the boxes in which a tensor is stored: first element, extent and view of each.
    fn fragments(&self, name: &str) -> PyResult<Vec<Fragment>> {
        let shared = self.shared()?;
        let opened = shared.get()?;
        let dtype = opened.manifest().tensor(name).map_or("", |tensor| &tensor.dtype);
        let view = |(offset, shape, bytes): (&[u64], &[u64], &[u8])| {
            let (address, nbytes) = (bytes.as_ptr() as usize, bytes.len());
            let view =
                View { _shared: shared.clone(), address, nbytes, dtype: dtype.to_owned(), shape: shape.to_vec() };
            (offset.to_vec(), shape.to_vec(), view)
        };
        Ok(opened.fragments(name).map(view).collect())
    }

    /// A view of another file.
    fn file(&self, path: &str) -> PyResult<Option<View>> {
        let shared = self.shared()?;
        let Some(bytes) = shared.get()?.file(path) else { return Ok(None) };
        let (address, nbytes) = (bytes.as_ptr() as usize, bytes.len());
        let shape = vec![nbytes as u64];
        Ok(Some(View { _shared: shared.clone(), address, nbytes, dtype: "U8".to_owned(), shape }))
    }

    /// Lets go of the revision. Without views the lease ends now, and LEASE_EXPIRED is raised when it had lapsed; with
    /// views it ends with the last of them. Whether it ended now.
    #[pyo3(signature = (cancel=None))]
    fn close(&self, py: Python<'_>, cancel: Option<&Cancel>) -> PyResult<bool> {
        let taken = self.shared.lock().unwrap_or_else(PoisonError::into_inner).take();
        let opened = taken.and_then(|shared| Arc::try_unwrap(shared).ok()).and_then(|shared| shared.0.take());
        let Some(opened) = opened else { return Ok(false) };
        wait(py, Some(&self.gateway), cancel, opened.close())?;
        Ok(true)
    }
}

/// Bytes of an open revision, where they lie. Read-only.
#[pyclass(frozen, module = "ballast._native")]
pub(crate) struct View {
    _shared: Arc<Shared>,
    address: usize,
    nbytes: usize,
    dtype: String,
    shape: Vec<u64>,
}

#[pymethods]
impl View {
    /// Element type by its safetensors name.
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }

    /// Dimensions.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// The bytes for numpy, without a copy: flat, read-only, kept alive by this view.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("shape", (self.nbytes,))?;
        interface.set_item("data", (self.address, true))?;
        Ok(interface)
    }
}
