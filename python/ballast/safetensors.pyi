from os import PathLike
from typing import Any, Dict, List, Mapping, Optional, Union

from numpy.typing import NDArray

from . import Name, Progress, Store, WeightAdapter, WeightRevisionMetadata, WeightStoragePolicy, WeightUpsertMode

def import_path(
    path: Union[str, PathLike[str]], name: Name, *, policy: Optional[WeightStoragePolicy] = None,
    replace: Optional[Union[bool, str, WeightUpsertMode]] = None, store: Optional[Store] = None, progress: Optional[Progress] = None,
) -> WeightRevisionMetadata: ...
def export(
    name: Name, folder: Union[str, PathLike[str]], *, overwrite: bool = False, store: Optional[Store] = None,
    holder: Optional[str] = None, lease_ttl_ms: int = 60_000, verify: str = "auto", progress: Optional[Progress] = None,
) -> List[str]: ...
def put_state_dict(
    state_dict: Mapping[str, Any], name: Name, *, policy: Optional[WeightStoragePolicy] = None,
    replace: Optional[Union[bool, str, WeightUpsertMode]] = None, adapter: Optional[WeightAdapter] = None,
    store: Optional[Store] = None, progress: Optional[Progress] = None,
) -> WeightRevisionMetadata: ...
def get_state_dict(
    name: Name, *, store: Optional[Store] = None, holder: Optional[str] = None, lease_ttl_ms: int = 60_000
) -> Dict[str, NDArray[Any]]: ...
