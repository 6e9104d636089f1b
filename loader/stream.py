"""Which documents come next: a pure function of a few integers.

`draw(state, lengths, settings, sources)` gives the documents of the next global batch and the state after it; for
batching `rows`, `begin` and `take` give those of a window. The state holds no buffers: a document that did not fit is
simply the first of the next step, and of long ones that are held back (see `delay`) only the places are kept. A global
batch is defined without reference to the number of ranks. Of several sources the next document comes from the one that
was served the fewest tokens for its share. A source whose epoch ends is not drawn from again in the same batch, so that
no document is in it twice; what the source is owed follows in later ones. Where no source can be drawn from, the batch
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from seqmesh.loader.cursor import (
    DROP,
    POLICIES,
    SHARE,
    SINCE,
    SPLIT,
    TRUNCATE,
    document_at,
    place_at,
    stretch_at,
)
from seqmesh.loader.delay import take_delayed
from seqmesh.loader.settings import MAX_SETTING, Blocks, LoaderSettings
from seqmesh.loader.sources import Order, Sources, last_epochs, one_source, policies, shares_at
from seqmesh.loader.state import SourceState
from seqmesh.loader.state import StreamState as StreamState
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.permute import shuffle_key

NO_LIMIT = MAX_SETTING * 2
SKIPPED = 1 << 20  # documents that `skip` passes at a time, in some hundredths of a second


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Documents of one global batch, in order: document [D] (row of the set), offset [D] (tokens before the piece that
    is taken), length [D] (tokens taken), source [D]. int64."""

    document: Int64Array
    offset: Int64Array
    length: Int64Array
    source: Int64Array

    def of(self, chosen: Int64Array) -> Draw:
        """Some of them."""
        return Draw(self.document[chosen], self.offset[chosen], self.length[chosen], self.source[chosen])


def start_state(seed: int, sources: int) -> StreamState:
    """Where a job begins."""
    return StreamState(seed=seed, sources=(SourceState(),) * sources)


def served(state: StreamState, names: Sequence[str]) -> dict[str, int]:
    """Tokens of each source so far, by name; in batching `rows`, up to the start of the window."""
    return {name: source.tokens for name, source in zip(names, state.sources, strict=True)}


def draw(
    state: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources | None = None
) -> tuple[Draw, StreamState] | None:
    """The next global batch of batching `tokens`, and the state after it; None once all epochs are done.

    lengths [N]: of all documents of the set; they must have passed `check_documents`. sources: by default one. Raises
    ValueError for a state that lies outside this data, that has other sources, that holds documents back where the
    settings do not, or that lies inside a window.
    """
    if settings.batching != "tokens" or state.window_step:
        raise ValueError("the settings or the state are of batching 'rows': it has no steps without a window")
    sources = sources or one_source(len(lengths))
    while (begun := begin(state, settings, sources)) is not None:
        taken, after = take(begun, lengths, settings, sources)
        if len(taken.document):
            return taken, replace(after, step=state.step + 1)
        state = after  # the rest of this epoch was dropped
    return None


def begin(state: StreamState, settings: LoaderSettings, sources: Sources) -> StreamState | None:
    """The state with the shares that are now in effect, 0 for sources that have done their epochs; None at the end.
    Where a source has another share than it had, all begin to count anew: what was served under other weights is owed
    to nobody. Raises ValueError for a state of other sources."""
    if len(state.sources) != len(sources):
        raise ValueError(f"the state has {len(state.sources)} sources: the set has {len(sources)}")
    wanted = shares_at(state.step, settings, sources)
    done = [n is not None and s.epoch >= n for s, n in zip(state.sources, last_epochs(settings, sources), strict=True)]
    now = [0 if ended else share for share, ended in zip(wanted, done, strict=True)]
    stops = settings.mixture is not None and settings.mixture.exhausted == "stop"
    if not any(now) or (stops and now != list(wanted)):
        return None
    anew = any(share not in (0, source.share) for share, source in zip(now, state.sources, strict=True))
    follow = (
        replace(source, share=share, since=0 if anew else source.since)
        for share, source in zip(now, state.sources, strict=True)
    )
    return replace(state, sources=tuple(follow))


def take(
    begun: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources, most: int = NO_LIMIT
) -> tuple[Draw, StreamState]:
    """The next pieces, at most so many, within the shares of the state (see `begin`), and the state after them, in the
    same step. No pieces where the rest of the epoch is dropped. Raises as `draw` does."""
    cursors, order, numbers = _tables(begun, lengths, settings, sources)
    budget = settings.tokens_per_step or NO_LIMIT
    waiting = begun.waiting
    if settings.delay is None:
        table = sources.documents, sources.first, sources.sizes
        shuffle = order.keys, order.blocks, order.first
        columns = _take(cursors, lengths, *table, *shuffle, numbers, budget, most, settings.longest)
    else:
        limits = budget, settings.longest, int(numbers[0])
        place = int(sources.sizes[0]), sources.documents, *order.of(0)
        rows, waiting = take_delayed(cursors[0], waiting, lengths, *place, *limits, settings.delay)
        columns = rows.T
    return Draw(*map(np.ascontiguousarray, columns)), _moved(begun, cursors, sources, waiting)


def skip(
    begun: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources, steps: int
) -> StreamState:
    """The state after the next global batches of batching `tokens`, without `delay`: at most so many, and none after
    one that ends a source's epoch, which may change the shares. As drawing one after the other, in one loop that gives
    up after SKIPPED documents. Raises as `draw` does."""
    cursors, order, numbers = _tables(begun, lengths, settings, sources)
    assert settings.tokens_per_step is not None and settings.delay is None
    table = sources.documents, sources.first, sources.sizes
    shuffle = order.keys, order.blocks, order.first
    count = _skip(cursors, lengths, *table, *shuffle, numbers, settings.tokens_per_step, settings.longest, steps)
    return replace(_moved(begun, cursors, sources, ()), step=begun.step + count)


def _tables(
    begun: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources
) -> tuple[Int64Array, Order, Int64Array]:
    """Of each source: its cursor, its order, the number of its policy."""
    order = order_of(begun, settings, sources)
    _check_inside(begun, lengths, sources, order)
    _check_waiting(begun, settings)
    cursors = np.array([source.cursor for source in begun.sources], np.int64)
    numbers = np.array([POLICIES.index(policy) for policy in policies(settings, sources)], np.int64)
    return cursors, order, numbers


def _moved(begun: StreamState, cursors: Int64Array, sources: Sources, waiting: tuple[int, ...]) -> StreamState:
    """The state where the cursors stand, in the same step."""
    after = tuple(
        SourceState.after(cursor, epoch=before.epoch, ended=cursor[0] == size > 0 and not waiting)
        for cursor, before, size in zip(cursors.tolist(), begun.sources, sources.sizes.tolist(), strict=True)
    )
    return replace(begun, sources=after, waiting=waiting)


def order_of(state: StreamState, settings: LoaderSettings, sources: Sources) -> Order:
    """The order of each source's documents in the epoch that it is in."""
    keys = tuple(shuffle_key(state.seed, source.epoch) if settings.shuffle else -1 for source in state.sources)
    return sources.order(settings.shuffle.window if isinstance(settings.shuffle, Blocks) else None, keys)


def _check_inside(state: StreamState, lengths: Int64Array, sources: Sources, order: Order) -> None:
    for number, (source, size) in enumerate(zip(state.sources, sources.sizes.tolist(), strict=True)):
        outside = source.position >= size and (source.position > size or not (state.waiting or size == 0))
        if not outside and source.offset:
            of = sources.documents[sources.first[number] : sources.first[number + 1]]
            outside = (
                source.position == size
                or source.offset >= lengths[document_at(source.position, size, of, *order.of(number))]
            )
        if outside:
            place = f"position {source.position} (offset {source.offset}) is outside the {size} documents"
            raise ValueError(place + (f" of source {sources.names[number]!r}" if len(sources) > 1 else ""))


def _check_waiting(state: StreamState, settings: LoaderSettings) -> None:
    if state.waiting and settings.delay is None:
        raise ValueError(f"{len(state.waiting) // 2} documents wait in the state: delay must be as it was")
    here = state.sources[0].position, state.sources[0].offset
    for place in zip(state.waiting[::2], state.waiting[1::2], strict=True):
        if place >= here:
            raise ValueError(f"position {place[0]} (offset {place[1]}) waits: it is not before {here[0]} ({here[1]})")


@jit
def _take(
    cursors: Int64Array,
    lengths: Int64Array,
    documents: Int64Array,
    first: Int64Array,
    sizes: Int64Array,
    keys: Int64Array,
    blocks: Int64Array,
    first_block: Int64Array,
    policies: Int64Array,
    budget: int,
    most: int,
    longest: int,
) -> Int64Array:
    """Columns (document, offset, length, source) until the next would exceed the budget, there are `most`, or the
    epochs of all sources end; moves the cursors. What `cursor` does, in one loop for as long as the same source is
    drawn from, which takes a third of the time."""
    columns = np.empty((4, 64), np.int64)
    count, table, by_blocks = 0, blocks, len(blocks) > 0
    while count < most and budget >= 0:
        source, limit, wins = _least_served(cursors, sizes)
        if source < 0:
            break
        size, key, policy, share = sizes[source], keys[source], policies[source], cursors[source, SHARE]
        of = documents[first[source] : first[source + 1]]
        if by_blocks:
            table = blocks[first_block[source] : first_block[source + 1]]
        position, offset, tokens, truncated, dropped, since, _ = cursors[source]
        start, stop, key = stretch_at(position, size, key, table)
        while position < stop and count < most:
            if limit >= 0 and not (since / share < limit or (wins and since / share == limit)):
                break
            document = place_at(position, start, stop, key, table, by_blocks) if key >= 0 else position
            if len(of):
                document = of[document]
            remaining = lengths[document] - offset
            if policy == DROP and remaining > longest:
                position += 1
                dropped += 1
                continue
            length = min(remaining, longest)
            if length > budget:
                budget = -1
                break
            if count == columns.shape[1]:
                columns = _grown(columns)
            columns[0, count], columns[1, count], columns[2, count], columns[3, count] = (
                document,
                offset,
                length,
                source,
            )
            count += 1
            budget -= length
            tokens += length
            since += length
            if policy == SPLIT and remaining > longest:
                offset += length
                continue
            if policy == TRUNCATE:
                truncated += remaining - length
            position += 1
            offset = 0
        cursors[source, :6] = position, offset, tokens, truncated, dropped, since
    return columns[:, :count]


@jit
def _skip(
    cursors: Int64Array,
    lengths: Int64Array,
    documents: Int64Array,
    first: Int64Array,
    sizes: Int64Array,
    keys: Int64Array,
    blocks: Int64Array,
    first_block: Int64Array,
    policies: Int64Array,
    budget: int,
    longest: int,
    steps: int,
) -> int:
    """Moves the cursors past some batches; how many."""
    count = skipped = 0
    ended = False
    while count < steps and skipped < SKIPPED and not ended:
        shuffle = keys, blocks, first_block
        taken = _take(cursors, lengths, documents, first, sizes, *shuffle, policies, budget, NO_LIMIT, longest).shape[1]
        count += taken > 0
        skipped += taken
        ended = taken == 0
        for source in range(len(sizes)):
            ended |= cursors[source, 0] == sizes[source] > 0
    return count


@jit
def _grown(columns: Int64Array) -> Int64Array:
    rows, room = columns.shape
    larger = np.empty((rows, 2 * room), np.int64)
    for row in range(rows):
        larger[row, :room] = columns[row]
    return larger


@jit
def _least_served(cursors: Int64Array, sizes: Int64Array) -> tuple[int, float, bool]:
    """Of the sources whose epoch has not ended, the one with the fewest tokens for its share, the first of equals; −1
    for none. What the next one has for its share (−1 without another), and whether the first comes before it as an
    equal. Division is rounded exactly, so this is the same on every machine."""
    best, second = -1, -1
    least, limit = 0.0, -1.0
    for source in range(len(sizes)):
        if cursors[source, SHARE] > 0 and cursors[source, 0] < sizes[source]:
            ratio = cursors[source, SINCE] / cursors[source, SHARE]
            if best < 0 or ratio < least:
                second, limit = best, least
                best, least = source, ratio
            elif second < 0 or ratio < limit:
                second, limit = source, ratio
    return best, limit if second >= 0 else -1.0, best < second
