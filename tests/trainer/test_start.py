"""Start-up: what a process asks of the store does not grow with their number, and the lines it made are the right ones.

See tests/field/test_trainer_groups.py for eight processes, and for thousands.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from seqmesh.trainer.checkpoints.board import Board
from seqmesh.trainer.grid import Grid, ParallelConfig, make_grid
from seqmesh.trainer.parallel import Ranks, open_store
from tests.ranks import run_ranks
from tests.stores import Calls, asked, count_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """calls: of the store by kind, but those of signs of life. groups: made by this process after the first. sums: of
    the numbers of all members of each line, exchanged over it."""

    calls: Calls
    groups: int
    sums: list[float]


def start(world: Ranks, config: ParallelConfig) -> Started:
    """The groups, and the board of checkpoints."""
    grid = make_grid(world, config)
    Board(open_store(world, "checkpoints/x", 60.0), world, 60.0).post(1, "done")
    sums = [sum_over(line, world.rank) for line in lines_of(grid)]
    return Started(calls=asked(), groups=len(dist.distributed_c10d._world.pg_map) - 1, sums=sums)


def lines_of(grid: Grid) -> tuple[Ranks, ...]:
    return grid.world, grid.data, grid.tensor, grid.stages, grid.returns


def sum_over(line: Ranks, number: float) -> float:
    box = torch.tensor([number])
    line.sum_(box)
    return box.item()


def expected_sums(processes: int, config: ParallelConfig) -> list[list[float]]:
    """Of the numbers of the processes that share replica, stage or peer, by looking at all of them."""
    replicas = processes // config.peers
    rows = [(*divmod(p // config.tensor, replicas), p % config.tensor) for p in range(processes)]

    def alike(own: tuple[int, int, int], *axes: int) -> float:
        return float(sum(p for p, other in enumerate(rows) if all(other[axis] == own[axis] for axis in axes)))

    return [[alike(own), alike(own, 0, 2), alike(own, 0, 1), alike(own, 1, 2), alike(own, 1, 2)] for own in rows]


def check_start(processes: int, config: ParallelConfig, groups: int) -> None:
    """For each of its groups and for that of all, a process tells its address and asks for those of the members, once;
    and it posts one word."""
    found = run_ranks(start, processes, config, before=count_calls)
    assert [each.sums for each in found] == expected_sums(processes, config)
    for each in found:
        assert each.groups == groups
        assert each.calls == {"set": 1 + groups + 1, "multi_get": 1 + groups}


@pytest.mark.parametrize(("processes", "groups"), [(2, 2), (4, 3)])  # one replica has no line of replicas
def test_what_a_process_asks_of_the_store_depends_on_its_groups_alone(processes: int, groups: int) -> None:
    check_start(processes, ParallelConfig(stages=2), groups)
