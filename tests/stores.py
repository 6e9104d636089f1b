"""A store that counts what is asked of it, to be put between torch and the one that all ranks share."""

import sys
from collections import Counter
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch forgets to export it

from seqmesh.trainer import parallel

Calls = Counter[str]  # "set report": how often


class Counting(Store):
    """Passes everything on. calls: by kind and key, after the prefix. torch's own code can call all of it but
    `delete_key`."""

    def __init__(self, inner: Store, calls: Calls | None = None, prefix: str = "") -> None:
        super().__init__()
        self._inner, self._prefix = inner, prefix
        self.calls: Calls = Counter() if calls is None else calls

    def _count(self, kind: str, key: str) -> None:
        self.calls[f"{kind} {self._prefix}{key}"] += 1

    def set(self, key: str, value: Any) -> None:
        self._count("set", key)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._count("get", key)
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        self._count("add", key)
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys[0])
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._count("wait", keys[0])
        self._inner.wait(keys) if timeout is None else self._inner.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get", keys[0])
        return self._inner.multi_get(keys)

    def delete_key(self, key: str) -> bool:
        self._count("delete_key", key)
        return self._inner.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return True


CALLS: Calls = Counter()  # of this process, from `count_calls` on
_kept: list[Counting] = []  # torch would call what Python has let go of


def count_calls() -> None:
    """Count in `CALLS` what this process asks of the stores that it connects to from here on: torch for its groups, and
    the trainer."""

    def connect(*arguments: Any, **options: Any) -> Counting:
        _kept.append(Counting(dist.TCPStore(*arguments, **options), CALLS))  # type: ignore[attr-defined]  # not exported
        return _kept[-1]

    def prefixed(prefix: str, store: Store) -> Counting:
        return Counting(dist.PrefixStore(prefix, store), CALLS, f"{prefix}/")  # type: ignore[attr-defined]  # not exported

    sys.modules["torch.distributed.rendezvous"].TCPStore = connect  # type: ignore[attr-defined]  # the module of a function
    parallel.PrefixStore = prefixed  # type: ignore[assignment, attr-defined]  # it only calls it


def asked() -> Calls:
    """`CALLS` by kind, but for signs of life, of which there are the more the longer it takes."""
    kinds: Calls = Counter()
    for call, count in CALLS.items():
        kind, key = call.split(" ", 1)
        if "/beats/" not in key:
            kinds[kind] += count
    return kinds
