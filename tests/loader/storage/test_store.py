"""Local copies within a limit: who makes them, who keeps them, what goes, and what happens where there is no room."""

import contextlib
import errno
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from seqmesh.loader.errors import LoaderError, LoaderTimeoutError, RemoteError, StoreError
from seqmesh.loader.storage.copies import FOLDER, Copies
from seqmesh.loader.storage.location import Location
from seqmesh.loader.storage.store import Keep, Store
from tests.support import killed_after

SECONDS = 20.0
SIZE = 100

# Makes parts 0, 1, ... slowly, as its arguments say: folder, limit, number of parts, seconds for each. Prints what it
# begins to make, and at the end "done"; then keeps what it has until its input ends.
WORKER = """
import sys, time
from pathlib import Path
from seqmesh.loader.storage.store import Keep, Store

folder, limit, parts, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])

def maker(number):
    def make(path):
        print("make", number, flush=True)
        with path.open("wb") as file:
            for _ in range(100):
                file.write(bytes([number]))
                file.flush()
                time.sleep(seconds / 100)
    return make

store = Store(folder, limit, [Keep(name=f"p{n}", size=100, make=maker(n)) for n in range(parts)], threads=2)
for number in range(parts):
    store.wait([number], timeout=20)
    assert store.path(number).read_bytes() == bytes([number]) * 100
    if number < parts - 1:
        store.let_go(number)
print("done", flush=True)
sys.stdin.read()
"""


class Parts:
    """Parts of 100 bytes each that say how often they were made. `gate` is open unless a test closes it."""

    def __init__(self, count: int, size: int = SIZE) -> None:
        self.made = list[int]()
        self.gate, self.begun = threading.Event(), threading.Semaphore(0)
        self.failing: dict[int, Exception] = {}
        self.gate.set()
        self.keeps = [Keep(name=f"p{n}", size=size, make=self._maker(n)) for n in range(count)]

    def _maker(self, number: int) -> Callable[[Path], None]:
        def make(path: Path) -> None:
            self.made.append(number)
            self.begun.release()
            assert self.gate.wait(SECONDS)
            path.write_bytes(bytes([number]) * (SIZE // 2))
            if number in self.failing:
                raise self.failing[number]
            path.write_bytes(bytes([number]) * SIZE)

        return make


@contextlib.contextmanager
def opened(folder: Path, parts: Parts, limit: int, **options: Any) -> Iterator[Store]:
    store = Store(folder, limit, parts.keeps, **options)
    try:
        yield store
    finally:
        parts.gate.set()
        store.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "has not happened in time"
        time.sleep(0.005)


def here(folder: Path) -> set[str]:
    """Names of the whole copies."""
    names = os.listdir(folder / FOLDER)
    return {name for name in names if not name.startswith(".") and not name.endswith((".lock", ".tmp"))}


def litter(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder / FOLDER) if name.endswith(".tmp")]


def age(folder: Path, names: Sequence[str]) -> None:
    """Let copies be old, the first the oldest."""
    for seconds, name in enumerate(names):
        os.utime(folder / FOLDER / name, (1000 + seconds, 1000 + seconds))


def test_copies_come_in_the_order_that_is_wanted(tmp_path: Path) -> None:
    parts = Parts(6)
    with opened(tmp_path, parts, 1000, threads=1) as store:
        parts.gate.clear()
        store.want([3, 1, 4])
        assert parts.begun.acquire(timeout=SECONDS)
        assert store.path(3) is None
        store.want([5, 1])  # 3 is begun, and made to its end
        parts.gate.set()
        store.wait([5, 1], SECONDS)
        assert parts.made == [3, 5, 1]
        path = store.path(5)
        assert path is not None
        assert path.read_bytes() == bytes([5]) * SIZE
        assert store.path(3) is not None  # nobody removed it
        assert store.path(4) is None
        found = store.counters
    assert (found.fetched, found.fetched_bytes, found.hits, found.failures) == (3, 300, 1, 0)
    assert here(tmp_path) == {"p1", "p3", "p5"}


def test_the_descriptor_tells_what_came_and_what_failed(tmp_path: Path) -> None:
    parts = Parts(3)
    parts.failing[1] = RemoteError("the storage burns")
    with opened(tmp_path, parts, 1000, pause=1.5) as store:
        poll = select.poll()
        poll.register(store.descriptor, select.POLLIN)
        assert not poll.poll(0)
        store.want([0])
        assert poll.poll(SECONDS * 1000)
        assert store.path(0) is not None
        store.drain()
        store.drain()
        assert not poll.poll(0)
        store.want([1])
        assert poll.poll(SECONDS * 1000)
        assert store.path(1) is None
        assert store.failure(1) is parts.failing[1]
        assert store.failure(0) is None
        store.want([1, 2])  # remembered for a while, and no hindrance
        store.wait([2], SECONDS)
        assert parts.made.count(1) == 1
        with pytest.raises(RemoteError, match="the storage burns"):
            store.wait([1], SECONDS)
        del parts.failing[1]
        until(lambda: store.failure(1) is None)  # forgotten
        store.wait([1], SECONDS)
        assert store.failure(1) is None
        assert store.counters.failures == 1
    assert not litter(tmp_path)


def test_copies_outlive_the_store(tmp_path: Path) -> None:
    for expected in ([0, 1], []):
        parts = Parts(2)
        with opened(tmp_path, parts, 1000) as store:
            store.wait([0, 1], SECONDS)
            assert sorted(parts.made) == expected
            assert store.counters.hits == 2 - len(expected)


def test_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    parts = Parts(6)
    with opened(tmp_path, parts, 3 * SIZE + 50) as store:
        for number in range(3):
            store.wait([number], SECONDS)
            store.let_go(number)
        assert store.path(0) is not None  # used again
        store.let_go(0)
        for number, expected in ((3, {"p0", "p2", "p3"}), (4, {"p0", "p3", "p4"})):
            store.wait([number], SECONDS)
            store.let_go(number)
            assert here(tmp_path) == expected
        assert store.counters.evicted == 2


def test_what_is_held_stays_and_reading_ahead_waits_for_room(tmp_path: Path) -> None:
    parts = Parts(6)
    with opened(tmp_path, parts, 3 * SIZE, deadline=0.3) as store:
        store.want([0, 1, 2, 3, 4])
        until(lambda: here(tmp_path) == {"p0", "p1", "p2"})
        assert store.path(0) is not None
        age(tmp_path, ["p0", "p1", "p2"])
        time.sleep(0.6)  # longer than the deadline: nobody needs the others
        assert here(tmp_path) == {"p0", "p1", "p2"}
        assert store.failure(3) is None
        store.let_go(0)
        until(lambda: here(tmp_path) == {"p1", "p2", "p3"})
        store.want([5, 1])  # 2 and 3 are not wanted any more
        until(lambda: "p5" in here(tmp_path))
        assert here(tmp_path) >= {"p1", "p5"}
        assert store.counters.failures == 0


def test_what_is_needed_sooner_goes_before_what_is_needed_later(tmp_path: Path) -> None:
    parts = Parts(6)
    with opened(tmp_path, parts, 2 * SIZE) as store:
        store.wait([0, 1], SECONDS)
        store.want([5, 0, 1, 2])  # 5 has no room, unless 1 is given up, though it is here
        until(lambda: here(tmp_path) == {"p0", "p5"})
        store.let_go(5)
        until(lambda: here(tmp_path) == {"p0", "p1"})
        assert sorted(parts.made) == [0, 1, 1, 5]


def test_no_room_is_an_error_for_who_waits(tmp_path: Path) -> None:
    parts = Parts(4)
    with opened(tmp_path, parts, 2 * SIZE, deadline=0.3, pause=0.3) as store:
        store.wait([0, 1], SECONDS)
        assert store.path(0) and store.path(1)
        expected = (
            r"seqmesh-copies has no room for p2, which takes 100 bytes: the limit is 200, 200 are taken, 200 of them "
            r"by 2 copies that this process uses; raise the limit"
        )
        began = time.monotonic()
        with pytest.raises(StoreError, match=expected):
            store.wait([2], SECONDS)
        with pytest.raises(StoreError, match="no room for p"):
            store.wait([1, 2, 3], SECONDS)
        assert time.monotonic() - began < 5
        store.want([3])
        until(lambda: store.path(3) is None and store.failure(3) is not None)  # needed, but none came at the deadline
        assert here(tmp_path) == {"p0", "p1"}
        store.let_go(1)
        until(lambda: store.failure(2) is None)
        store.wait([2], SECONDS)  # goes on once there is room


def test_two_stores_of_a_folder_keep_one_account(tmp_path: Path) -> None:
    ours, theirs = Parts(6), Parts(6)
    with opened(tmp_path, ours, 3 * SIZE) as one, opened(tmp_path, theirs, 3 * SIZE, deadline=0.3) as other:
        one.wait([0, 1], SECONDS)
        assert one.path(0) and one.path(1)
        other.wait([2], SECONDS)
        assert other.path(2)
        with pytest.raises(StoreError, match="300 are taken, 100 of them by 1 copies that this process uses"):
            other.wait([3], SECONDS)
        one.let_go(0)
        assert other.path(1)  # both use it
        one.let_go(1)
        other.wait([4], SECONDS)
        assert here(tmp_path) == {"p1", "p2", "p4"}
        assert theirs.made == [2, 4]


def test_parts_that_can_not_be_kept_are_refused(tmp_path: Path) -> None:
    make = Parts(1).keeps[0].make
    with pytest.raises(
        ValueError, match="big takes 101 bytes: the limit of local copies is 100 bytes; raise the limit"
    ):
        Store(tmp_path, 100, [Keep(name="big", size=101, make=make)])
    for name in ("", ".x", "a/b", "a.tmp", "a.lock", "x" * 300):
        with pytest.raises(ValueError, match="can not be the name of a copy"):
            Store(tmp_path, 100, [Keep(name=name, size=1, make=make)])
    with pytest.raises(ValueError, match="threads is 0"):
        Store(tmp_path, 100, [], threads=0)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_and_parts_that_are_larger_than_announced(tmp_path: Path) -> None:
    parts = Parts(3, size=SIZE - 1)
    parts.failing = {1: OSError(errno.ENOSPC, "No space left on device"), 2: OSError(errno.EIO, "Input/output error")}
    with opened(tmp_path, parts, 1000) as store:
        with pytest.raises(StoreError, match="p0 takes 100 bytes: at most 99 were announced"):
            store.wait([0], SECONDS)
        with pytest.raises(
            StoreError, match=r"the disk is full: p1 takes 99 bytes; make room there, or lower the limit"
        ):
            store.wait([1], SECONDS)
        with pytest.raises(OSError, match="Input/output error"):
            store.wait([2], SECONDS)
    assert not here(tmp_path)
    assert not litter(tmp_path)


def test_waiting_ends_at_its_timeout(tmp_path: Path) -> None:
    parts = Parts(2)
    with opened(tmp_path, parts, 1000) as store:
        parts.gate.clear()
        with pytest.raises(LoaderTimeoutError, match=r"p1: not here after 0.1 s"):
            store.wait([1], 0.1)
        with pytest.raises(IndexError, match="part 2 is wanted: there are 2"):
            store.want([2])
        assert 0.1 <= store.counters.waited_seconds < SECONDS


def test_a_closed_store_lets_go_of_everything(tmp_path: Path) -> None:
    parts = Parts(3)
    with opened(tmp_path, parts, 1000, threads=1) as store:
        store.wait([0], SECONDS)
        parts.gate.clear()
        store.want([1, 2])
        assert parts.begun.acquire(timeout=SECONDS) and parts.begun.acquire(timeout=SECONDS)
        store.close()
        with pytest.raises(LoaderError, match="is closed"):
            store.path(0)
        parts.gate.set()
        until(lambda: not litter(tmp_path))
        assert parts.made == [0, 1]
        copies = Copies(tmp_path, SIZE, SECONDS)
        with copies.making("x"):
            until(lambda: copies.reserve("x", SIZE) is not None)  # all others could be removed


def test_only_the_process_that_opened_a_store_uses_it(tmp_path: Path) -> None:
    """A fork has the same locks, without knowing it: they must end where the owner lets go, and only there."""
    code = """
import os, sys
from pathlib import Path
from seqmesh.loader.storage.copies import Copies
from seqmesh.loader.storage.store import Keep, Store

folder = Path(sys.argv[1])
store = Store(folder, 100, [Keep(name="p0", size=100, make=lambda path: path.write_bytes(b"x" * 100))])
store.wait([0], 20)
store.path(0)
begin, end = os.pipe(), os.pipe()
if not (child := os.fork()):
    try:
        store.want([])
    except RuntimeError as error:
        assert "in another process" in str(error)
        store.let_go(0)
        store.close()
        os.write(begin[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    os._exit(1)
assert os.read(begin[0], 1) == b"x"
copies = Copies(folder, 100, 20)
with copies.making("p1"):
    assert copies.reserve("p1", 100) is None  # still held
    store.let_go(0)
    assert copies.reserve("p1", 100) is not None
os.write(end[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60).returncode == 0


def test_a_folder_that_somebody_empties(tmp_path: Path) -> None:
    parts = Parts(1)
    with opened(tmp_path, parts, SIZE) as store:
        store.wait([0], SECONDS)
        (tmp_path / FOLDER / "p0").unlink()
        assert store.path(0) is None
        store.wait([0], SECONDS)
        assert store.path(0) is not None
        assert parts.made == [0, 0]


def test_parts_at_a_location(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    place = Location("memory://parts")
    for number in range(4):
        memory.pipe_file(f"/parts/{number}", bytes([number]) * SIZE)
    keeps = [Keep(name=f"k{n}", size=SIZE, make=partial(place.fetch, str(n), whole=SIZE)) for n in range(5)]
    with contextlib.closing(Store(tmp_path, 2 * SIZE, keeps)) as store:
        for number in range(4):
            store.wait([number], SECONDS)
            path = store.path(number)
            assert path is not None
            assert path.read_bytes() == bytes([number]) * SIZE
            store.let_go(number)
        with pytest.raises(FileNotFoundError, match="memory://parts/4: there is no such file"):
            store.wait([4], SECONDS)
        assert store.counters.evicted == 3  # the last, too, had its room
    memory.rm("/parts", recursive=True)


@contextlib.contextmanager
def worker(folder: Path, limit: int, parts: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER, *map(str, (folder, limit, parts, seconds))]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        killed_after(process),
    ):
        yield process


def lines_until_done(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return list(iter(process.stdout.readline, "done\n"))


def test_processes_that_want_the_same_make_it_once(tmp_path: Path) -> None:
    with worker(tmp_path, 1000, 6, 0.1) as one, worker(tmp_path, 1000, 6, 0.1) as other:
        said = lines_until_done(one) + lines_until_done(other)
    assert sorted(said) == [f"make {number}\n" for number in range(6)]
    assert here(tmp_path) == {f"p{number}" for number in range(6)}


def test_processes_stay_within_the_limit_together(tmp_path: Path) -> None:
    most, (one, other) = 0, (Copies(tmp_path, 0, SECONDS), Copies(tmp_path, 0, SECONDS))
    with worker(tmp_path, 3 * SIZE, 12, 0.05) as first, worker(tmp_path, 3 * SIZE, 12, 0.07) as second:
        done = threading.Thread(target=lambda: (lines_until_done(first), lines_until_done(second)), daemon=True)
        done.start()
        while done.is_alive():
            with contextlib.suppress(FileNotFoundError):  # something was removed meanwhile
                most = max(most, sum(path.stat().st_size for path in one.folder.rglob("p*") if path.is_file()))
            time.sleep(0.005)
        assert 2 * SIZE <= most <= 3 * SIZE
        assert "p11" in here(tmp_path)
        with other.making("x"):
            assert other.reserve("x", 1) is None  # for both hold the last
    with other.making("x"):
        assert Copies(tmp_path, SIZE, SECONDS).reserve("x", SIZE) is not None  # now that they are gone nobody does
    assert not here(tmp_path)


def test_a_kill_in_the_middle_leaves_nothing_that_counts(tmp_path: Path) -> None:
    with worker(tmp_path, SIZE, 1, 60) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "make 0\n"
        until(lambda: Copies(tmp_path, 1000, SECONDS).made("p0") > 3)
        assert litter(tmp_path) == ["p0.100.tmp"]
        assert Copies(tmp_path, 1000, SECONDS).taken() == SIZE  # reserved
    parts = Parts(1)
    with opened(tmp_path, parts, SIZE) as store:
        assert not litter(tmp_path)
        store.wait([0], SECONDS)
        path = store.path(0)
        assert path is not None
        assert path.read_bytes() == bytes([0]) * SIZE


def test_who_makes_a_part_and_gets_nowhere_is_not_waited_for_without_end(tmp_path: Path) -> None:
    parts = Parts(1)
    with worker(tmp_path, 1000, 1, 1.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "make 0\n"
        with opened(tmp_path, parts, 1000, deadline=0.5) as store:
            store.wait([0], SECONDS)  # it takes longer than the deadline, but goes on all the time
        assert not parts.made
    for path in (tmp_path / FOLDER).glob("p0"):
        path.unlink()
    with worker(tmp_path, 1000, 1, 600) as process, opened(tmp_path, parts, 1000, deadline=0.5) as store:
        assert process.stdout is not None
        assert process.stdout.readline() == "make 0\n"
        with pytest.raises(LoaderTimeoutError, match=r"p0: another process is making it .* got nowhere for 0.5 s"):
            store.wait([0], SECONDS)


def consume(store: Store, order: Sequence[int], ahead: int, pace: float) -> None:
    """Use parts in this order, one at a time, as a loader does that reads ahead."""
    for place, number in enumerate(order):
        store.want(order[place : place + ahead])
        while (path := store.path(number)) is None:
            if failure := store.failure(number):
                raise failure
            select.select([store.descriptor], [], [], 0.5)
            store.drain()
        assert path.read_bytes() == bytes([number]) * SIZE
        time.sleep(pace)
        store.let_go(number)


def test_who_reads_ahead_leaves_room_to_who_needs_it(tmp_path: Path) -> None:
    parts, other = Parts(4), Copies(tmp_path, SIZE, SECONDS)
    with opened(tmp_path, parts, SIZE) as store:
        claim = other.claim()
        store.want([0])
        time.sleep(0.3)
        assert not here(tmp_path)
        assert store.path(0) is None  # from here on it is needed here, too
        until(lambda: store.path(0) is not None)
        os.close(claim)
        assert not other.is_claimed()
        store.want([1])
        assert store.path(1) is None
        until(other.is_claimed)
        store.let_go(0)
        until(lambda: store.path(1) is not None)
        assert not other.is_claimed()


@pytest.mark.parametrize("threads", [1, 4])
def test_any_order_comes_to_its_end(tmp_path: Path, threads: int) -> None:
    generator = random.Random(threads)
    order = [[generator.randrange(9) for _ in range(60)] for _ in range(2)]
    parts, failed = [Parts(9), Parts(9)], list[BaseException]()
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(opened(tmp_path, some, 3 * SIZE, threads=threads)) for some in parts]

        def run(which: int) -> None:
            try:
                consume(stores[which], order[which], 1 + 3 * which, 0.002)
            except BaseException as error:
                failed.append(error)

        users = [threading.Thread(target=run, args=(which,)) for which in range(2)]
        for user in users:
            user.start()
        for user in users:
            user.join(2 * SECONDS)
            assert not user.is_alive()
        assert not failed
        assert len(here(tmp_path)) <= 3
        assert Copies(tmp_path, 0, SECONDS).taken() <= 3 * SIZE
