"""A rank's ring of shared memory: slots in one piece of memory without a name, filled by the loader, read by ranks.

`Arena` is the loader's end of the memory, `Mapping` a rank's; the descriptor goes from one to the other in `handover`.
The memory is sealed: it keeps its size, and nobody but the loader can write to it. It lives exactly as long as somebody
has it mapped, so nothing is left behind by whoever is killed, and the size of /dev/shm does not matter.

`Ring` shares slots among the peers of a rank, that is, the processes that hold one replica of the model together: each
batch is gathered once, and its slot is used again when every living peer has released it. A slot that nobody looks at
may be given up for one that somebody waits for: what a late peer does not find any more is simply gathered again.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.loader.errors import LoaderError

ALIGNMENT = 64  # bytes: slots begin at lines of the cache
POISON = 0xA5  # a recycled slot is filled with it where that is asked for: as ids these bytes are negative

# From linux/fcntl.h; the last, that only mappings which exist may be written through, is since Linux 5.1.
SEALS = 0x1 | 0x2 | 0x4 | 0x10  # seals, shrinking, growing, future writes
F_ADD_SEALS = 1033

# Of the control group that a container is; version 2 and version 1.
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

Block = npt.NDArray[np.uint8]


class Extents:
    """Free ranges of `size` bytes. First fit, so that a rank which keeps up always reads the same warm memory."""

    def __init__(self, size: int) -> None:
        self._starts = [0] if size else []
        self._ends = [size] if size else []

    def take(self, size: int) -> int | None:
        """Offset of a range that is free no longer; None where no free range is so large."""
        for number, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                self._starts[number] += size
                if end - start == size:
                    del self._starts[number], self._ends[number]
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """The range is free again, and one with its free neighbours."""
        number, end = bisect.bisect(self._starts, start), start + size
        if number < len(self._starts) and self._starts[number] == end:
            end = self._ends[number]
            del self._starts[number], self._ends[number]
        if number and self._ends[number - 1] == start:
            self._ends[number - 1] = end
        else:
            self._starts.insert(number, start)
            self._ends.insert(number, end)


class Arena:
    """`size` bytes of memory of the loader that ranks can map by the descriptor. name: random, never used again."""

    def __init__(self, size: int) -> None:
        """Raises LoaderError where there is not so much memory; it is reserved here, not when it is written to."""
        self.name = secrets.token_hex(8)
        self.size = _aligned(size, mmap.PAGESIZE)
        with _reserving(self.size):
            self.descriptor = os.memfd_create("seqmesh-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.posix_fallocate(self.descriptor, 0, self.size)
                self._memory = np.frombuffer(mmap.mmap(self.descriptor, self.size), np.uint8)
                fcntl.fcntl(self.descriptor, F_ADD_SEALS, SEALS)
            except BaseException:
                os.close(self.descriptor)
                raise
        self._extents = Extents(self.size)

    def take(self, size: int) -> int | None:
        """Offset of a free range; None where there is none."""
        return self._extents.take(_aligned(size))

    def give_back(self, offset: int, size: int) -> None:
        self._extents.give_back(offset, _aligned(size))

    def block(self, offset: int, size: int) -> Block:
        """A writable view."""
        return self._memory[offset : offset + size]

    def close(self) -> None:
        """Close the descriptor; the memory goes with its last mapping."""
        os.close(self.descriptor)


class Mapping:
    """A rank's end: the same memory, read-only."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Takes over the descriptor. Raises OSError where it can not be mapped."""
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # in one go: a fault for every page costs more than a copy
            self._memory = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self.size = size

    def block(self, offset: int, size: int, released: Callable[[], object]) -> Block:
        """A view of a slot; `released` is called once neither it nor anything made from it exists any more, in
        whatever thread lets go of the last. Raises ValueError outside the memory."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"bytes {offset} to {offset + size} of a ring of {self.size}")
        return watched(self._memory, offset, size, released)


class _Watched(np.ndarray[Any, Any]):
    """An array that can be watched: numpy keeps it alive for every view, torch for every tensor that is made of one."""


def watched(buffer: Any, offset: int, size: int, released: Callable[[], object]) -> Block:
    """Bytes of a buffer as an array; `released` is called when the last array or tensor over them is gone."""
    block = _Watched((size,), np.uint8, buffer, offset)
    weakref.finalize(block, released).atexit = False
    return block


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """One batch in an arena. key: which batch. content: what else is known of it. awaited: peers that have yet to be
    sent it. holders: readers that were sent it and have not released it."""

    key: object
    arena: Arena
    offset: int
    size: int
    content: Any = None
    awaited: set[int] = field(default_factory=set)
    holders: set[object] = field(default_factory=set)

    @property
    def block(self) -> Block:
        return self.arena.block(self.offset, self.size)


class Ring:
    """The slots of one rank, by key. Its memory is as large as the largest credit that a peer gave."""

    def __init__(self, *, poison: bool = False) -> None:
        self._arena: Arena | None = None
        self._slots: dict[object, Slot] = {}
        self._gone: set[int] = set()  # peers that left
        self._poison = poison

    def reserve(self, size: int) -> None:
        """See to it that all slots together may have `size` bytes. Slots of a smaller arena stay where they are. Raises
        as `Arena` does."""
        if self._arena is None or self._arena.size < size:
            larger, smaller = Arena(size), self._arena
            self._arena = larger
            if smaller:
                self._retire(smaller)

    def descriptor(self, name: str) -> tuple[int, int] | None:
        """Descriptor and size of the arena of this name; None where it is not one of this ring."""
        return next(((arena.descriptor, arena.size) for arena in self._arenas() if arena.name == name), None)

    def find(self, key: object) -> Slot | None:
        return self._slots.get(key)

    def make(self, key: object, size: int, *, awaited: Iterable[int], urgent: bool) -> Slot | None:
        """A new slot, or None where there is no room. urgent: give up what nobody looks at to make room."""
        assert self._arena is not None
        offset = self._arena.take(size)
        while offset is None and urgent and size <= self._arena.size and self._give_up_one():
            offset = self._arena.take(size)
        if offset is None:
            return None
        slot = Slot(key=key, arena=self._arena, offset=offset, size=size, awaited=set(awaited) - self._gone)
        self._slots[key] = slot
        return slot

    def hand_out(self, slot: Slot, peer: int, holder: object) -> None:
        """The holder, which is this peer, is sent the slot."""
        slot.awaited.discard(peer)
        slot.holders.add(holder)

    def release(self, slot: Slot, holder: object) -> None:
        """The holder looks at the slot no longer."""
        slot.holders.discard(holder)
        self._free_if_unused(slot)

    def expect(self, peer: int) -> None:
        """A peer came, for the first time or again."""
        self._gone.discard(peer)

    def forget(self, peer: int) -> None:
        """A peer left: it is awaited no longer."""
        self._gone.add(peer)
        for slot in list(self._slots.values()):
            slot.awaited.discard(peer)
            self._free_if_unused(slot)

    def close(self) -> None:
        for arena in self._arenas():
            arena.close()

    def _arenas(self) -> set[Arena]:
        return {slot.arena for slot in self._slots.values()} | ({self._arena} if self._arena else set())

    def _give_up_one(self) -> bool:
        """Free the newest slot that nobody looks at: of those that are awaited, it will be missed last."""
        for slot in reversed(self._slots.values()):
            if not slot.holders and slot.arena is self._arena:
                slot.awaited.clear()
                self._free_if_unused(slot)
                return True
        return False

    def _free_if_unused(self, slot: Slot) -> None:
        if slot.holders or slot.awaited or self._slots.get(slot.key) is not slot:
            return
        del self._slots[slot.key]
        if self._poison:
            slot.block.fill(POISON)
        slot.arena.give_back(slot.offset, slot.size)
        if slot.arena is not self._arena:
            self._retire(slot.arena)

    def _retire(self, arena: Arena) -> None:
        if not any(slot.arena is arena for slot in self._slots.values()):
            arena.close()


def _aligned(size: int, step: int = ALIGNMENT) -> int:
    return max(-(-size // step), 1) * step


@contextlib.contextmanager
def _reserving(size: int) -> Iterator[None]:
    """Explains what the system has against `size` bytes. For more than there is it is not even asked: it would hand out
    all there is before it refused, and end processes for want of memory."""
    available = _available_bytes()
    try:
        if size > available:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        yield
    except OSError as error:
        raise LoaderError(
            f"a ring of {size} bytes can not be reserved ({error.strerror}; {available} bytes of memory are available):"
            " give less credit (credit_bytes), or use transport 'zmq'"
        ) from error


def _available_bytes() -> int:
    """What the machine has left, and at most what a container may have."""
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    for path in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError), open(path) as limit:  # none there, or "max"
            available = min(available, int(limit.read()))
    return available
