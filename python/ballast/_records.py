"""Records and enumerations with the names and wire numbers of the RFC's state model. All records are frozen."""

import dataclasses
import enum
import json
from typing import Optional, Tuple

from . import _native
from ._errors import invalid


class WeightAvailability(enum.IntEnum):
    """Whether a revision is complete and can be safely discovered and read."""

    IMPORTING = 0
    READY = 1
    DEGRADED = 2
    DELETING = 3
    DELETED = 4


class WeightResidencyState(enum.IntEnum):
    """Where the required payloads are."""

    UNKNOWN = 0
    HOT = 1
    COLD = 2
    MIXED = 3
    ABSENT = 4


class WeightMigrationMode(enum.IntEnum):
    """What may change residency after the initial convergence."""

    PINNED = 0
    MANUAL = 1
    AUTO = 2


class WeightOperationKind(enum.IntEnum):
    """What a background operation does."""

    MIGRATING = 0
    REPAIRING = 1
    DELETING = 2
    REPLACING = 3


class WeightOperationStatus(enum.IntEnum):
    """Where an operation stands; from SUCCEEDED on it has ended."""

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
    def is_terminal(self):
        """Whether the operation has ended."""
        return self >= WeightOperationStatus.SUCCEEDED


class WeightUpsertMode(enum.IntEnum):
    """How a generation is replaced."""

    PUT_FIRST = 0
    DELETE_FIRST = 1


def one_of(kind, value, what):
    """`value` as a member of the enumeration `kind`; its name and its number will do as well."""
    if isinstance(value, kind):
        return value
    if isinstance(value, enum.Enum) or isinstance(value, bool):
        raise invalid(f"{what} is {value!r}; give a {kind.__name__}")
    try:
        return kind[value.upper()] if isinstance(value, str) else kind(value)
    except (KeyError, ValueError, TypeError):
        names = ", ".join(member.name for member in kind)
        raise invalid(f"{what} is {value!r}; it must be one of {names}") from None


def generation_of(value, what, **details):
    """A generation: a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{what} is {value!r}; give a whole number", **details)
    if not 0 <= value < 1 << 64:
        raise invalid(f"{what} is {value}; it must be from 0 to 2^64 - 1", **details)
    return value


@dataclasses.dataclass(frozen=True)
class WeightStoragePolicy:
    """Where a revision should converge, and what may move it afterwards."""

    preferred_residency: WeightResidencyState = WeightResidencyState.MIXED
    mixed_hot_ratio: float = 0.5
    migration_mode: WeightMigrationMode = WeightMigrationMode.AUTO

    def __post_init__(self):
        preferred = one_of(WeightResidencyState, self.preferred_residency, "preferred_residency")
        if preferred not in (WeightResidencyState.HOT, WeightResidencyState.COLD, WeightResidencyState.MIXED):
            raise invalid(f"preferred_residency is {preferred.name}; it must be HOT, COLD or MIXED")
        ratio = self.mixed_hot_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < 1:
            raise invalid(f"mixed_hot_ratio is {ratio!r}; it must be a number above 0 and below 1 (default 0.5)")
        object.__setattr__(self, "preferred_residency", preferred)
        object.__setattr__(self, "mixed_hot_ratio", float(ratio))
        mode = one_of(WeightMigrationMode, self.migration_mode, "migration_mode")
        object.__setattr__(self, "migration_mode", mode)

    def _to_wire(self):
        return {
            "preferred_residency": self.preferred_residency.name,
            "mixed_hot_ratio": self.mixed_hot_ratio,
            "migration_mode": self.migration_mode.name,
        }

    @classmethod
    def _from_wire(cls, body):
        return cls(body["preferred_residency"], body["mixed_hot_ratio"], body["migration_mode"])

    def __repr__(self):
        ratio = f" {self.mixed_hot_ratio:g}" if self.preferred_residency is WeightResidencyState.MIXED else ""
        return f"<WeightStoragePolicy {self.preferred_residency.name}{ratio}, {self.migration_mode.name}>"


@dataclasses.dataclass(frozen=True, order=True)
class WeightRevisionIdentity:
    """The five-tuple that uniquely identifies a revision. `str()` gives its short name, `parse` reads one."""

    tenant_id: str
    namespace: str
    resource_id: str
    revision: str
    weight_generation: int

    def __post_init__(self):
        for field in ("tenant_id", "namespace", "resource_id", "revision"):
            if not isinstance(getattr(self, field), str):
                raise invalid(f"{field} is {getattr(self, field)!r}; give a string")
        generation_of(self.weight_generation, "weight_generation")
        _native.identity_name(json.dumps(self._to_wire()))

    @classmethod
    def parse(cls, name):
        """The identity that a short name with a generation, `[tenant:][namespace/]resource[@revision]#generation`, names."""
        parts = json.loads(_native.parse_name(name))
        if parts["weight_generation"] is None:
            raise invalid(f"{name!r} names no generation; write {name}#1, say")
        return cls(**parts)

    @property
    def lineage(self):
        """(tenant_id, namespace, resource_id, revision)."""
        return (self.tenant_id, self.namespace, self.resource_id, self.revision)

    def generation(self, weight_generation):
        """Another generation of the same lineage."""
        return dataclasses.replace(self, weight_generation=weight_generation)

    def _to_wire(self):
        return dataclasses.asdict(self)

    @classmethod
    def _from_wire(cls, body):
        return cls(**body)

    def __str__(self):
        return _native.identity_name(json.dumps(self._to_wire()))

    def __repr__(self):
        return f"<WeightRevisionIdentity {self}>"


@dataclasses.dataclass(frozen=True)
class WeightManifestRef:
    """The immutable reference from metadata to the manifest."""

    key: str
    sha256: str
    group_id: str
    payload_keys_sha256: str
    payload_count: int
    logical_bytes: int


@dataclasses.dataclass(frozen=True)
class WeightRevisionMetadata:
    """The management record of one revision."""

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

    @classmethod
    def _from_wire(cls, body):
        manifest = body["manifest"]
        reference = None
        if manifest is not None:
            reference = WeightManifestRef(**{field.name: manifest[field.name] for field in dataclasses.fields(WeightManifestRef)})
        return cls(
            identity=WeightRevisionIdentity._from_wire(body["identity"]),
            manifest=reference,
            availability=WeightAvailability[body["availability"]],
            residency=WeightResidencyState[body["residency"]],
            policy=WeightStoragePolicy._from_wire(body["policy"]),
            operation_id=body["operation_id"],
            affinity_count=manifest["affinity_count"] if manifest else 0,
            affinity_digest=manifest["affinity_digest"] if manifest else None,
            observed_hot_ratio=body["observed_hot_ppm"] / 1e6,
            metadata_generation=body["metadata_generation"],
            created_at_ms=body["created_unix_ms"],
            updated_at_ms=body["updated_unix_ms"],
            last_accessed_at_ms=body["last_accessed_unix_ms"],
        )

    def __repr__(self):
        size = f", {human_bytes(self.manifest.logical_bytes)}" if self.manifest else ""
        operation = f", operation {self.operation_id}" if self.operation_id else ""
        return (
            f"<WeightRevisionMetadata {self.identity} {self.availability.name} {self.residency.name}{size}, "
            f"metadata generation {self.metadata_generation}{operation}>"
        )


@dataclasses.dataclass(frozen=True)
class WeightRevisionView:
    """A revision's record with its active leases counted."""

    metadata: WeightRevisionMetadata
    active_lease_count: int
    nearest_lease_expiry_ms: Optional[int]

    @classmethod
    def _from_wire(cls, body):
        return cls(
            metadata=WeightRevisionMetadata._from_wire(body["metadata"]),
            active_lease_count=body["active_lease_count"],
            nearest_lease_expiry_ms=body["nearest_lease_expiry_ms"],
        )

    def __repr__(self):
        return f"<WeightRevisionView {self.metadata!r}, {self.active_lease_count} active leases>"


@dataclasses.dataclass(frozen=True)
class WeightRevisionPage:
    """One page of a listing; `next_page_token` is empty on the last."""

    revisions: Tuple[WeightRevisionMetadata, ...]
    next_page_token: str

    @classmethod
    def _from_wire(cls, body):
        return cls(tuple(WeightRevisionMetadata._from_wire(record) for record in body["revisions"]), body["next_page_token"])

    def __repr__(self):
        more = ", and more" if self.next_page_token else ""
        return f"<WeightRevisionPage {len(self.revisions)} revisions{more}>"


@dataclasses.dataclass(frozen=True)
class WeightOperation:
    """A background operation: its target, progress and error. `message` is "completed" once it has succeeded."""

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

    @classmethod
    def _from_wire(cls, body):
        status = WeightOperationStatus[body["status"]]
        error = body["last_error"]
        if status is WeightOperationStatus.SUCCEEDED:
            message = "completed"
        elif error is not None:
            message = f"{error['code']}: {error['message']}"
        else:
            message = body.get("note") or (body["park_reason"] or "").lower().replace("_", " ")
        return cls(
            operation_id=body["operation_id"],
            identity=WeightRevisionIdentity._from_wire(body["identity"]),
            kind=WeightOperationKind[body["kind"]],
            target=None if body["target"] is None else WeightResidencyState[body["target"]],
            target_hot_ratio=body["target_hot_ratio"],
            fenced_generation=body["fenced_generation"],
            started_at_ms=body["started_unix_ms"],
            updated_at_ms=body["updated_unix_ms"],
            processed_units=body["processed_units"],
            total_units=body["total_units"],
            processed_bytes=body["processed_bytes"],
            total_bytes=body["total_bytes"],
            cursor=body["cursor"],
            message=message,
            status=status,
        )

    @property
    def done(self):
        """Whether the operation has ended, well or not."""
        return self.status.is_terminal

    def __repr__(self):
        target = f" to {self.target.name}" if self.target is not None else ""
        message = f": {self.message}" if self.message else ""
        return (
            f"<WeightOperation {self.operation_id} {self.kind.name}{target} of {self.identity} {self.status.name}, "
            f"{human_bytes(self.processed_bytes)} of {human_bytes(self.total_bytes)}{message}>"
        )


@dataclasses.dataclass(frozen=True)
class WeightReplacement:
    """The replacement that a writer of `weight_upsert` belongs to."""

    request_id: str
    base: WeightRevisionIdentity
    target: WeightRevisionIdentity
    mode: WeightUpsertMode
    phase: str

    @classmethod
    def _from_wire(cls, body):
        return cls(
            request_id=body["request_id"],
            base=WeightRevisionIdentity._from_wire(body["base"]),
            target=WeightRevisionIdentity._from_wire(body["target"]),
            mode=WeightUpsertMode[body["mode"]],
            phase=body["phase"],
        )


@dataclasses.dataclass(frozen=True)
class ManifestTensor:
    """A tensor as a manifest describes it."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    nbytes: int


class WeightManifest:
    """The immutable manifest of a revision: `tensors` by name, and its canonical document."""

    def __init__(self, document, identity, sha256):
        self._document = document
        self._tensors = None
        self.identity = identity
        self.sha256 = sha256

    @property
    def tensors(self):
        """Every tensor by name, in the order of the names."""
        if self._tensors is None:
            described = _native.manifest_tensors(self._document)
            self._tensors = {name: ManifestTensor(name, dtype, tuple(shape), nbytes) for name, dtype, shape, nbytes in described}
        return self._tensors

    @property
    def document(self):
        """The canonical JSON, parsed."""
        return json.loads(self._document)

    def to_json(self):
        """The canonical JSON: `sha256` is the digest of exactly these bytes."""
        return bytes(self._document)

    def __eq__(self, other):
        return isinstance(other, WeightManifest) and self.sha256 == other.sha256

    def __hash__(self):
        return hash(self.sha256)

    def __repr__(self):
        return f"<WeightManifest of {self.identity}: {len(self.tensors)} tensors, sha256 {self.sha256[:12]}…>"


def human_bytes(count):
    """`count` bytes for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
