"""`Sources`: which documents each source of a set has, in which of the set's parts (its files), and how they come in an
epoch. Without a mixture all documents are one source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from seqmesh.loader.catalog import ALL
from seqmesh.loader.mixture import SHARES, Mixture
from seqmesh.loader.settings import LoaderSettings, Overlong
from seqmesh.packer.blocks import block_table
from seqmesh.packer.lengths import Int64Array

REMEMBERED_TABLES = 4  # of each source: of the epoch it is in, of the next, and of those that laggards are in
REMEMBERED_ORDERS = 2
NO_TABLE = np.zeros((0, 4), np.int64)  # of a source that is not shuffled by blocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """How each source's documents come in an epoch, as `cursor.place_at` takes it: keys [S]; the block table of source
    s is blocks[first[s]:first[s + 1]], without rows where it is not shuffled by blocks."""

    keys: Int64Array
    blocks: Int64Array
    first: Int64Array

    def of(self, number: int) -> tuple[int, Int64Array]:
        """Key and table of one source."""
        return int(self.keys[number]), self.blocks[self.first[number] : self.first[number + 1]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """The parts that hold documents of one source. number [Q]: which of the set, ascending. first [Q + 1]: how many of
    the source's documents come before each, and how many there are. table(window, key): see `packer.blocks`."""

    number: Int64Array
    first: Int64Array
    table: Callable[[int, int], Int64Array] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        remembered = lru_cache(maxsize=REMEMBERED_TABLES)(partial(block_table, self.first))
        object.__setattr__(self, "table", remembered)

    def of(self, places: Int64Array) -> Int64Array:
        """The part of the set that holds each of these, of the source's documents."""
        return self.number[np.searchsorted(self.first, places, side="right") - 1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources:
    """names [S]. Documents (rows of the set) of source s: documents[first[s]:first[s + 1]], ascending; int64. One
    source that has all documents needs no table of them: `documents` is empty. part_first [P + 1]: number of the first
    document of each part of the set, and of all. parts [S]: those of each source. order(window, keys): of an epoch that
    each source is in; window: of a shuffle by blocks, None for none."""

    names: tuple[str, ...]
    first: Int64Array
    documents: Int64Array
    part_first: Int64Array
    parts: tuple[Parts, ...] = field(init=False, repr=False)
    order: Callable[[int | None, tuple[int, ...]], Order] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = tuple(map(self._parts_of, range(len(self))))
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "order", lru_cache(maxsize=REMEMBERED_ORDERS)(partial(_order, parts)))

    def __len__(self) -> int:
        return len(self.names)

    def _parts_of(self, number: int) -> Parts:
        size = self.sizes[number]
        whole = np.minimum(self.part_first, size)  # of a source that has no documents, too
        before = np.searchsorted(self.of(number), self.part_first) if len(self.documents) else whole
        holding = np.flatnonzero(np.diff(before))
        return Parts(number=holding, first=np.append(before[holding], size))

    @property
    def sizes(self) -> Int64Array:
        """Documents of each [S]."""
        return np.diff(self.first)

    def of(self, number: int) -> Int64Array:
        """Documents of one source."""
        if not len(self.documents):
            return np.arange(self.first[number], self.first[number + 1])
        return self.documents[self.first[number] : self.first[number + 1]]


def one_source(
    documents: int, part_first: Int64Array | None = None, usable: npt.NDArray[np.bool_] | None = None
) -> Sources:
    """So many documents, all alike. part_first: as `Sources` has it, by default one part. usable [N]: those that can be
    served, by default all."""
    chosen = np.zeros(0, np.int64) if usable is None else np.flatnonzero(usable)
    whole = np.array([0, documents], np.int64)
    return Sources(
        names=(ALL,),
        first=whole if usable is None else np.array([0, len(chosen)], np.int64),
        documents=chosen,
        part_first=whole if part_first is None else part_first,
    )


def sources_by_code(
    codes: npt.NDArray[np.uint16],
    names: Sequence[str],
    part_first: Int64Array | None = None,
    usable: npt.NDArray[np.bool_] | None = None,
) -> Sources:
    """From the source of each document [N], as a place in `names`. part_first, usable: as for `one_source`."""
    order = np.argsort(codes, kind="stable")
    chosen = order if usable is None else order[usable[order]]
    first = np.zeros(len(names) + 1, np.int64)
    np.cumsum(np.bincount(codes[chosen], minlength=len(names)), out=first[1:])
    return Sources(
        names=tuple(names),
        first=first,
        documents=chosen.astype(np.int64),
        part_first=np.array([0, len(codes)], np.int64) if part_first is None else part_first,
    )


def _order(parts: Sequence[Parts], window: int | None, keys: tuple[int, ...]) -> Order:
    tables = [NO_TABLE] * len(parts)
    if window is not None:
        tables = [each.table(window, key) for each, key in zip(parts, keys, strict=True)]
    return Order(
        keys=np.array(keys, np.int64),
        blocks=np.concatenate(tables),
        first=np.cumsum([0, *map(len, tables)], dtype=np.int64),
    )


def check_names(mixture: Mixture, names: Sequence[str], data: str) -> None:
    """Raises ValueError where the mixture names a source that the set does not have, or leaves one out."""
    if unknown := sorted(mixture.sources.keys() - set(names)):
        raise ValueError(f"mixture names {', '.join(unknown)}: {data} has the sources {', '.join(names)}")
    if missing := sorted(set(names) - mixture.sources.keys()):
        raise ValueError(f"mixture leaves out {', '.join(missing)} of {data}: give each a weight, 0 to never draw it")


def shares_at(step: int, settings: LoaderSettings, sources: Sources) -> tuple[int, ...]:
    """Each source's part of the tokens, in 1/SHARES."""
    return settings.mixture.shares(sources.names, step) if settings.mixture else (SHARES,)


def ever_drawn(settings: LoaderSettings, sources: Sources) -> list[bool]:
    """Whether each source is to be drawn from at any step."""
    steps = [0, *(change.step for change in settings.mixture.changes)] if settings.mixture else [0]
    return [any(shares) for shares in zip(*(shares_at(step, settings, sources) for step in steps), strict=True)]


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
