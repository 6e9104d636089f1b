"""A lane that copies as late as it may, and what live tensors take: for tests of what copies run beside."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqmesh.trainer.host import Host, HostPool


class LateLane:
    """Copies only when something waits for it, like a device that is busy. It keeps nothing alive: a source that was
    freed before it was copied gives NaN, as memory that was given away gives anything."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] = []
        self._done = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        to, from_ = _remember(target), _remember(source)

        def late() -> None:
            written, read = to(), from_()
            assert written is not None, "a copy was under way into memory that was given away"
            written.copy_(torch.full_like(written, torch.nan) if read is None else read)

        self._queue.append(late)

    def mark(self) -> tuple["LateLane", int]:
        return self, len(self._queue)

    def wait(self, mark: tuple["LateLane", int]) -> None:
        lane, count = mark
        lane.run(count)

    def follow(self, mark: tuple["LateLane", int]) -> None:
        self._queue.append(lambda: self.wait(mark))

    def run(self, count: int) -> None:
        while self._done < count:
            self._done += 1
            self._queue[self._done - 1]()


class NeverWaiting(LateLane):
    """What goes wrong where nobody waits."""

    def wait(self, mark: tuple[LateLane, int]) -> None:
        pass


def late_host(lane: type[LateLane] = LateLane) -> Host:
    return Host(HostPool(pinned=False), lane(), lane())


def _remember(tensor: Tensor) -> Callable[[], Tensor | None]:
    storage = weakref.ref(tensor.untyped_storage())
    form = tensor.storage_offset(), tensor.shape, tensor.stride()
    empty = tensor.new_empty(0)

    def again() -> Tensor | None:
        alive = storage()
        return None if alive is None else empty.set_(alive, *form)

    return again


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not typed
    """Counts the memory of tensors that are made inside of the block and still live. peak: the most at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is not typed
        self.now = 0
        self.peak = 0
        self._seen = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type != "meta" and each.untyped_storage()._cdata not in given:
                self._watch(each.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        weakref.finalize(storage, self._forget, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
