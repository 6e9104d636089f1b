"""After `warmup()` no public routine compiles anything: looked at in a process that has compiled nothing else."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any, get_args

import numpy as np
from numba.core.dispatcher import Dispatcher

import seqmesh.packer
from seqmesh.packer import CostModel, Mesh, pack, partition, permutation, plan_rows, plan_step, warmup
from seqmesh.packer.balance import METHODS as BALANCERS
from seqmesh.packer.bins import METHODS, WHOLE
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.online import OnlinePacker, packs
from seqmesh.packer.plan import Mode

CAPACITY = 1000


def test_after_warmup_nothing_is_compiled() -> None:
    result = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_it_says_how_long_it_took_and_is_quick_the_second_time() -> None:
    assert warmup() >= 0.0
    assert warmup() < 5.0


def main() -> None:
    warmup()
    routines = {f"{routine.__module__}.{routine.__name__}": routine for routine in compiled_routines()}
    before = {name: known(routine) for name, routine in routines.items()}
    inner = {name for routine in routines.values() for name in routine.py_func.__code__.co_names}
    cold = [name for name, routine in routines.items() if not routine.signatures and routine.__name__ not in inner]
    assert not cold, f"not warm: {cold}"
    use_everything()
    late = [name for name, routine in routines.items() if known(routine) != before[name]]
    assert not late, f"compiled later: {late}"


def compiled_routines() -> Iterator[Any]:
    """Every compiled routine of the package, where it is defined."""
    for module in pkgutil.iter_modules(seqmesh.packer.__path__, "seqmesh.packer."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, Dispatcher) and value.__module__ == module.name:
                yield value


def known(routine: Any) -> tuple[int, int]:
    """How many types it is compiled for, and how many of these were not in the cache."""
    return len(routine.signatures), sum(routine.stats.cache_misses.values())


def use_everything() -> None:
    """Every public routine on other numbers than those it was warmed with, of many kinds."""
    rng = np.random.default_rng(1)
    for count, dtype, writeable in product((1, 300), ("int64", "int32", "uint16"), (True, False)):
        lengths = rng.integers(0, CAPACITY, count).astype(dtype)
        lengths.flags.writeable = writeable
        pack_in_every_way(lengths)
        balance_in_every_way(lengths)
        next(packs([lengths], OnlinePacker(CAPACITY, max_open=3, max_wait=9, max_documents=4)))
    for mode, capacity in product(get_args(Mode), (600, 5000)):
        mesh = Mesh(ranks=4, capacity=capacity, mode=mode)
        plan_step(rng.integers(0, 1900, 50), mesh, CostModel(fixed=1, quadratic=2))
        plan_rows(rng.integers(0, 600, 50), capacity, 3, window=4, cost=CostModel(quadratic=1))
    permutation(50, 7, 10, 20)


def pack_in_every_way(lengths: Any) -> None:
    extra = np.ones(len(lengths), np.int64)
    for method, overlong, seed in product(METHODS, ("truncate", "split", "drop"), (None, 3)):
        found = pack(lengths, CAPACITY // 2, method=method, overlong=overlong, seed=seed, max_documents=5, multiple=4)
        assert len(found.order) == np.count_nonzero(found.bin_of >= 0)
        if found.count < len(found.order):
            pack(lengths, CAPACITY // 2, method=method, overlong=overlong, seed=seed, bins_multiple=2, lookahead=3)
    for method, overlong, seed in product(WHOLE, ("error", "drop"), (None, 3)):
        pack(lengths, CAPACITY, method=method, overlong=overlong, seed=seed, extra=extra, extra_capacity=3)
        pack([1 << 40, 3, 2, 2], 1 << 41, method=method, seed=seed)


def balance_in_every_way(lengths: Any) -> None:
    tokens: Int64Array = np.full(len(lengths), 10)
    for method in BALANCERS:
        partition(lengths, 7, method=method)
    partition(lengths, 7, equal_counts=True)
    partition(lengths, 7, capacity=100 * CAPACITY)
    partition(lengths, 7, tokens=tokens, capacity=450, equal_counts=True)
    partition([8, 7, 6, 5, 4], 2, capacity=15)  # 8 and 7, 6 and 5 and 4: only a search finds that


if __name__ == "__main__":
    main()
