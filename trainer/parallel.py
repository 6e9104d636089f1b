"""The ranks of a job: one standing process group, made once at start, and what crosses it.

Every collective is called by every rank in the same order. Nothing here is global: `Ranks` is passed to who needs it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch forgets to export them
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from seqmesh.loader.exchange import exchange_texts
from seqmesh.trainer.beats import Beats, Watch


class RankError(RuntimeError):
    """Another rank is gone, has stopped, or does not do the same work."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place: `rank` of `count`. With one rank there is no group and nothing is sent.

    group: theirs; None for that of all processes. timeout: seconds that an exchange may take before it raises. watch:
    what this rank's main thread lets the others know, and how long it waits for them. beats: the thread that does; None
    with one rank.
    """

    rank: int
    count: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    timeout: float | None = None
    watch: Watch = field(default_factory=Watch)
    beats: Beats | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, values: Tensor) -> None:
        """Replace `values` by their sum over all ranks; the result has the same bits on every rank."""
        if self.count > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM, group=self.group)

    def sum_shards(self, mine: Tensor, shards: Sequence[Tensor]) -> None:
        """Put into `mine` the sum over all ranks of shard number `rank`. Shards may differ in size, and be empty."""
        if self.count == 1:
            mine.copy_(shards[0])
        else:
            dist.reduce_scatter(mine, list(shards), dist.ReduceOp.SUM, group=self.group)

    def share_shards_(self, shards: Sequence[Tensor]) -> None:
        """Replace every shard by that of the rank of its number: all have all. Shards may differ in size."""
        if self.count == 1:
            return
        if dist.get_backend() == "nccl":
            dist.all_gather(list(shards), shards[self.rank], group=self.group)
            return
        # gloo gathers equal sizes alone.
        sent = [
            dist.broadcast(shard, group=self.group, group_src=rank, async_op=True)
            for rank, shard in enumerate(shards)
            if shard.numel()
        ]
        for work in sent:
            assert work is not None
            work.wait()

    def from_first(self, number: int) -> int:
        """The first rank's number, on every rank."""
        if self.count == 1:
            return number
        box = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.broadcast(box, group=self.group, group_src=0)
        return int(box.item())

    def texts(self, text: str) -> list[str]:
        """Every rank's text, on every rank, each cut at 1,024 bytes."""
        return exchange_texts(text, self.device) if self.count > 1 else [text]

    def share_(self, values: Tensor, source: int) -> None:
        """Replace `values` by those of rank `source`."""
        if self.count > 1:
            there = values.to(self.device).contiguous()  # the group may carry one kind of memory only
            dist.broadcast(there, group=self.group, group_src=source)
            if there is not values:
                values.copy_(there)

    def agree(self, text: str, what: str) -> None:
        """Raises RankError on every rank, naming two ranks and their texts (each cut at 1,024 bytes), unless all have
        the same. Those that agree exchange 64 bytes, however many they are."""
        if self._all_have(text):
            return
        texts = self.texts(text)
        rank = next((rank for rank, other in enumerate(texts) if other != texts[0]), self.count - 1)
        raise RankError(f"{what} differs: rank 0 has {texts[0] or 'none'}, rank {rank} has {texts[rank] or 'none'}")

    def _all_have(self, text: str) -> bool:
        """Whether the greatest digest is the smallest: of its parts, and of what they lack to zero."""
        digest = xxhash.xxh3_128_intdigest(text.encode())
        parts = [digest >> shift & 0xFFFFFFFF for shift in range(0, 128, 32)]
        values = torch.tensor([*parts, *(-part for part in parts)], dtype=torch.int64, device=self.device)
        if self.count > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return bool((values[:4] == -values[4:]).all())

    def wait_for_all(self) -> None:
        if self.count > 1:
            dist.barrier(group=self.group)

    @contextmanager
    def naming_the_lost(self, what: str) -> Iterator[None]:
        """Turn a failed exchange inside the block into a RankError that says which ranks have stopped."""
        try:
            yield
        except RuntimeError as error:
            if self.beats is None or not _is_exchange_failure(error):
                raise
            raise RankError(f"{what}: {self.beats.who_is_lost()} ({_first_line(error)})") from error


@contextmanager
def join_ranks(timeout: float) -> Iterator[Ranks]:
    """Join the group that torchrun's environment describes; without it, be the only rank.

    timeout: seconds that any collective may take before it raises.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():  # not yet run on a GPU
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if count == 1:
        yield Ranks(0, 1, device)
        return
    on_gpu = device.type == "cuda"
    # gloo then asks for the addresses of all others at once, not of one after the other.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=timeout),
        device_id=device if on_gpu else None,  # connects at once: the first exchange may be between two ranks only
    )
    try:
        rank, watch = dist.get_rank(), Watch()
        beats = Beats(_connect("beats", timeout), rank, count, watch)
        with beats.running():
            yield Ranks(rank, count, device, timeout=timeout, watch=watch, beats=beats)
    finally:
        dist.destroy_process_group()


def open_store(ranks: Ranks, name: str, timeout: float) -> Store:
    """A store that all ranks share under `name`; of this process alone where it is the only rank. timeout: seconds that
    its waits may take. It may be used beside the process group, also from a thread."""
    return HashStore() if ranks.count == 1 else _connect(name, timeout)


def _connect(name: str, timeout: float) -> Store:
    """A connection of its own: the process group's may be held by a wait that lasts."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
    return PrefixStore(f"seqmesh/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _is_exchange_failure(error: RuntimeError) -> bool:
    """Whether an exchange failed: torch.distributed says so with plain RuntimeErrors of its libraries' words."""
    words = ("gloo", "nccl", "timed out", "connection", "peer")
    plain = type(error) is RuntimeError and any(word in str(error).lower() for word in words)
    return plain or isinstance(error, dist.DistError)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


def end_with_parent() -> None:
    """Kill this process as soon as the one that started it is gone.

    torchrun starts ranks in sessions of their own: killed with SIGKILL, it leaves them training, and a second start of
    the same job would run beside them.
    """
    parent = os.pidfd_open(os.getppid())

    def watch() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
