"""Documents in, packed batches out. Names resolve on first use (PEP 562), so the loader process never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqmesh.packer.lazy import lazy_names

if TYPE_CHECKING:
    from seqmesh.loader.batch import PackedBatch as PackedBatch
    from seqmesh.loader.embedded import Loader as Loader
    from seqmesh.loader.errors import LoaderError as LoaderError
    from seqmesh.loader.errors import LoaderTimeoutError as LoaderTimeoutError
    from seqmesh.loader.errors import ShardError as ShardError
    from seqmesh.loader.errors import WireError as WireError
    from seqmesh.loader.fleet.cluster import Fleet as Fleet
    from seqmesh.loader.process import LoaderProcess as LoaderProcess
    from seqmesh.loader.settings import Blocks as Blocks
    from seqmesh.loader.settings import LoaderSettings as LoaderSettings
    from seqmesh.loader.shards import ShardSet as ShardSet
    from seqmesh.loader.stream import StreamState as StreamState

_HOMES = {
    "Blocks": "settings",
    "Fleet": "fleet.cluster",
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
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
