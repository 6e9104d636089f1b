"""Where processes stand: every axis divides them, and what is said to be near is near."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch

from seqmesh.trainer.grid import Grid, ParallelConfig, alone, make_grid
from seqmesh.trainer.parallel import Ranks

CPU = torch.device("cpu")


def grid_of(process: int, processes: int, config: ParallelConfig) -> Grid:
    """Without any exchange."""
    with patch("torch.distributed.new_group", side_effect=lambda members, **_: tuple(members)):
        return make_grid(Ranks(process, processes, CPU), config)


def test_every_process_has_a_place_of_its_own_and_all_have_the_same_lines() -> None:
    """Against the formula, process by process."""
    for tensor, stages, replicas in product((1, 2, 3), (1, 2, 3), (1, 2, 4)):
        config = ParallelConfig(tensor=tensor, stages=stages)
        grids = [grid_of(process, tensor * stages * replicas, config) for process in range(tensor * stages * replicas)]
        places = [(grid.stages.rank, grid.data.rank, grid.tensor.rank) for grid in grids]
        assert places == list(product(range(stages), range(replicas), range(tensor)))
        for (stage, _, peer), grid in zip(places, grids, strict=True):
            assert (grid.stages.count, grid.data.count, grid.tensor.count) == (stages, replicas, tensor)
            assert [places[grid.process(r)] for r in range(replicas)] == [(stage, r, peer) for r in range(replicas)]
            assert grid.speaks == ((stage, peer) == (stages - 1, 0))
        for axis in ("data", "tensor", "stages", "returns"):
            lines = {group for grid in grids if (group := getattr(grid, axis).group)}
            assert len({member for line in lines for member in line}) == sum(map(len, lines))


def test_peers_on_a_machine_are_numbered_by_themselves() -> None:
    config = ParallelConfig(tensor=2, stages=2)
    found = [grid_of(process, 8, config).peers_within(8) for process in range(8)]
    assert found == [(0, 4), (1, 4), (0, 4), (1, 4), (2, 4), (3, 4), (2, 4), (3, 4)]
    assert [grid_of(p, 8, config).peers_within(4) for p in range(8)] == [(0, 2), (1, 2)] * 4
    assert [grid_of(p, 8, config).peers_within(1) for p in range(8)] == [(0, 1)] * 8
    assert alone(CPU).peers_within(1) == (0, 1)


def test_processes_that_make_no_whole_replicas_are_refused() -> None:
    config = ParallelConfig(tensor=2, stages=3)
    with pytest.raises(ValueError, match=r"8 processes: must be a multiple of .*, 2 · 3"):
        make_grid(replace(alone(CPU).world, count=8), config)
