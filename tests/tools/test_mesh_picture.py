"""The picture of a mesh shows every process once, and the groups that the trainer makes."""

import re
from pathlib import Path

import matplotlib as mpl
import pytest

from seqmesh.tools.mesh_picture import draw
from seqmesh.trainer.grid import ParallelConfig


@pytest.mark.parametrize(("tensor", "stages", "replicas"), [(1, 1, 1), (2, 2, 2), (3, 2, 4)])
def test_every_process_is_in_the_picture_once(tmp_path: Path, tensor: int, stages: int, replicas: int) -> None:
    config = ParallelConfig(tensor=tensor, stages=stages)
    processes = tensor * stages * replicas
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(tmp_path / "mesh.svg", config, processes, machine=tensor)
    words = re.findall(r">([^<>]+)</text>", (tmp_path / "mesh.svg").read_text())
    assert sorted(int(word) for word in words if word.isdigit()) == list(range(processes))
    assert {f"stage {stages - 1}", f"replica {replicas - 1}", f"machine {stages * replicas - 1}"} <= set(words)


def test_the_picture_of_the_guide_is_a_png(tmp_path: Path) -> None:
    draw(tmp_path / "mesh.png")
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
