"""Words between the ranks while a checkpoint is written, through the store that the job has anyway.

Threads of all ranks write at the same time as the steps' own exchanges run: a collective of theirs would need a process
group of its own. What they have to say is short: done, or what went wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch forgets to export it

from seqmesh.trainer.parallel import Ranks

LOOK = 0.5  # seconds between looks whether anybody still wants the answer
DONE = "done"


class AbandonedError(Exception):
    """Nobody wants the answer any more."""


class Board:
    """One rank's view of the store. `number` tells saves apart; every rank counts them alike."""

    def __init__(self, store: Store, ranks: Ranks, timeout: float) -> None:
        self._store = store
        self._ranks = ranks
        self._timeout = timeout
        self._abandoned = threading.Event()

    def post(self, number: int, text: str) -> None:
        """Say that this rank's part is done."""
        self._store.set(f"{number}/{self._ranks.rank}", text)

    def parts(self, number: int) -> list[str]:
        """What every rank has posted. Raises TimeoutError naming the ranks that did not, AbandonedError."""
        keys = [f"{number}/{rank}" for rank in range(self._ranks.count)]
        self._wait(keys, self._timeout)
        texts = [text.decode() for text in self._store.multi_get(keys)]
        for key in keys:
            self._store.delete_key(key)
        return texts

    def announce(self, number: int, text: str) -> None:
        """The first rank's answer to all."""
        self._store.set(f"{number}/{DONE}", text)
        self._store.delete_key(f"{number - 1}/{DONE}")  # who has posted its part since has read it

    def outcome(self, number: int) -> str:
        """What the first rank announced. Raises TimeoutError, AbandonedError."""
        key = f"{number}/{DONE}"
        self._wait([key], 2 * self._timeout)  # the first rank may have waited before it could say
        return self._store.get(key).decode()

    def abandon(self) -> None:
        """Make what waits, or will, raise AbandonedError soon."""
        self._abandoned.set()

    def _wait(self, keys: Sequence[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self._store.wait(list(keys), timedelta(seconds=min(LOOK, seconds)))
                return
            except dist.DistStoreError:
                if self._abandoned.is_set():
                    raise AbandonedError from None
        late = [key.partition("/")[2] for key in keys if not self._store.check([key])]
        whose = "the first rank" if late == [DONE] else f"rank{'s' * (len(late) > 1)} {', '.join(late)}"
        raise TimeoutError(f"no word from {whose} within {seconds:g} s")
