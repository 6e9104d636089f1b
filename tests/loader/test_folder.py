"""Private folders: whose owner lives they stay, whoever else comes and goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqmesh.loader.folder import OWNER, private_folder, remove_orphans

MAKE = "from seqmesh.loader.folder import private_folder; print(private_folder(), flush=True); input()"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_folder_is_private_and_stays_as_long_as_its_owner(place: Path) -> None:
    command = [sys.executable, "-c", MAKE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        mine = private_folder()
        assert (mine.stat().st_mode & 0o777, folder.parent) == (0o700, place)
        assert sorted(place.iterdir()) == sorted([folder, mine])
        owner.kill()
        owner.wait()
    another = private_folder()
    assert sorted(place.iterdir()) == sorted([mine, another])


@pytest.mark.parametrize(
    "owner",
    [
        None,  # just being made, or made by something else
        "",
        "x y z",
        "pid:[1] 1 1",  # of a container that has processes of its own
    ],
)
def test_a_folder_whose_owner_can_not_be_told_stays(place: Path, owner: str | None) -> None:
    folder = place / "seqmesh-abc"
    folder.mkdir()
    if owner is not None:
        (folder / OWNER).write_text(owner)
    remove_orphans(place)
    assert folder.exists()


def test_a_process_that_has_the_same_number_by_now_is_not_the_owner(place: Path) -> None:
    folder = private_folder()
    namespace, pid, began = (folder / OWNER).read_text().split()
    (folder / OWNER).write_text(f"{namespace} {pid} {int(began) - 1}")
    remove_orphans(place)
    assert not folder.exists()
    assert int(pid) == os.getpid()
