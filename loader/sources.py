"""`Sources`: which documents each source of a set has. Without a mixture all documents are one source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seqmesh.loader.catalog import ALL
from seqmesh.loader.mixture import SHARES, Mixture
from seqmesh.loader.settings import LoaderSettings, Overlong
from seqmesh.packer.lengths import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources:
    """names [S]. Documents (rows of the set) of source s: documents[first[s]:first[s + 1]], ascending; int64. One
    source alone that has all documents needs no table of them: `documents` is empty."""

    names: tuple[str, ...]
    first: Int64Array
    documents: Int64Array

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sizes(self) -> Int64Array:
        """Documents of each [S]."""
        return np.diff(self.first)

    def of(self, number: int) -> Int64Array:
        """Documents of one source."""
        if not len(self.documents):
            return np.arange(self.first[number], self.first[number + 1])
        return self.documents[self.first[number] : self.first[number + 1]]


def one_source(documents: int, usable: npt.NDArray[np.bool_] | None = None) -> Sources:
    """So many documents, all alike; of these the usable ones [N], by default all."""
    chosen = np.zeros(0, np.int64) if usable is None else np.flatnonzero(usable)
    return Sources(
        names=(ALL,), first=np.array([0, documents if usable is None else len(chosen)], np.int64), documents=chosen
    )


def sources_by_code(
    codes: npt.NDArray[np.uint16], names: Sequence[str], usable: npt.NDArray[np.bool_] | None = None
) -> Sources:
    """From the source of each document [N], as a place in `names`; of the usable documents [N], by default all."""
    order = np.argsort(codes, kind="stable")
    chosen = order if usable is None else order[usable[order]]
    first = np.zeros(len(names) + 1, np.int64)
    np.cumsum(np.bincount(codes[chosen], minlength=len(names)), out=first[1:])
    return Sources(names=tuple(names), first=first, documents=chosen.astype(np.int64))


def check_names(mixture: Mixture, names: Sequence[str], data: str) -> None:
    """Raises ValueError where the mixture names a source that the set does not have, or leaves one out."""
    if unknown := sorted(mixture.sources.keys() - set(names)):
        raise ValueError(f"mixture names {', '.join(unknown)}: {data} has the sources {', '.join(names)}")
    if missing := sorted(set(names) - mixture.sources.keys()):
        raise ValueError(f"mixture leaves out {', '.join(missing)} of {data}: give each a weight, 0 to never draw it")


def shares_at(step: int, settings: LoaderSettings, sources: Sources) -> tuple[int, ...]:
    """Each source's part of the tokens, in 1/SHARES."""
    return settings.mixture.shares(sources.names, step) if settings.mixture else (SHARES,)


def policies(settings: LoaderSettings, sources: Sources) -> tuple[Overlong, ...]:
    """What happens to each source's overlong documents."""
    if settings.mixture is None:
        return (settings.overlong,)
    return tuple(settings.mixture.sources[name].overlong or settings.overlong for name in sources.names)


def last_epochs(settings: LoaderSettings, sources: Sources) -> tuple[int | None, ...]:
    """How often each source is passed, None for no end."""
    if settings.mixture is None:
        return (settings.epochs,)
    return tuple(settings.mixture.sources[name].epochs or settings.epochs for name in sources.names)
