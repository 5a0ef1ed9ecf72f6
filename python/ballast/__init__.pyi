import enum
from os import PathLike
from types import TracebackType
from typing import Any, Callable, ClassVar, ContextManager, Dict, Iterable, Iterator, List, Mapping, Optional, Protocol, Sequence, Tuple, Type, Union

import numpy as np
from numpy.typing import NDArray

from . import aio as aio
from . import delta as delta
from . import dtensor as dtensor
from . import safetensors as safetensors

__version__: str
__all__: List[str]

Box = Tuple[Tuple[int, ...], Tuple[int, ...]]
Progress = Callable[[str, int, int, Optional[str]], Any]
"""Called with (phase, done_bytes, total_bytes, note)."""

# -- errors

class WeightErrorCode(enum.IntEnum):
    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    CONFLICT = 3
    STALE_GENERATION = 4
    NOT_READY = 5
    BUSY = 6
    LEASE_EXPIRED = 7
    GENERATION_EXHAUSTED = 8
    DURABILITY_FAILED = 9
    POLICY_UNSATISFIABLE = 10
    UNAVAILABLE = 11
    UNAUTHORIZED = 12
    CHECKSUM_MISMATCH = 13
    CAPACITY_EXHAUSTED = 14

class BallastError(Exception):
    code: ClassVar[str]
    message: str
    details: Dict[str, Any]
    def __init__(self, message: str, details: Optional[Dict[str, Any]] = None) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def is_retryable(self) -> bool: ...

class InvalidArgumentError(BallastError, ValueError): ...
class NotFoundError(BallastError, LookupError): ...
class ConflictError(BallastError): ...
class StaleGenerationError(BallastError): ...
class NotReadyError(BallastError): ...
class BusyError(BallastError): ...
class LeaseExpiredError(BallastError): ...
class GenerationExhaustedError(BallastError): ...
class DurabilityFailedError(BallastError): ...
class PolicyUnsatisfiableError(BallastError): ...
class UnavailableError(BallastError, ConnectionError): ...
class UnauthorizedError(BallastError, PermissionError): ...
class ChecksumMismatchError(BallastError): ...
class CapacityExhaustedError(BallastError): ...

# -- enumerations and records

class WeightAvailability(enum.IntEnum):
    IMPORTING = 0
    READY = 1
    DEGRADED = 2
    DELETING = 3
    DELETED = 4

class WeightResidencyState(enum.IntEnum):
    UNKNOWN = 0
    HOT = 1
    COLD = 2
    MIXED = 3
    ABSENT = 4

class WeightMigrationMode(enum.IntEnum):
    PINNED = 0
    MANUAL = 1
    AUTO = 2

class WeightOperationKind(enum.IntEnum):
    MIGRATING = 0
    REPAIRING = 1
    DELETING = 2
    REPLACING = 3

class WeightOperationStatus(enum.IntEnum):
    RUNNABLE = 0
    CLAIMED = 1
    PARKED = 2
    BACKING_OFF = 3
    PAUSED = 4
    SUCCEEDED = 5
    FAILED = 6
    CANCELLED = 7
    SUPERSEDED = 8
    @property
    def is_terminal(self) -> bool: ...

class WeightUpsertMode(enum.IntEnum):
    PUT_FIRST = 0
    DELETE_FIRST = 1

class WeightStoragePolicy:
    preferred_residency: WeightResidencyState
    mixed_hot_ratio: float
    migration_mode: WeightMigrationMode
    def __init__(
        self, preferred_residency: Union[WeightResidencyState, str] = ..., mixed_hot_ratio: float = 0.5,
        migration_mode: Union[WeightMigrationMode, str] = ...,
    ) -> None: ...

class WeightRevisionIdentity:
    tenant_id: str
    namespace: str
    resource_id: str
    revision: str
    weight_generation: int
    def __init__(self, tenant_id: str, namespace: str, resource_id: str, revision: str, weight_generation: int) -> None: ...
    @classmethod
    def parse(cls, name: str) -> WeightRevisionIdentity: ...
    @property
    def lineage(self) -> Tuple[str, str, str, str]: ...
    def generation(self, weight_generation: int) -> WeightRevisionIdentity: ...
    def __lt__(self, other: WeightRevisionIdentity) -> bool: ...

class WeightManifestRef:
    key: str
    sha256: str
    group_id: str
    payload_keys_sha256: str
    payload_count: int
    logical_bytes: int

class WeightRevisionMetadata:
    identity: WeightRevisionIdentity
    manifest: Optional[WeightManifestRef]
    availability: WeightAvailability
    residency: WeightResidencyState
    policy: WeightStoragePolicy
    operation_id: Optional[str]
    affinity_count: int
    affinity_digest: Optional[str]
    observed_hot_ratio: float
    metadata_generation: int
    created_at_ms: int
    updated_at_ms: int
    last_accessed_at_ms: int

class WeightPartState(enum.Enum):
    DECLARED = "DECLARED"
    WRITING = "WRITING"
    DONE = "DONE"

class WeightImportPart:
    participant: str
    state: WeightPartState
    epoch: int
    silent_ms: int

class WeightImport:
    session_id: str
    epoch: int
    ends_in_ms: int
    participants: Tuple[WeightImportPart, ...]
    @property
    def missing(self) -> Tuple[WeightImportPart, ...]: ...

class WeightRevisionView:
    metadata: WeightRevisionMetadata
    active_lease_count: int
    nearest_lease_expiry_ms: Optional[int]
    importing: Optional[WeightImport]

class WeightRevisionPage:
    revisions: Tuple[WeightRevisionMetadata, ...]
    next_page_token: str

class WeightOperation:
    operation_id: str
    identity: WeightRevisionIdentity
    kind: WeightOperationKind
    target: Optional[WeightResidencyState]
    target_hot_ratio: Optional[float]
    fenced_generation: int
    started_at_ms: int
    updated_at_ms: int
    processed_units: int
    total_units: int
    processed_bytes: int
    total_bytes: int
    cursor: int
    message: str
    status: WeightOperationStatus
    @property
    def done(self) -> bool: ...

class WeightReplacement:
    request_id: str
    base: WeightRevisionIdentity
    target: WeightRevisionIdentity
    mode: WeightUpsertMode
    phase: str

class ManifestTensor:
    name: str
    dtype: str
    shape: Tuple[int, ...]
    nbytes: int

class WeightManifest:
    identity: WeightRevisionIdentity
    sha256: str
    @property
    def tensors(self) -> Dict[str, ManifestTensor]: ...
    @property
    def document(self) -> Dict[str, Any]: ...
    def to_json(self) -> bytes: ...

# -- what a put is told

class ParallelAxis:
    kind: str
    semantics: str
    dim: Optional[int]
    def __init__(self, kind: str, semantics: str, dim: Optional[int] = None) -> None: ...

class TensorSpec:
    name: str
    dtype: str
    shape: Tuple[int, ...]
    aliases: Tuple[str, ...]
    layer_id: Optional[int]
    expert_id: Optional[int]
    parallel_axes: Tuple[ParallelAxis, ...]
    fragments: Tuple[Box, ...]
    def __init__(
        self, name: str, dtype: Any, shape: Sequence[int], aliases: Iterable[str] = (), layer_id: Optional[int] = None,
        expert_id: Optional[int] = None, parallel_axes: Iterable[ParallelAxis] = (), fragments: Iterable[Tuple[Sequence[int], Sequence[int]]] = (),
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...

class WeightAdapter(Protocol):
    """Reads tensors of some framework."""
    def describe(self, name: str, tensor: Any) -> TensorSpec: ...
    def shards(self, spec: TensorSpec, tensor: Any) -> Iterable[Tuple[Optional[Box], Any]]: ...

class ArrayAdapter:
    def describe(self, name: str, tensor: Any) -> TensorSpec: ...
    def shards(self, spec: TensorSpec, tensor: Any) -> Iterator[Tuple[Optional[Box], Any]]: ...

class WeightSharing:
    participants: Tuple[str, ...]
    participant: Optional[str]
    session: Optional[str]
    patience: float
    def __init__(
        self, participants: Iterable[str] = (), participant: Optional[str] = None, session: Optional[str] = None, patience: float = 30.0
    ) -> None: ...

class WeightSnapshot:
    namespace: str
    resource_id: str
    revision: str
    weight_generation: int
    tensors: Tuple[TensorSpec, ...]
    sharing: Optional[WeightSharing]
    def __init__(
        self, namespace: str, resource_id: str, revision: str, weight_generation: int, tensors: Iterable[TensorSpec],
        sharing: Optional[WeightSharing] = None,
    ) -> None: ...
    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Any], *, resource_id: str, weight_generation: int, namespace: str = "default", revision: str = "main",
        adapter: Optional[WeightAdapter] = None, aliases: Mapping[str, Iterable[str]] = ...,
    ) -> WeightSnapshot: ...
    def shared(
        self, participants: Iterable[str], *, participant: Optional[str] = None, session: Optional[str] = None, patience: float = 30.0
    ) -> WeightSnapshot: ...
    def part(self, participant: str, session: str) -> WeightSnapshot: ...
    @classmethod
    def assemble(cls, snapshots: Iterable[WeightSnapshot]) -> WeightSnapshot: ...
    def identity(self, tenant_id: str = "default") -> WeightRevisionIdentity: ...
    @property
    def nbytes(self) -> int: ...

# -- placements

class Participant:
    participant_id: str
    rank: Mapping[str, int]
    fragments: Mapping[str, Tuple[Box, ...]]
    def __init__(self, participant_id: str, rank: Mapping[str, int], fragments: Mapping[str, Tuple[Box, ...]]) -> None: ...

class WeightPlacement:
    tensors: Dict[str, TensorSpec]
    participants: Dict[str, Participant]
    sizes: Dict[str, int]
    placement_set_id: str
    exact: bool
    def __init__(
        self, tensors: Iterable[TensorSpec], participants: Iterable[Participant], *, sizes: Optional[Mapping[str, int]] = None,
        placement_set_id: str = "python", exact: bool = True,
    ) -> None: ...
    @classmethod
    def whole(cls, tensors: Iterable[TensorSpec]) -> WeightPlacement: ...
    @classmethod
    def from_axes(
        cls, tensors: Sequence[TensorSpec], sizes: Mapping[str, int], *, owns: Optional[Callable[[TensorSpec, Mapping[str, int]], bool]] = None
    ) -> WeightPlacement: ...
    def local(self, participant_id: str) -> LocalPlacement: ...
    def stored(self) -> Tuple[TensorSpec, ...]: ...

class LocalPlacement:
    placement: WeightPlacement
    participant_id: str
    def __init__(self, placement: WeightPlacement, participant_id: str) -> None: ...
    @property
    def fragments(self) -> Mapping[str, Tuple[Box, ...]]: ...
    def empty(self, allocate: Callable[[Tuple[int, ...], TensorSpec], Any]) -> Dict[str, Any]: ...

class WeightBinding:
    tensor: str
    buffer: Any
    box: Optional[Box]
    participant_id: Optional[str]
    def __init__(self, tensor: str, buffer: Any, box: Optional[Box] = None, participant_id: Optional[str] = None) -> None: ...

Bindings = Union[Mapping[str, Any], Iterable[WeightBinding]]

# -- the store

class WeightWriter:
    identity: WeightRevisionIdentity
    session: Optional[str]
    revision: Optional[WeightRevisionMetadata]
    replacement: Optional[WeightReplacement]
    report: Optional[Dict[str, Any]]
    def weight_put_tensor(self, tensor_id: str, tensor: Any) -> None: ...
    def commit(self) -> Optional[WeightRevisionMetadata]: ...
    def abort(self) -> None: ...
    def __enter__(self) -> WeightWriter: ...
    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> bool: ...

class WeightStore:
    def __init__(
        self, nats: Optional[str] = None, *, default_policy: Optional[WeightStoragePolicy] = None, name: Optional[str] = None,
        tenant_id: str = "default", route: str = "best", progress: Optional[Progress] = None, connect_seconds: float = 5.0,
        request_seconds: float = 30.0,
    ) -> None: ...
    def weight_put(
        self, snapshot: WeightSnapshot, adapter: Optional[WeightAdapter] = None, *, tenant_id: str = "default",
        policy: Optional[WeightStoragePolicy] = None,
    ) -> WeightWriter: ...
    def weight_get(
        self, identity: Union[WeightRevisionIdentity, str], target_placement: Optional[Union[WeightPlacement, LocalPlacement]],
        target_bindings: Bindings, *, holder: Optional[str] = None, lease_ttl_ms: int = 60_000,
        target_allocation_guards: Optional[Iterable[ContextManager[Any]]] = None,
    ) -> WeightManifest: ...
    def weight_is_exist(self, identity: Union[WeightRevisionIdentity, str]) -> bool: ...
    def weight_get_metadata(self, identity: Union[WeightRevisionIdentity, str]) -> WeightRevisionView: ...
    def weight_get_size(self, identity: Union[WeightRevisionIdentity, str]) -> int: ...
    def weight_list(
        self, *, namespace: str, resource_id: str, tenant_id: str = "default", page_token: str = "", limit: int = 100
    ) -> WeightRevisionPage: ...
    def weight_update_policy(
        self, identity: Union[WeightRevisionIdentity, str], *, policy: WeightStoragePolicy, expected_metadata_generation: int
    ) -> WeightRevisionMetadata: ...
    def weight_upsert(
        self, snapshot: WeightSnapshot, adapter: Optional[WeightAdapter] = None, *, replacing: Union[WeightRevisionIdentity, str],
        expected_metadata_generation: int, mode: WeightUpsertMode = WeightUpsertMode.PUT_FIRST, tenant_id: str = "default",
        policy: Optional[WeightStoragePolicy] = None, request_id: Optional[str] = None,
    ) -> WeightWriter: ...
    def weight_migrate(
        self, identity: Union[WeightRevisionIdentity, str], *, target: Union[WeightResidencyState, str],
        expected_metadata_generation: int, mixed_hot_ratio: Optional[float] = None,
    ) -> WeightOperation: ...
    def weight_get_operation(self, operation_id: str, *, tenant_id: str = "default") -> WeightOperation: ...
    def weight_remove(
        self, identity: Union[WeightRevisionIdentity, str], *, expected_metadata_generation: int
    ) -> WeightRevisionMetadata: ...

# -- everyday helpers

Name = Union[str, WeightRevisionIdentity]
Store = Union[WeightStore, str]

class OpenRevision(Mapping[str, NDArray[Any]]):
    revision: WeightRevisionMetadata
    @property
    def identity(self) -> WeightRevisionIdentity: ...
    @property
    def generation(self) -> int: ...
    @property
    def manifest(self) -> WeightManifest: ...
    @property
    def files(self) -> Tuple[str, ...]: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def lease_lapsed(self) -> bool: ...
    def file(self, path: str) -> NDArray[np.uint8]: ...
    def dtype(self, name: str) -> str: ...
    def close(self) -> bool: ...
    def __getitem__(self, name: str) -> NDArray[Any]: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> OpenRevision: ...
    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> bool: ...

class Weights(Dict[str, NDArray[Any]]):
    revision: WeightRevisionMetadata
    dtypes: Dict[str, str]
    @property
    def identity(self) -> WeightRevisionIdentity: ...
    @property
    def generation(self) -> int: ...

def open(
    name: Name, *, store: Optional[Store] = None, holder: Optional[str] = None, lease_ttl_ms: int = 60_000, verify: str = "auto",
    progress: Optional[Progress] = None,
) -> OpenRevision: ...
def load(
    name: Name, *, names: Optional[Iterable[str]] = None, store: Optional[Store] = None, holder: Optional[str] = None,
    lease_ttl_ms: int = 60_000, verify: str = "auto", progress: Optional[Progress] = None,
) -> Weights: ...
def wait(name: Name, min_generation: int = 1, *, timeout: Optional[float] = None, store: Optional[Store] = None) -> WeightRevisionIdentity: ...
def save(
    state_dict: Mapping[str, Any], name: Name, *, policy: Optional[WeightStoragePolicy] = None,
    replace: Optional[Union[bool, str, WeightUpsertMode]] = None, adapter: Optional[WeightAdapter] = None,
    store: Optional[Store] = None, progress: Optional[Progress] = None,
) -> WeightRevisionMetadata: ...
def get_state_dict(
    name: Name, *, store: Optional[Store] = None, holder: Optional[str] = None, lease_ttl_ms: int = 60_000
) -> Dict[str, NDArray[Any]]: ...
