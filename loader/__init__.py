"""Documents in, packed batches out. Names resolve on first use (PEP 562), so the loader process never imports torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqmesh.loader.batch import PackedBatch as PackedBatch
    from seqmesh.loader.embedded import Loader as Loader
    from seqmesh.loader.errors import LoaderError as LoaderError
    from seqmesh.loader.errors import LoaderTimeoutError as LoaderTimeoutError
    from seqmesh.loader.errors import ShardError as ShardError
    from seqmesh.loader.errors import WireError as WireError
    from seqmesh.loader.process import LoaderProcess as LoaderProcess
    from seqmesh.loader.settings import LoaderSettings as LoaderSettings
    from seqmesh.loader.shards import ShardSet as ShardSet
    from seqmesh.loader.stream import StreamState as StreamState

_HOMES = {
    "Loader": "embedded",
    "LoaderError": "errors",
    "LoaderProcess": "process",
    "LoaderSettings": "settings",
    "LoaderTimeoutError": "errors",
    "PackedBatch": "batch",
    "ShardError": "errors",
    "ShardSet": "shards",
    "StreamState": "stream",
    "WireError": "errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
