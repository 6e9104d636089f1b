"""Memory that loader and ranks share: sealed, reserved, released once; slots are used again when nobody holds them."""

import ctypes
import gc
import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader import arena as arena_module
from seqmesh.loader.arena import POISON, Arena, Extents, Mapping, Ring, Slot, watched
from seqmesh.loader.errors import LoaderError

PAGE = mmap.PAGESIZE
LINE = 64


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Extents against a byte for every byte: 1 where it is taken.


def first_fit(taken: bytearray, size: int) -> int | None:
    found = taken.find(bytes(size))
    return None if found < 0 else found


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.booleans(), st.integers(1, 14), st.integers(0, 1000)), max_size=60),
)
def test_extents_are_the_first_that_fit_and_merge_completely(size: int, steps: list[tuple[bool, int, int]]) -> None:
    extents, taken, ours = Extents(size), bytearray(size), list[tuple[int, int]]()
    for take, length, which in steps:
        if take:
            offset = extents.take(length)
            assert offset == first_fit(taken, length)
            if offset is not None:
                taken[offset : offset + length] = b"\1" * length
                ours.append((offset, length))
        elif ours:
            offset, length = ours.pop(which % len(ours))
            extents.give_back(offset, length)
            taken[offset : offset + length] = bytes(length)
    for offset, length in ours:
        extents.give_back(offset, length)
    assert (extents._starts, extents._ends) == (([0], [size]) if size else ([], []))


# The memory.


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(3 * PAGE - 1)
    yield arena
    arena.close()


def mapping_of(arena: Arena) -> Mapping:
    return Mapping(os.dup(arena.descriptor), arena.size)


def test_memory_is_reserved_at_once_and_both_ends_see_it(arena: Arena) -> None:
    assert arena.size == 3 * PAGE
    assert os.fstat(arena.descriptor).st_blocks * 512 >= arena.size
    mapping = mapping_of(arena)
    arena.block(PAGE, 3)[:] = [7, 8, 9]
    view = mapping.block(PAGE, 3, lambda: None)
    assert view.tolist() == [7, 8, 9]
    arena.block(PAGE, 3)[1] = 0
    assert view.tolist() == [7, 0, 9]


def test_nobody_else_can_write_to_it_or_change_its_size(arena: Arena) -> None:
    reopened = os.open(f"/proc/self/fd/{arena.descriptor}", os.O_RDWR)
    for descriptor in (arena.descriptor, reopened):
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, arena.size)
        for size in (0, arena.size + PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            os.write(descriptor, b"x")
    os.close(reopened)
    assert ctypes.CDLL(None, use_errno=True).fallocate(arena.descriptor, 3, ctypes.c_long(0), ctypes.c_long(PAGE)) == -1
    arena.block(0, 1)[0] = 1  # the loader itself still can


def test_a_view_can_not_be_written_to_nor_made_writable(arena: Arena) -> None:
    view = mapping_of(arena).block(0, 8, lambda: None)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    address, protect = ctypes.c_void_p(view.ctypes.data), ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(address, ctypes.c_size_t(PAGE), mmap.PROT_READ | mmap.PROT_WRITE) == -1


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 3 * PAGE + 1), (3 * PAGE, 1), (1 << 62, 1 << 62), (5, -6)])
def test_what_lies_outside_is_refused(arena: Arena, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"of a ring of {3 * PAGE}"):
        mapping_of(arena).block(offset, size, lambda: None)


def test_a_size_that_the_memory_does_not_have_is_refused(arena: Arena) -> None:
    with pytest.raises(ValueError, match="greater than file size"):
        Mapping(os.dup(arena.descriptor), arena.size + PAGE)


@pytest.mark.parametrize("size", [1 << 44, (1 << 63) - 1])
def test_more_memory_than_there_is_is_not_even_tried(size: int) -> None:
    with pytest.raises(
        LoaderError, match=rf"a ring of {-(-size // PAGE) * PAGE} bytes can not .*; \d+ bytes .* are av"
    ):
        Arena(size)


def test_a_container_may_have_less_than_the_machine(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = f"{tmp_path}/max", f"{tmp_path}/some", f"{tmp_path}/none"
    for path, text in zip(limits, ("max\n", f"{10 * PAGE}\n"), strict=False):
        with open(path, "w") as file:
            file.write(text)
    monkeypatch.setattr(arena_module, "MEMORY_LIMITS", limits)
    Arena(10 * PAGE).close()
    with pytest.raises(
        LoaderError, match=f"a ring of {11 * PAGE} bytes can not .*; {10 * PAGE} bytes of memory are av"
    ):
        Arena(11 * PAGE)


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_NOFILE"])
def test_whatever_the_system_refuses_is_the_loaders_error(limit: str) -> None:
    code = (
        "import os, resource, signal, sys\nfrom seqmesh.loader.arena import Arena\n"
        "from seqmesh.loader.errors import LoaderError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.{limit}, ({0 if limit == 'RLIMIT_NOFILE' else 1 << 20},) * 2)\n"
        "try:\n    Arena(64 << 20)\nexcept LoaderError as error:\n    print(error)\n"
    )
    assert hasattr(resource, limit)
    if limit == "RLIMIT_NOFILE":  # /proc/meminfo must be found first
        code = code.replace("try:", "import seqmesh.loader.arena as a; a._available_bytes = lambda: 1 << 40\ntry:")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"a ring of {64 << 20} bytes can not be reserved" in done.stdout, done.stderr


# Who looks at it.


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_released_is_called_once_when_the_last_view_is_gone(arena: Arena) -> None:
    calls: list[int] = []
    arena.block(0, 64).view(np.int32)[:] = range(16)
    block = mapping_of(arena).block(0, 64, lambda: calls.append(1))
    ids = np.ndarray(16, np.int32, block, 0)
    del block
    tensor = torch.from_numpy(ids[4:])
    row = ids[2:][1:][::2]  # a view of a view
    del ids
    gc.collect()
    assert calls == []
    part = tensor[2:4].view(2, 1).T
    del tensor
    gc.collect()
    assert calls == []
    array = part.numpy()
    del part, row
    gc.collect()
    assert calls == []
    assert array.tolist() == [[6, 7]]
    del array
    gc.collect()
    assert calls == [1]


def test_released_is_called_in_whatever_thread_lets_go(arena: Arena) -> None:
    threads: list[int] = []
    held = [mapping_of(arena).block(0, 8, lambda: threads.append(threading.get_ident()))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_a_view_keeps_the_memory_when_all_else_is_gone() -> None:
    arena = Arena(PAGE)
    arena.block(0, 4)[:] = 5
    view = mapping_of(arena).block(0, 4, lambda: None)
    arena.close()
    del arena
    gc.collect()
    assert view.tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("size", [0, 5])
def test_a_frame_can_be_watched_too(size: int) -> None:
    calls: list[int] = []
    block = watched(memoryview(b"12345"), 0, size, lambda: calls.append(1))
    tensor = torch.from_numpy(block.copy()[:0]) if not size else torch.from_numpy(np.ndarray(size, np.int8, block, 0))
    del block
    assert calls == ([] if size else [1])
    assert len(tensor) == size
    del tensor
    assert calls == [1]


# The ring.


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(poison=True)
    ring.reserve(PAGE)
    yield ring
    ring.close()


def make(ring: Ring, key: object, size: int, *, awaited: tuple[int, ...] = (), urgent: bool = False) -> Slot | None:
    return ring.make(key, size, awaited=awaited, urgent=urgent)


def made(ring: Ring, key: object, size: int, *, awaited: tuple[int, ...] = (), urgent: bool = False) -> Slot:
    slot = make(ring, key, size, awaited=awaited, urgent=urgent)
    assert slot is not None
    slot.block.fill(1)
    return slot


def test_a_slot_is_used_again_when_every_peer_has_had_it(ring: Ring) -> None:
    slot = made(ring, "a", PAGE, awaited=(1, 2))
    ring.hand_out(slot, 0, "reader 0")
    ring.release(slot, "reader 0")
    assert ring.find("a") is slot
    ring.hand_out(slot, 1, "reader 1")
    ring.hand_out(slot, 2, "reader 2")
    ring.release(slot, "reader 2")
    ring.release(slot, "reader 2")  # an ack that comes twice
    assert make(ring, "b", 1, urgent=True) is None
    assert (slot.block == 1).all()
    ring.release(slot, "reader 1")
    assert ring.find("a") is None
    assert (slot.block == POISON).all()
    ring.release(slot, "reader 1")  # of a slot that is another's now
    assert made(ring, "b", PAGE).offset == slot.offset


def test_a_stale_release_does_not_touch_the_next_batch_of_that_key(ring: Ring) -> None:
    first = made(ring, "a", 64)
    ring.release(first, None)
    second = made(ring, "a", 64)
    ring.hand_out(second, 0, "reader")
    ring.release(first, None)
    assert ring.find("a") is second
    assert (second.block == 1).all()


def test_peers_that_left_are_awaited_no_longer_until_they_come_back(ring: Ring) -> None:
    held, waiting = made(ring, "a", LINE, awaited=(1,)), made(ring, "b", LINE, awaited=(1,))
    both = made(ring, "c", LINE, awaited=(1, 2))
    ring.hand_out(held, 0, "reader 0")
    ring.forget(1)
    assert ring.find("b") is None
    assert (waiting.block == POISON).all()
    assert ring.find("a") is held  # somebody looks at it
    assert both.awaited == {2}
    assert made(ring, "d", LINE, awaited=(1, 2)).awaited == {2}
    ring.expect(1)
    assert made(ring, "e", LINE, awaited=(1, 2)).awaited == {1, 2}


def test_what_nobody_looks_at_is_given_up_for_what_is_urgent_the_newest_first(ring: Ring) -> None:
    slots = [made(ring, number, PAGE // 4, awaited=(1,)) for number in range(4)]
    ring.hand_out(slots[3], 0, "reader")
    assert make(ring, 4, PAGE // 4) is None
    assert make(ring, 4, PAGE + 1, urgent=True) is None  # larger than the ring: nothing is given up for it
    assert [ring.find(n) for n in range(4)] == slots
    assert made(ring, 4, PAGE // 4, urgent=True).offset == slots[2].offset
    assert [ring.find(n) is not None for n in range(5)] == [True, True, False, True, True]
    assert (slots[3].block == 1).all()
    # All that is left together is too little: everything unseen goes, what is held stays.
    assert make(ring, 5, PAGE, urgent=True) is None
    assert (slots[3].block == 1).all()
    assert ring.find(3) is slots[3]


@given(st.data())
def test_nothing_that_is_held_is_ever_overwritten(data: st.DataObject) -> None:
    """Readers of three peers that take, hold and release slots as they please; every slot is filled with its number."""
    ring, held = Ring(poison=True), dict[tuple[int, int], Slot]()
    ring.reserve(PAGE)
    for key in range(data.draw(st.integers(1, 30))):
        size = data.draw(st.integers(1, PAGE // 2))
        slot = make(ring, key, size, awaited=(1, 2), urgent=data.draw(st.booleans()))
        if slot:
            slot.block.fill(key + 1)
            ring.hand_out(slot, 0, (0, key))
            held[0, key] = slot
        peer, other = data.draw(st.integers(1, 2)), data.draw(st.integers(0, key))
        if (found := ring.find(other)) and data.draw(st.booleans()):
            ring.hand_out(found, peer, (peer, other))
            held[peer, other] = found
        for reader in data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []:
            ring.release(held.pop(reader), reader)
        assert all((each.block == number + 1).all() for (_, number), each in held.items())
    for reader, each in held.items():
        ring.release(each, reader)
    for peer in (1, 2):
        ring.forget(peer)
    assert ring._slots == {}
    assert ring._arena is not None
    assert ring._arena._extents._ends == [PAGE]
    ring.close()


def test_a_larger_ring_leaves_old_slots_where_they_are_until_they_are_released(ring: Ring) -> None:
    old, older = made(ring, "a", LINE, awaited=(1,)), made(ring, "b", LINE)
    name = old.arena.name
    for slot in (old, older):
        ring.hand_out(slot, 0, "reader")
    ring.reserve(4 * PAGE)
    ring.reserve(2 * PAGE)  # less than there is
    new = made(ring, "c", 4 * PAGE)
    assert (new.arena.size, new.arena.name == name) == (4 * PAGE, False)
    assert ring.descriptor(name) == (old.arena.descriptor, PAGE)
    assert ring.descriptor("another") is None
    ring.release(older, "reader")
    assert (old.block == 1).all()
    assert ring.descriptor(name) is not None
    ring.hand_out(old, 1, "other")
    ring.release(old, "reader")
    ring.release(old, "other")
    assert ring.descriptor(name) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(old.arena.descriptor)
    assert ring.descriptor(new.arena.name) == (new.arena.descriptor, 4 * PAGE)


def test_a_ring_that_can_not_grow_stays_what_it_was(ring: Ring) -> None:
    slot = made(ring, "a", LINE)
    with pytest.raises(LoaderError, match="can not be reserved"):
        ring.reserve(1 << 60)
    assert ring.find("a") is slot
    assert made(ring, "b", LINE).arena is slot.arena


def test_no_descriptor_is_left() -> None:
    def grow_and_close() -> None:
        ring = Ring()
        for size in (PAGE, 2 * PAGE, 3 * PAGE):
            ring.reserve(size)
            slot = made(ring, size, PAGE // 2, awaited=(1,))
            ring.hand_out(slot, 0, "reader")
            view = mapping_of(slot.arena).block(slot.offset, slot.size, lambda: None)
            assert (view == 1).all()
        for size in (PAGE, 2 * PAGE):
            slot = ring._slots[size]
            ring.hand_out(slot, 1, "reader")
            ring.release(slot, "reader")
        with pytest.raises(LoaderError):
            ring.reserve(1 << 60)
        ring.close()

    grow_and_close()
    gc.collect()
    before = open_descriptors()
    for _ in range(20):
        grow_and_close()
    gc.collect()
    assert open_descriptors() == before
