"""Compiled routines are compiled anew when anything in them has changed, in whatever file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INNER = """
from seqmesh.packer.jit import jit
ADDED = {added}
@jit
def inner(x):
    return {factor} * x + ADDED
"""
OUTER = """
from inner import inner
from seqmesh.packer.jit import jit
@jit
def outer(x):
    return inner(x)
if __name__ == "__main__":
    print(outer(10), sum(outer._cache_hits.values()))
"""


def run(folder: Path) -> list[int]:
    """The result, and how often compiled code was found in the cache."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, folder / "outer.py"], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("changed", [{"added": 2}, {"factor": 4}])
def test_a_change_below_a_routine_is_seen(tmp_path: Path, changed: dict[str, int]) -> None:
    (tmp_path / "outer.py").write_text(OUTER)
    values = {"added": 1, "factor": 3}
    (tmp_path / "inner.py").write_text(INNER.format(**values))
    assert run(tmp_path) == [31, 0]
    assert run(tmp_path) == [31, 1]
    values |= changed
    (tmp_path / "inner.py").write_text(INNER.format(**values))
    assert run(tmp_path) == [values["factor"] * 10 + values["added"], 0]
    assert run(tmp_path)[1] == 1
