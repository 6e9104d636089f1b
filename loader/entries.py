"""Steps as the columns of a ledger, see `ledger`: what is written of each, in few touches, and how it is read again.

Lists that the settings leave no choice about are written empty (see `trivial_lists`), and of the states only those that
the row before does not tell. All else is as the step has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from seqmesh.loader.planner import Step
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.state import PER_SOURCE, StreamState
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
PLAIN = {
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

_KINDS: tuple[Any, ...] = tuple(PLAIN.values())
_COUNTS = itemgetter("step", "epoch", "tokens_in_step", "supervised_tokens_in_step", "rings_in_step")
_ONE = ("seed", "step", "window_step", "version")
_ones: Callable[[StreamState], tuple[int, ...]] = attrgetter(*_ONE)
_each: Callable[[Any], tuple[int, ...]] = attrgetter(*PER_SOURCE)


class Row(NamedTuple):
    """A step to be written: when it began to be served, in microseconds, and whether to a rank that another loader
    process had served before."""

    step: Step
    microseconds: int
    continued: bool = False


def trivial_lists(settings: LoaderSettings) -> frozenset[str]:
    """Those that have one value in all steps of a job, but for pieces of documents that other settings had split."""
    mixed = settings.mixture.sources.values() if settings.mixture else ()
    splits = "split" in (settings.overlong, *(source.overlong for source in mixed))
    names = {"source": settings.mixture is None, "offset": not splits}
    names |= dict.fromkeys(("ring_sizes", "ring_ranks"), settings.ranks == 1)
    return frozenset(name for name, is_trivial in names.items() if is_trivial)


def record_batch(rows: Sequence[Row], trivial: frozenset[str] = frozenset()) -> pa.RecordBatch:
    """Rows as columns. trivial: see `trivial_lists`. Every step's arrays are touched once, together."""
    steps = [row.step for row in rows]
    scalars = [step.scalars for step in steps]
    counts = np.fromiter(chain.from_iterable(map(_COUNTS, scalars)), np.int64).reshape(len(rows), -1)
    step, epoch, tokens, supervised_tokens, rings = np.ascontiguousarray(counts.T)
    columns: tuple[Any, ...] = (
        step,
        epoch,
        np.array([row.microseconds for row in rows]),
        [step.digest for step in steps],
        [row.continued for row in rows],
        tokens,
        supervised_tokens,
        rings,
        [each["imbalance"] for each in scalars],
    )
    plain: list[Any] = [pa.array(column, kind) for column, kind in zip(columns, _KINDS, strict=True)]
    befores = _not_told(steps)
    states = [_state_lists(befores), _state_lists([step.after for step in steps])]
    if any(_is_inside(state) for state in befores if state):
        trivial -= {"offset"}
    if not rings.any():
        trivial |= {"ring_sizes"}
    return pa.RecordBatch.from_arrays([*plain, *states, *_lists_of(steps, trivial)], schema=SCHEMA)


def _not_told(steps: Sequence[Step]) -> list[StreamState | None]:
    """The state before each step, None where it is the one after the step of the row before."""
    afters = [None, *(step.after for step in steps[:-1])]
    return [
        None if after is step.before or after == step.before else step.before
        for after, step in zip(afters, steps, strict=True)
    ]


def _is_inside(state: StreamState) -> bool:
    """Whether documents were begun that are not served to their end."""
    return any(source.offset for source in state.sources) or any(state.waiting[1::2])


def _lists_of(steps: Sequence[Step], trivial: frozenset[str]) -> list[Any]:
    draws, plans = [step.documents for step in steps], [step.plan for step in steps]
    documents = _ends([len(draw.document) for draw in draws])
    empty = np.zeros(len(steps) + 1, np.int64)
    made: dict[str, Callable[[], Any]] = {
        "document": lambda: _list_array("document", documents, np.concatenate([draw.document for draw in draws])),
        "offset": lambda: _list_array("offset", documents, np.concatenate([draw.offset for draw in draws])),
        "length": lambda: _list_array("length", documents, np.concatenate([draw.length for draw in draws])),
        "source": lambda: _list_array("source", documents, np.concatenate([draw.source for draw in draws])),
        "ring_sizes": lambda: _list_array(
            "ring_sizes", documents, _ring_sizes(documents, [plan.ring_offsets for plan in plans])
        ),
        "ring_ranks": lambda: _lists("ring_ranks", [plan.ring_ranks for plan in plans]),
        "waves": lambda: _lists("waves", [plan.waves for plan in plans]),
    }
    nothing = np.zeros(0, np.int64)
    return [_list_array(name, empty, nothing) if name in trivial else make() for name, make in made.items()]


def _ends(counts: Iterable[int]) -> Int64Array:
    return np.cumsum([0, *counts], dtype=np.int64)


def _lists(name: str, parts: Sequence[Int64Array]) -> Any:
    return _list_array(name, _ends(map(len, parts)), np.concatenate(parts))


def _ring_sizes(documents: Int64Array, offsets: list[Int64Array]) -> Int64Array:
    """From the ring offsets of each step, one more than it has documents."""
    sizes = np.diff(np.concatenate(offsets))
    between = (documents[1:-1] + np.arange(len(offsets) - 1)).astype(np.int64)
    return np.delete(sizes, between)


def _list_array(name: str, ends: Int64Array, values: Int64Array) -> Any:
    """A list for each row, whose items begin and end at `ends`."""
    narrow: Any = values.astype((STATES | LISTS)[name].to_pandas_dtype(), copy=False)
    offsets: Any = ends
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(narrow))


# States: integers, an empty list for None.


def _state_lists(states: Sequence[StreamState | None]) -> Any:
    parts = [_integers(state) if state else () for state in states]
    return _list_array("after", _ends(map(len, parts)), np.fromiter(chain.from_iterable(parts), np.int64))


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
