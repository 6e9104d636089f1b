"""Loaders on the nodes of a Ray cluster: `cluster` starts them, a `keeper` on each node keeps one, `places` says where
they are. Names resolve on first use (PEP 562)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqmesh.packer.lazy import lazy_names

if TYPE_CHECKING:
    from seqmesh.loader.fleet.cluster import Fleet as Fleet
    from seqmesh.loader.fleet.places import from_file as from_file

_HOMES = {"Fleet": "cluster", "from_file": "places"}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
