"""Packing of a stream: each document gets its bin as it arrives, and only a few bins are open at a time.

`OnlinePacker` takes document lengths in chunks of any size and says for each document which bin it is in, and which
bins it finished. A document goes into the fullest open bin that holds it, else into a new one (bounded-space best fit).
Then it finishes at most one bin, so that finished bins come one at a time, never as a burst: the oldest bin if that has
waited long enough, else the fullest bin if it takes no more documents or if there is one open bin too many.
Equally full bins count as fuller the older they are.

The answer depends on the lengths alone, not on how they are cut into chunks. Work per document and the saved state
depend on the number of open bins, not on what has been seen. The packer keeps no documents: it does not reorder, split,
cut or drop one, and its state does not list what open bins hold. After a restart, a consumer either has kept that, or
restores a state that was saved at a position up to `oldest` and pushes the lengths from there on once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array, as_integer, as_lengths

STATE_VERSION = 1
SLOT_BITS = 12
SLOT_MASK = 2**SLOT_BITS - 1
MAX_OPEN = SLOT_MASK  # one slot is for the bin that makes one too many
MAX_CAPACITY = 2**48  # a key is the room and the slot: 61 bits, so that differences of keys fit in 64
NEVER = 2**62  # as a number of documents
NO_BIN = -1  # the key of a free slot: as an unsigned number it is larger than any other
LANES = 32  # the search takes this many slots at once

# Open bins are the columns of an int64 matrix, from the oldest to the newest; these are its rows. A bin that takes no
# more documents has the room 0.
KEY, SERIAL, OPENED_AT, DOCUMENTS = range(4)

Limits = tuple[int, int, int, int]  # capacity, max_open, max_wait, max_documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Where a chunk of N documents went, and the C bins that it finished.

    bin_of [N]: the bin of each document; bins are numbered from 0 in the order in which the whole stream opened them.
    closed [C]: the finished bins, in the order in which they were finished. closed_at [C]: index in the chunk of the
    document that finished each; strictly increasing, as no document finishes two. All int64.
    """

    bin_of: Int64Array
    closed: Int64Array
    closed_at: Int64Array


class OnlinePacker:
    """Packs a stream of documents into bins of `capacity` tokens with at most `max_open` bins open.

    max_wait: a bin is finished at the latest by this many documents after the one that opened it; None: it may stay
    open until `flush`. max_documents: a bin with so many documents takes no more. Not for use by two threads at once.
    Raises ValueError for a capacity outside 1 to 2**48, `max_open` outside 1 to 4095, a negative `max_wait`, or
    `max_documents` below 1.
    """

    def __init__(
        self, capacity: int, *, max_open: int = 32, max_wait: int | None = None, max_documents: int | None = None
    ) -> None:
        self.capacity = as_integer("capacity", capacity, 1, MAX_CAPACITY)
        self.max_open = as_integer("max_open", max_open, 1, MAX_OPEN)
        self.max_wait = None if max_wait is None else as_integer("max_wait", max_wait, 0, NEVER)
        self.max_documents = None if max_documents is None else as_integer("max_documents", max_documents, 1, NEVER)
        self._bins = _free_slots(self.max_open)
        self._seen = self._opened = self._open = 0

    @property
    def seen(self) -> int:
        """Number of documents so far: the stream position of the next one."""
        return self._seen

    @property
    def oldest(self) -> int:
        """Stream position of the first document of the oldest open bin; `seen` where no bin is open."""
        return int(self._bins[OPENED_AT, 0]) if self._open else self._seen

    def push(self, lengths: npt.ArrayLike) -> Assigned:
        """Assign the next N documents of the stream, `lengths` [N] in tokens, N >= 0.

        Raises ValueError for a bad length (see `as_lengths`) or a document longer than the capacity; then nothing has
        changed, and the chunk may be pushed again without it.
        """
        checked = self._that_fit(as_lengths(lengths))
        bin_of, closed, closed_at = (np.empty(len(checked), np.int64) for _ in range(3))
        counts = self._seen, self._opened, self._open
        self._opened, self._open, finished = _place(
            checked, self._limits(), self._bins, counts, bin_of, closed, closed_at
        )
        self._seen += len(checked)
        return Assigned(bin_of=bin_of, closed=closed[:finished].copy(), closed_at=closed_at[:finished].copy())

    def flush(self) -> Int64Array:
        """Finish all open bins: their numbers, from the oldest to the newest. The stream may go on afterwards."""
        closed = self._bins[SERIAL, : self._open].copy()
        self._bins, self._open = _free_slots(self.max_open), 0
        return closed

    def state(self) -> dict[str, Any]:
        """All that the future depends on, as integers, None, and four lists of an integer per open bin."""
        bins = self._bins[:, : self._open]
        return {
            "version": STATE_VERSION,
            "capacity": self.capacity,
            "max_open": self.max_open,
            "max_wait": self.max_wait,
            "max_documents": self.max_documents,
            "seen": self._seen,
            "opened": self._opened,
            "rooms": (bins[KEY] >> SLOT_BITS).tolist(),
            "serials": bins[SERIAL].tolist(),
            "opened_at": bins[OPENED_AT].tolist(),
            "documents": bins[DOCUMENTS].tolist(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> OnlinePacker:
        """A packer that goes on exactly where the one went on whose `state` this is.

        Raises ValueError for a state of another version, and for one that no packer can have given.
        """
        _check_fields(state)
        packer = cls(
            state["capacity"],
            max_open=state["max_open"],
            max_wait=state["max_wait"],
            max_documents=state["max_documents"],
        )
        packer._seen = as_integer("seen", state["seen"], 0, NEVER)
        packer._opened = as_integer("opened", state["opened"], 0, packer._seen)
        packer._reopen(*(as_lengths(state[name], name=name) for name in ("rooms", "serials", "opened_at", "documents")))
        return packer

    def _limits(self) -> Limits:
        max_wait = NEVER if self.max_wait is None else self.max_wait
        return self.capacity, self.max_open, max_wait, NEVER if self.max_documents is None else self.max_documents

    def _that_fit(self, lengths: Int64Array) -> Int64Array:
        if len(lengths) and int(lengths.max()) > self.capacity:
            first = int(np.argmax(lengths > self.capacity))
            raise ValueError(
                f"document {self._seen + first} of the stream has {int(lengths[first])} tokens: "
                f"more than the capacity, {self.capacity}"
            )
        return lengths

    def _reopen(self, rooms: Int64Array, serials: Int64Array, opened_at: Int64Array, documents: Int64Array) -> None:
        _capacity, max_open, max_wait, max_documents = self._limits()
        count = len(rooms)
        if not count == len(serials) == len(opened_at) == len(documents) <= max_open:
            raise ValueError(f"rooms, serials, opened_at, documents are not of one length of at most {max_open}")
        _check_range("rooms", rooms, 0, np.where(documents < max_documents, self.capacity, 0))
        _check_range("serials", serials, _above_the_last(serials), self._opened - 1)
        earliest = np.maximum(serials, self._seen - max_wait)
        _check_range("opened_at", opened_at, np.maximum(earliest, _above_the_last(opened_at)), self._seen - 1)
        _check_range("documents", documents, 1, np.minimum(self._seen - opened_at, max_documents))
        self._bins[:, :count] = rooms << SLOT_BITS | np.arange(count), serials, opened_at, documents
        self._open = count


def packs(chunks: Iterable[npt.ArrayLike], packer: OnlinePacker) -> Iterator[Int64Array]:
    """The finished packs of a stream of lengths, one at a time: the stream positions of a pack's documents, ascending.

    Keeps the positions of the documents in open bins. At the end of `chunks` the packer is flushed. Raises ValueError
    if the packer has open bins at the start, as what they hold is not known here.
    """
    if packer.oldest < packer.seen:
        raise ValueError(f"the packer has bins open since document {packer.oldest}, before the start of these chunks")
    waiting: defaultdict[int, list[Int64Array]] = defaultdict(list)
    for lengths in chunks:
        first = packer.seen
        assigned = packer.push(lengths)
        _hold(waiting, assigned.bin_of, first)
        for serial in assigned.closed.tolist():
            yield np.concatenate(waiting.pop(serial))
    for serial in packer.flush().tolist():
        yield np.concatenate(waiting.pop(serial))


def _hold(waiting: defaultdict[int, list[Int64Array]], bin_of: Int64Array, first: int) -> None:
    """Add a chunk's documents, of which the first is at stream position `first`, to the lists of their bins."""
    order = np.argsort(bin_of, kind="stable")
    sorted_bins = bin_of[order]
    starts = np.flatnonzero(np.diff(sorted_bins, prepend=-1))
    for start, stop in zip(starts, np.append(starts[1:], len(order)), strict=True):
        waiting[int(sorted_bins[start])].append(order[start:stop] + first)


def _check_fields(state: Mapping[str, Any]) -> None:
    if state.get("version") != STATE_VERSION:
        raise ValueError(f"the state's version is {state.get('version')!r}: must be {STATE_VERSION}")
    wrong = set(state) ^ set(OnlinePacker(1).state())
    if wrong:
        raise ValueError(f"the state has fields missing or unknown: {', '.join(sorted(wrong))}")


def _check_range(name: str, values: Int64Array, low: Int64Array | int, high: Int64Array | int) -> None:
    bad = np.flatnonzero((values < low) | (values > high))
    if len(bad):
        raise ValueError(f"{name}[{bad[0]}] is {values[bad[0]]}: contradicts the rest of the state")


def _above_the_last(values: Int64Array) -> Int64Array:
    """The least that each value may be in a list that increases from 0 or more."""
    return np.append(0, values + 1)[:-1]


def _free_slots(max_open: int) -> Int64Array:
    """A matrix without bins, [4, slots]: whole LANES to search in, and one slot for the bin that is one too many."""
    bins = np.zeros((4, -(-max_open // LANES) * LANES + 1), np.int64)
    bins[KEY] = NO_BIN
    return bins


@jit
def _place(
    lengths: Int64Array,
    limits: Limits,
    bins: Int64Array,
    counts: tuple[int, int, int],
    bin_of: Int64Array,
    closed: Int64Array,
    closed_at: Int64Array,
) -> tuple[int, int, int]:
    """Assign documents: fills `bin_of` and the front of `closed` and `closed_at`, changes `bins`.

    `counts` are the documents seen, bins opened and bins open before; returns bins opened, open, and finished here.
    The key of the last document's bin is kept in `key` and written only in the next search. See `_search`.
    """
    capacity, max_open, max_wait, max_documents = limits
    seen, opened, count = counts
    keys, serials, opened_at, documents = bins[KEY], bins[SERIAL], bins[OPENED_AT], bins[DOCUMENTS]
    finished = 0
    slot, key = 0, keys[0]
    for i in range(len(lengths)):
        length = lengths[i]
        best, fullest = _search(keys, max(length, 1) << SLOT_BITS, slot, key)
        keys[slot] = key
        slot = best & SLOT_MASK
        if best < 0:  # none fits
            slot = count
            keys[slot] = capacity << SLOT_BITS | slot
            serials[slot], opened_at[slot], documents[slot] = opened, seen + i, 0
            opened += 1
            count += 1
        bin_of[i] = serials[slot]
        documents[slot] += 1
        key = keys[slot] - (length << SLOT_BITS)
        if documents[slot] == max_documents:
            key = slot
        fullest = np.int64(min(np.uint64(fullest), np.uint64(key)))
        due = seen + i - opened_at[0] >= max_wait
        if due or fullest >> SLOT_BITS == 0 or count > max_open:
            leaving = 0 if due else fullest & SLOT_MASK
            keys[slot] = key
            closed[finished], closed_at[finished] = serials[leaving], i
            finished += 1
            _remove(bins, leaving, count)
            count -= 1
            slot, key = 0, keys[0]
    keys[slot] = key
    return opened, count, finished


@jit
def _search(keys: Int64Array, need: int, stale: int, fresh: np.int64) -> tuple[np.int64, np.int64]:
    """The best fit's key minus `need`, negative where no bin has room, and the fullest bin's key.

    Differences are compared as unsigned numbers: those below 0 are then the largest. The slot's bits survive, as
    `need` has zeros there. The key of slot `stale` is `fresh`, whatever is in memory: the caller writes it after this,
    as a vector load that follows at once on a store to a part of the vector has to wait for the store.
    """
    best, fullest = np.uint64(fresh - need), np.uint64(fresh)
    for slot in range(len(keys) - 1):
        key = keys[slot]
        if slot == stale:
            key = np.int64(NO_BIN)
        best = min(best, np.uint64(key - need))
        fullest = min(fullest, np.uint64(key))
    return np.int64(best), np.int64(fullest)


@jit
def _remove(bins: Int64Array, leaving: int, count: int) -> None:
    """Close the gap that slot `leaving` of `count` leaves, so that the bins stay in the order of their age."""
    keys = bins[KEY, leaving:count]
    for i in range(len(keys) - 1):
        keys[i] = keys[i + 1] - 1  # the slot is a part of the key
    keys[-1] = NO_BIN
    for row in range(SERIAL, DOCUMENTS + 1):
        values = bins[row, leaving:count]
        for i in range(len(values) - 1):
            values[i] = values[i + 1]
