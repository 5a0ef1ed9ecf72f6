"""Ballast keeps model weights as complete, immutable revisions: publish, discover, read under a lease in any parallel layout,
keep hot or cold, replace by the next generation, delete.

    import ballast

    ballast.save(state_dict, "minilm")          # READY when this returns
    weights = ballast.load("minilm")            # zero-copy numpy arrays
    ballast.wait("minilm", min_generation=2)

`WeightStore` has the eleven operations behind these; `ballast.aio` has them for asyncio; `ballast.safetensors` brings
checkpoints in and out; `ballast.dtensor` describes tensors that are spread over a device mesh; `ballast.delta` makes the next
generation out of a few changed elements.
"""

from . import aio, delta, dtensor, safetensors
from ._easy import OpenRevision, Weights, get_state_dict, load, open, save, wait
from ._errors import (
    BallastError, BusyError, CapacityExhaustedError, ChecksumMismatchError, ConflictError, DurabilityFailedError,
    GenerationExhaustedError, InvalidArgumentError, LeaseExpiredError, NotFoundError, NotReadyError, PolicyUnsatisfiableError,
    StaleGenerationError, UnauthorizedError, UnavailableError, WeightErrorCode,
)
from ._native import __version__
from ._placement import LocalPlacement, Participant, WeightBinding, WeightPlacement
from ._records import (
    ManifestTensor, WeightAvailability, WeightImport, WeightImportPart, WeightManifest, WeightManifestRef,
    WeightMigrationMode, WeightOperation, WeightOperationKind, WeightOperationStatus, WeightPartState, WeightReplacement,
    WeightResidencyState, WeightRevisionIdentity, WeightRevisionMetadata, WeightRevisionPage, WeightRevisionView,
    WeightStoragePolicy, WeightUpsertMode,
)
from ._snapshot import ArrayAdapter, ParallelAxis, TensorSpec, WeightSharing, WeightSnapshot
from ._store import WeightStore, WeightWriter

__all__ = [
    "ArrayAdapter", "BallastError", "BusyError", "CapacityExhaustedError", "ChecksumMismatchError", "ConflictError",
    "DurabilityFailedError", "GenerationExhaustedError", "InvalidArgumentError", "LeaseExpiredError", "LocalPlacement",
    "ManifestTensor", "NotFoundError", "NotReadyError", "OpenRevision", "ParallelAxis", "Participant",
    "PolicyUnsatisfiableError", "StaleGenerationError", "TensorSpec", "UnauthorizedError", "UnavailableError",
    "WeightAvailability", "WeightBinding", "WeightErrorCode", "WeightImport", "WeightImportPart", "WeightManifest",
    "WeightManifestRef", "WeightMigrationMode", "WeightOperation", "WeightOperationKind", "WeightOperationStatus",
    "WeightPartState", "WeightPlacement", "WeightReplacement",
    "WeightResidencyState", "WeightRevisionIdentity", "WeightRevisionMetadata", "WeightRevisionPage", "WeightRevisionView",
    "WeightSharing", "WeightSnapshot", "WeightStoragePolicy", "WeightStore", "WeightUpsertMode", "WeightWriter", "Weights",
    "__version__", "aio", "delta", "dtensor", "get_state_dict", "load", "open", "safetensors", "save", "wait",
]
