"""Which parts (files) of a set a stream needs soon, and how many bytes of them at a time. For whoever fetches parts:
what is fetched or thrown away, and when, is decided there.

With a shuffle by blocks the parts of a window are needed together, and after them those of the next window; without a
shuffle, part after part; with a global one, all parts at all times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, zip_longest

import numpy as np

from seqmesh.loader.cursor import documents_at
from seqmesh.loader.rows import window_start
from seqmesh.loader.settings import Blocks, LoaderSettings
from seqmesh.loader.sources import NO_TABLE, Parts, Sources, ever_drawn, last_epochs
from seqmesh.loader.state import StreamState
from seqmesh.loader.stream import NO_LIMIT, begin, order_of, take
from seqmesh.packer.blocks import CLOSES, FIRST, OPENS, block_at, count_windows
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.permute import shuffle_key

WALKED = 1 << 12  # documents of a stretch that are looked up, to put its parts in the order of their first use
WINDOWS = 2  # of parts, that are needed soon: the present one and the next
IN_ORDER = 4  # parts that are needed soon without a shuffle: the present one and a few more


def upcoming(state: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources) -> list[int]:
    """Numbers of the parts that documents from a state on need, each once, the one that is needed first at the front.

    First the parts of the step that begins at the state (in batching `rows`, of the window that it is in), in the order
    of their documents, and of the documents that are held back after it. Then, in turn for each source, those that it
    needs from there on: with a shuffle by blocks the rest of the window of parts and the next one, without a shuffle a
    few more parts, with a global one all. At the end of an epoch the next one follows, if there is one. Empty at the
    end of the last. Raises what `draw` raises.
    """
    begun = window_start(state, settings, sources)
    if begun is None:
        return []
    most = settings.documents_per_window if settings.batching == "rows" else NO_LIMIT
    drawn, after = take(begun, lengths, settings, sources, most)
    after = replace(after, step=begun.step + 1)
    waiting = _documents(np.array(after.waiting[::2], np.int64), 0, sources, *order_of(after, settings, sources).of(0))
    at_once = _parts(np.concatenate([drawn.document, waiting]), sources)
    return list(dict.fromkeys(chain(at_once, _in_turn(begin(after, settings, sources), settings, sources))))


def needed_at_once(settings: LoaderSettings, sources: Sources, sizes: Int64Array) -> int:
    """Bytes of parts that must have room at a time, so that no source needs a part again in an epoch after it was
    thrown away. sizes [P]: bytes of each part of the set.

    It is a bound: the largest parts could come together. It takes the documents of a step to lie in two windows of
    parts at most; those of a window of batching `rows` may lie in more.
    """
    drawn = [number for number, at_all in enumerate(ever_drawn(settings, sources)) if at_all and sources.sizes[number]]
    everything = np.unique(np.concatenate([sources.parts[number].number for number in drawn]))
    total = int(sizes[everything].sum())
    if settings.shuffle is True:
        return total
    largest = [np.sort(sizes[sources.parts[number].number])[::-1] for number in drawn]
    counts = [_parts_at_once(settings, np.diff(sources.parts[number].first)) for number in drawn]
    return min(total, sum(int(held[:count].sum()) for held, count in zip(largest, counts, strict=True)))


def _parts_at_once(settings: LoaderSettings, documents: Int64Array) -> int:
    """Of one source, which has so many documents in each of its parts. Those that batching `rows` packs together lie in
    two windows, and in as many between these as would fit if they were the smallest."""
    window, windows = (settings.shuffle.window, WINDOWS) if isinstance(settings.shuffle, Blocks) else (1, IN_ORDER)
    if settings.batching == "rows":
        fewest = int(np.sort(documents)[: len(documents) // count_windows(len(documents), window)].sum())
        windows = max(windows, (settings.documents_per_window - 2) // max(fewest, 1) + 2)
    held_back = settings.delay.release * (len(settings.delay.thresholds) + 1) if settings.delay else 0
    return windows * window + held_back


def _documents(positions: Int64Array, number: int, sources: Sources, key: int, table: Int64Array) -> Int64Array:
    of = sources.documents[sources.first[number] : sources.first[number + 1]]
    return documents_at(positions, int(sources.sizes[number]), of, key, table)


def _parts(documents: Int64Array, sources: Sources) -> list[int]:
    """The part of each document, without repetition."""
    numbers = np.searchsorted(sources.part_first, documents, side="right") - 1
    return list(dict.fromkeys(numbers.tolist()))


def _in_turn(state: StreamState | None, settings: LoaderSettings, sources: Sources) -> Iterator[int]:
    """Parts that the sources need from a state that `begin` gave, one of each source after the other."""
    if state is None:
        return
    drawn = [number for number, source in enumerate(state.sources) if source.share and sources.sizes[number]]
    lists = [list(dict.fromkeys(_ahead(state, number, settings, sources))) for number in drawn]
    for row in zip_longest(*lists):
        yield from (number for number in row if number is not None)


def _ahead(state: StreamState, number: int, settings: LoaderSettings, sources: Sources) -> Iterator[int]:
    """Parts that one source needs from its position on, stretch after stretch."""
    last, size = last_epochs(settings, sources)[number], int(sources.sizes[number])
    epoch, position = state.sources[number].epoch, state.sources[number].position
    for _ in range(IN_ORDER if settings.shuffle is False else WINDOWS):
        if position == size:
            epoch, position = epoch + 1, 0
        if last is not None and epoch >= last:
            return
        key = shuffle_key(state.seed, epoch) if settings.shuffle else -1
        stop, members, table = _stretch(position, key, settings, sources.parts[number])
        walked = np.arange(position, min(stop, position + WALKED))
        yield from _parts(_documents(walked, number, sources, key, table), sources)
        if len(walked) < stop - position:
            yield from members.tolist()
        position = stop


def _stretch(position: int, key: int, settings: LoaderSettings, parts: Parts) -> tuple[int, Int64Array, Int64Array]:
    """Where those positions end that need the same parts as this one, these parts, and the source's block table."""
    if isinstance(settings.shuffle, Blocks):
        table = parts.table(settings.shuffle.window, key)
        row = block_at(position, table)
        together = table[table[:, OPENS] == table[row, OPENS]]
        return int(table[row, CLOSES]), parts.of(together[:, FIRST]), table
    if settings.shuffle:
        return int(parts.first[-1]), parts.number, NO_TABLE
    part = int(np.searchsorted(parts.first, position, side="right"))
    return int(parts.first[part]), parts.number[part - 1 : part], NO_TABLE
