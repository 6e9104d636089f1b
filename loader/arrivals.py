"""`Arrivals`: the open parts of a set that can not be read in its place. A `Store` fetches or decodes them, ahead of
their use where it is known what comes; they are let go of when they are not expected to be needed any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from seqmesh.loader.catalog import Chunk
from seqmesh.loader.errors import LoaderError, ShardError
from seqmesh.loader.formats.detect import OpenSet
from seqmesh.loader.storage.cache import Cache
from seqmesh.loader.storage.store import Keep, Store

WAIT_SECONDS = 120.0  # for a part that is needed now; fetching gives up earlier where nothing comes


class Arrivals:
    """chunks: of each open part, by its number. changes: how often these have changed. forecast: the parts that will be
    needed, the first most urgently; asked when something is missing."""

    def __init__(self, opened: OpenSet, cache: Cache) -> None:
        """Raises ValueError for parts that the cache is too small for."""
        for part in opened.catalog.parts:
            if part.kept > cache.limit:
                name = opened.catalog.name_of(part)
                raise ValueError(f"cache_bytes is {cache.limit}: the copy of {name} takes {part.kept}; raise it")
        keeps = [
            Keep(name=opened.name(number), size=part.kept, make=partial(opened.bring, number))
            for number, part in enumerate(opened.catalog.parts)
        ]
        self.store = Store(cache.folder, cache.limit, keeps)
        self.chunks: dict[int, list[Chunk]] = {}
        self.changes = 0
        self.forecast: Callable[[], Sequence[int]] = lambda: ()
        self._opened = opened

    def ready(self, numbers: Sequence[int]) -> bool:
        """Whether these are open, or can be opened at once. If not, they are asked for. Raises what `open` raises."""
        if not (closed := self._closed(numbers)):
            return True
        for number in closed:
            if failure := self.store.failure(number):
                raise _typed(failure)
        self._open([number for number in closed if self.store.path(number) is not None])
        if missing := self._closed(numbers):
            self.expect(self.forecast(), now=numbers)
        return not missing

    def open(self, numbers: Sequence[int]) -> None:
        """Wait for these. Raises RemoteError, StoreError or ShardError for one that can not be had, LoaderTimeoutError
        for one that takes too long."""
        if closed := self._closed(numbers):
            self.expect(self.forecast(), now=numbers)
            try:
                self.store.wait(closed, WAIT_SECONDS)
            except Exception as error:
                raise _typed(error) from error
            self._open(closed)

    def expect(self, ahead: Sequence[int], now: Sequence[int] = ()) -> None:
        """Parts that are needed now, and will be, in this order: they are fetched in the background, and all others are
        let go of."""
        wanted = list(dict.fromkeys((*now, *ahead)))
        self.store.want(wanted)
        for number in self.chunks.keys() - set(wanted):
            del self.chunks[number]
            self.store.let_go(number)
            self.changes += 1

    def close(self) -> None:
        self.store.close()

    def _closed(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if number not in self.chunks]

    def _open(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            path = self.store.path(number)
            if path is None:
                raise LoaderError(f"part {number} was let go of while it was awaited: a store has one user at a time")
            self.chunks[number] = self._opened.chunks(number, path, 0)
            self.changes += 1


def _typed(error: Exception) -> LoaderError:
    return error if isinstance(error, LoaderError) else ShardError(str(error))
