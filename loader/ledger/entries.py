"""`Entries`: steps as the columns of a ledger, see `ledger`, gathered one by one until they are written together.

Lists that the settings leave no choice about are written empty (see `trivial_lists`), and of the states only those that
the row before does not tell. All else is as the step has it. Nothing is converted before it is written, many steps at
once: between two batches the caches hold neither the code nor the data of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from seqmesh.loader.planner import Step
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.state import PER_SOURCE, StreamState
from seqmesh.loader.stream import Draw
from seqmesh.packer.lengths import Int64Array

# Lists have 64-bit offsets: many steps together may have over 2**31 documents.
LISTS = {
    "document": pa.int64(),
    "offset": pa.int64(),
    "length": pa.int64(),
    "source": pa.uint16(),
    "ring_sizes": pa.int32(),
    "ring_ranks": pa.int32(),
    "waves": pa.int32(),
}
TRIVIAL = {"offset": 0, "source": 0, "ring_sizes": 1, "ring_ranks": 0}  # of every document, where the list is empty
STATES = {"before": pa.int64(), "after": pa.int64()}
PLAIN: dict[str, Any] = {
    "step": pa.int64(),
    "epoch": pa.int64(),
    "time": pa.timestamp("us", "UTC"),
    "plan": pa.string(),
    "continued": pa.bool_(),
    "tokens": pa.int64(),
    "supervised_tokens": pa.int64(),
    "rings": pa.int64(),
    "imbalance": pa.float64(),
}
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=False) for name, kind in PLAIN.items()]
    + [pa.field(name, pa.large_list(kind), nullable=False) for name, kind in (STATES | LISTS).items()]
)

# What is kept of a step until it is written: no more, or memory that is used again would be held by what waits.
Parts = tuple[StreamState, StreamState, dict[str, Any], Draw, Int64Array, Int64Array, Int64Array]
parts_of: Callable[[Step], Parts] = attrgetter(
    "before", "after", "scalars", "documents", "plan.ring_offsets", "plan.ring_ranks", "plan.waves"
)
_ONE = ("seed", "step", "window_step", "version")
_COUNTS = itemgetter("step", "epoch", "tokens_in_step", "supervised_tokens_in_step", "rings_in_step")
_ones: Callable[[StreamState], tuple[int, ...]] = attrgetter(*_ONE)
_each: Callable[[Any], tuple[int, ...]] = attrgetter(*PER_SOURCE)


def trivial_lists(settings: LoaderSettings) -> frozenset[str]:
    """Those that have one value in all steps of a job, but for pieces of documents that other settings had split."""
    mixed = settings.mixture.sources.values() if settings.mixture else ()
    splits = "split" in (settings.overlong, *(source.overlong for source in mixed))
    names = {"source": settings.mixture is None, "offset": not splits}
    names |= dict.fromkeys(("ring_sizes", "ring_ranks"), settings.ranks == 1)
    return frozenset(name for name, is_trivial in names.items() if is_trivial)


class Entries:
    """Rows to be, in the order they are added. trivial: see `trivial_lists`."""

    def __init__(self, trivial: frozenset[str] = frozenset()) -> None:
        self._trivial = trivial
        self._times: list[int] = []
        self._continued: list[bool] = []
        self._parts: list[Parts] = []

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, parts: Parts, microseconds: int, *, continued: bool = False) -> None:
        """parts: of the step. microseconds: when it began to be served. continued: to a rank that another loader
        process had served before."""
        self._parts.append(parts)
        self._times.append(microseconds)
        self._continued.append(continued)

    def to_batch(self) -> pa.RecordBatch:
        """All of them; at least one."""
        befores, afters, scalars, draws, offsets, ranks, waves = zip(*self._parts, strict=True)
        told = _not_told(befores, afters)
        trivial = self._trivial - {"offset"} if any(map(_is_inside, filter(None, told))) else self._trivial
        documents = _ends([len(draw.document) for draw in draws])
        made: dict[str, Callable[[], tuple[Int64Array, Int64Array]]] = {
            "document": lambda: (documents, np.concatenate([draw.document for draw in draws])),
            "offset": lambda: (documents, np.concatenate([draw.offset for draw in draws])),
            "length": lambda: (documents, np.concatenate([draw.length for draw in draws])),
            "source": lambda: (documents, np.concatenate([draw.source for draw in draws])),
            "ring_sizes": lambda: (documents, _ring_sizes(documents, np.concatenate(offsets))),
            "ring_ranks": lambda: _joined(ranks),
            "waves": lambda: _joined(waves),
        }
        nothing = np.zeros_like(documents), np.zeros(0, np.int64)
        lists = [_list_array(name, *(nothing if name in trivial else make())) for name, make in made.items()]
        states = [_state_lists("before", told), _state_lists("after", afters)]
        return pa.RecordBatch.from_arrays([*self._plain(scalars), *states, *lists], schema=SCHEMA)

    def _plain(self, scalars: Sequence[dict[str, Any]]) -> list[Any]:
        counts = np.fromiter(chain.from_iterable(map(_COUNTS, scalars)), np.int64).reshape(len(self), -1)
        step, epoch, tokens, supervised_tokens, rings = np.ascontiguousarray(counts.T)
        columns: tuple[Any, ...] = (
            step,
            epoch,
            np.array(self._times),
            [each["plan"] for each in scalars],
            self._continued,
            tokens,
            supervised_tokens,
            rings,
            [each["imbalance"] for each in scalars],
        )
        return [pa.array(column, kind) for column, kind in zip(columns, PLAIN.values(), strict=True)]


def _not_told(befores: Sequence[StreamState], afters: Sequence[StreamState]) -> list[StreamState | None]:
    """The state before each step, None where it is the one after the step of the row before."""
    previous = [None, *afters[:-1]]
    return [None if a is b or a == b else b for a, b in zip(previous, befores, strict=True)]


def _state_lists(name: str, states: Sequence[StreamState | None]) -> Any:
    """Integers for each; none for None."""
    parts = [_integers(state) if state else () for state in states]
    return _list_array(name, _ends([len(part) for part in parts]), np.fromiter(chain.from_iterable(parts), np.int64))


def _joined(parts: Sequence[Int64Array]) -> tuple[Int64Array, Int64Array]:
    return _ends([len(part) for part in parts]), np.concatenate(parts)


def _ends(counts: list[int]) -> Int64Array:
    return np.cumsum([0, *counts], dtype=np.int64)


def _ring_sizes(ends: Int64Array, offsets: Int64Array) -> Int64Array:
    """From the ring offsets of all steps, of each one more than it has documents."""
    between = ends[1:-1] + np.arange(len(ends) - 2)
    return np.delete(np.diff(offsets), between)


def _list_array(name: str, ends: Int64Array, values: Int64Array) -> Any:
    """A list for each row, whose items begin and end at `ends`."""
    narrow: Any = values.astype((STATES | LISTS)[name].to_pandas_dtype(), copy=False)
    offsets: Any = ends
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(narrow))


def _is_inside(state: StreamState) -> bool:
    """Whether documents were begun that are not served to their end."""
    return any(source.offset for source in state.sources) or any(state.waiting[1::2])


def _integers(state: StreamState) -> tuple[int, ...]:
    sources = state.sources
    return (*_ones(state), len(sources), *chain.from_iterable(map(_each, sources)), *state.waiting)


def state_of(integers: list[int]) -> StreamState:
    """What was written as these. Raises ValueError for what is no state."""
    if len(integers) <= len(_ONE) or len(integers) < (end := len(_ONE) + 1 + integers[len(_ONE)] * len(PER_SOURCE)):
        raise ValueError(f"not a stream state: {len(integers)} integers")
    one, values = integers[: len(_ONE)], integers[len(_ONE) + 1 : end]
    lists = {name: values[place :: len(PER_SOURCE)] for place, name in enumerate(PER_SOURCE)}
    return StreamState.from_dict(dict(zip(_ONE, one, strict=True)) | lists | {"waiting": integers[end:]})
