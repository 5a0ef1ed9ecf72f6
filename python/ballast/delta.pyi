import enum
from typing import Any, Iterable, Mapping, Optional, Sequence, Union

from . import Name, Progress, Store, WeightRevisionMetadata, WeightStoragePolicy

class Semantics(enum.Enum):
    OVERWRITE = "overwrite"
    ADDITIVE = "additive"

class SparseDelta:
    metadata: Mapping[str, Any]
    indices: Any
    values: Any
    tile_coords: Any
    tile_ptr: Any
    def __init__(self, metadata: Mapping[str, Any], indices: Any, values: Any, tile_coords: Any, tile_ptr: Any) -> None: ...
    @property
    def tensor_id(self) -> str: ...
    @property
    def base_generation(self) -> int: ...
    @property
    def delta_generation(self) -> int: ...

def of_entries(
    tensor_id: str, shape: Sequence[int], indices: Any, values: Any, *, base_generation: int, delta_generation: int,
    semantics: Union[Semantics, str] = Semantics.OVERWRITE, tile_shape: Optional[Sequence[int]] = None, dtype: Any = None,
) -> SparseDelta: ...
def between(
    tensor_id: str, before: Any, after: Any, *, base_generation: int, delta_generation: int,
    tile_shape: Optional[Sequence[int]] = None, dtype: Any = None,
) -> SparseDelta: ...
def upsert(
    deltas: Iterable[SparseDelta], *, replacing: Name, semantics: Union[Semantics, str] = Semantics.OVERWRITE,
    expected_metadata_generation: Optional[int] = None, policy: Optional[WeightStoragePolicy] = None,
    request_id: Optional[str] = None, wait: bool = False, store: Optional[Store] = None, progress: Optional[Progress] = None,
) -> WeightRevisionMetadata: ...
