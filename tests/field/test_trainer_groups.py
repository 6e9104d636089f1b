"""Groups that are made in other orders, or by their members only, hang; where all processes make each of them instead,
start-up takes a time that grows with their number, or its square.

Here every process makes its own groups and no other, at most four, in one order; nobody waits for who is no member.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch forgets to export it
from torch.testing._internal.distributed import fake_pg  # noqa: F401 -- registers the back end `fake`

from seqmesh.trainer.grid import ParallelConfig, make_grid
from seqmesh.trainer.parallel import Ranks
from tests.stores import Counting
from tests.trainer.test_start import check_start

CPU = torch.device("cpu")
MANY = 4096
CONFIG = ParallelConfig(tensor=2, stages=2)
GROUPS = 4  # of a process: data, tensor, stages, returns
Members = tuple[int, ...]


def test_eight_processes_ask_the_store_as_often_as_two_and_all_groups_work() -> None:
    check_start(8, CONFIG, GROUPS)


@contextmanager
def fake_process(rank: int, count: int, store: Counting) -> Iterator[Ranks]:
    """One of many whose exchanges do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=count, store=store)
    try:
        yield Ranks(rank, count, CPU)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("count", [8, MANY])
def test_each_of_thousands_of_processes_makes_as_many_groups_as_one_of_eight(count: int) -> None:
    for rank in (0, 1, 3, count // 2 + 1, count - 1):
        store = Counting(HashStore())
        with (
            fake_process(rank, count, store) as world,
            patch("torch.distributed.new_group", side_effect=dist.new_group) as made,
        ):
            make_grid(world, CONFIG)
            assert made.call_count == GROUPS
            assert len(dist.distributed_c10d._world.pg_map) == 1 + GROUPS
        assert not store.calls  # of ours and of torch's, besides what a back end exchanges


def test_all_processes_make_their_groups_in_one_order_each_with_its_members_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the n-th group that any of them makes is also the n-th of all that it waits for."""
    made: list[Members] = []
    monkeypatch.setattr(dist, "new_group", lambda members, **_: made.append(tuple(members)))
    nth: list[set[Members]] = [set() for _ in range(GROUPS)]
    for rank in range(MANY):
        make_grid(Ranks(rank, MANY, CPU), CONFIG)
        for line, lines in zip(made, nth, strict=True):
            assert rank in line
            lines.add(line)
        made.clear()
    for lines in nth:
        assert sorted(member for line in lines for member in line) == list(range(MANY))  # each in one, with its members
