"""The file by which a running loader is found: there while it serves, and of nobody else."""

import os
from pathlib import Path

import pytest

from seqmesh.loader.folder import Process, private_folder
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.registry import NAME, entries, registered
from seqmesh.loader.settings import LoaderSettings

SETTINGS = LoaderSettings(data="/data", tokens_per_step=8, capacity=8, ranks=3)
OPTIONS = ServeOptions(metrics="127.0.0.1:9400")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_loader_is_found_while_it_serves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with registered(SETTINGS, "ipc://s", OPTIONS):
        ((folder, entry),) = entries(place)
        assert (entry.data, entry.ranks, entry.options) == ("/data", 3, OPTIONS)
        assert entry.endpoint == f"ipc://{place}/s"  # whatever the working folder of who reads it
        assert (entry.process, entry.process.state) == (Process.this(), "living")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []


def test_a_private_folder_that_is_there_is_used_and_stays(place: Path) -> None:
    folder = private_folder()
    with registered(SETTINGS, "tcp://127.0.0.1:5555", OPTIONS, folder):
        assert [where for where, _ in entries(place)] == [folder]
    assert (list(place.iterdir()), list(entries(place))) == ([folder], [])


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"process": 1}'])
def test_what_is_not_ours_is_passed_over(place: Path, content: str) -> None:
    (private_folder() / NAME).write_text(content)
    assert list(entries(place)) == []


def test_a_process_is_told_by_more_than_its_number() -> None:
    this = Process.this()
    assert Process(this.namespace, this.pid, "1").state == "dead"
    assert Process("pid:[1]", this.pid, this.began).state == "unknown"
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # not reaped
    stat = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    assert Process(this.namespace, child, stat[19]).state == "dead"
    os.waitpid(child, 0)
