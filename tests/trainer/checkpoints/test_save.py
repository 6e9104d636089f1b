"""Two stages: what is saved is what was there when `save` returned; what fails in the background is said everywhere."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from seqmesh.trainer.checkpoints import files, save
from seqmesh.trainer.checkpoints.board import Board
from seqmesh.trainer.checkpoints.config import CheckpointConfig
from seqmesh.trainer.checkpoints.keep import checkpoints, clear_leftovers
from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.checkpoints.manifest import CheckpointError
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.parallel import RankError, Ranks
from seqmesh.trainer.part import Part, whole
from tests.checkpoints import (
    GRID,
    STATE,
    is_step,
    plain_tensors,
    same,
    save_alone,
    saver_of,
    spread,
    whole_tensors,
    zeros,
)
from tests.ranks import run_ranks


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The second stage waits for this event before it writes anything."""
    event, write_file = threading.Event(), files.write_file
    monkeypatch.setattr(save, "write_file", lambda *args: event.wait(20) and write_file(*args))
    return event


def test_a_step_right_after_the_save_does_not_tear_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors, rows and views; everything changes in place, the state too, before a byte is written."""
    written = hold(monkeypatch)
    tensors = plain_tensors(7)
    embedding = tensors["model/embedding"].local
    tensors["model/embedding"] = whole(embedding.t().contiguous().t())  # not as it lies in memory
    state: dict[str, Any] = {"mark": 7, "loader": {"position": 3}}
    with saver_of(tmp_path, tensors, background=True) as saver:
        saver.save(7, tensors, state)
        zeros(tensors)
        state["loader"]["position"] = 4
        assert not checkpoints(tmp_path)
        written.set()
    (path,) = checkpoints(tmp_path)
    assert is_step(path, 7)
    found = load(path, tensors, GRID)
    assert found.state == {"version": 2, "step": 7, "mark": 7, "loader": {"position": 3}}
    assert same(tensors, plain_tensors(7))


def test_a_save_waits_for_the_one_before_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, said = hold(monkeypatch), list[str]()
    tensors = plain_tensors(1)
    with saver_of(tmp_path, tensors, background=True, say=said.append) as saver:
        saver.save(1, tensors, {"mark": 1})
        saver.check()
        assert said == []
        threading.Timer(0.2, written.set).start()
        for name, value in whole_tensors(2).items():
            tensors[name].local.copy_(value)
        saver.save(2, tensors, {"mark": 2})
    assert [word.split(" waited ")[0] for word in said] == [
        f"saved {tmp_path}/step-00000001",
        "the checkpoint of step 2",
        f"saved {tmp_path}/step-00000002",
    ]
    assert [is_step(path, step) for path, step in zip(checkpoints(tmp_path), (1, 2), strict=True)] == [True, True]


def test_only_the_newest_are_kept_and_no_litter(tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.0123abcd.tmp").mkdir()
    (tmp_path / ".step-00000001.gone.tmp").mkdir()
    said: list[str] = []
    clear_leftovers(tmp_path, said.append)
    assert said == [
        f"removed {tmp_path}/{name}, which a killed job left"
        for name in (".step-00000001.gone.tmp", ".step-00000009.0123abcd.tmp")
    ]
    save_alone(tmp_path, [2, 4, 10])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000010"]


def test_going_back_leaves_later_steps_until_they_are_replaced(tmp_path: Path) -> None:
    """After a resume from step 4, because 10 was damaged: 10 does not count among those that are kept."""
    save_alone(tmp_path, [2, 4, 10])
    paths = save_alone(tmp_path, [6, 8])
    assert [path.name[-2:] for path in paths] == ["06", "08", "10"]
    replaced = paths[-1].stat().st_ino
    paths = save_alone(tmp_path, [10])
    assert [path.name[-2:] for path in paths] == ["08", "10"]
    assert paths[-1].stat().st_ino != replaced
    assert is_step(paths[-1], 10)


def test_every_file_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut at any moment: files are synced before the folder has its name, that before an older one goes."""
    save_alone(tmp_path, [1], keep=1)
    done: list[str] = []

    def note(name: str, describe: Any) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            done.append(f"{name} {describe(*arguments)}")
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    def path_of(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    note("fsync", path_of)
    note("write", lambda descriptor, _: path_of(descriptor))
    note("rename", lambda old, new: f"{Path(old).name[:14]} {Path(new).name}")
    save_alone(tmp_path, [2], keep=1)
    monkeypatch.undo()
    written = ["rank-00000.safetensors", "state.json", "tensors.json", "manifest.json"]
    publish = done.index("rename .step-00000002 step-00000002")
    for name in written:
        last = max(i for i, word in enumerate(done) if word == f"write {name}")
        assert last < done.index(f"fsync {name}") < publish
    assert done[publish - 1].startswith("fsync .step-00000002.")
    assert done[publish + 1 :] == [f"fsync {tmp_path.name}", "rename step-00000001 .step-00000001.gone.tmp"]
    assert [word for word in done if word.startswith("write")][-1] == "write manifest.json"


def failures(ranks: Ranks, folder: Path) -> list[str]:
    """What this rank hears of: a disk that is full on one rank, one that is full on the first rank after the others
    are done, a rank that says nothing, and one that is lost. After each, what is there."""
    said = []
    tensors = spread(whole_tensors(1), "rows", ranks)

    def one(step: int, *, timeout: float = 20) -> None:
        try:
            with saver_of(folder, tensors, one_each(ranks), background=True, timeout=timeout) as saver:
                saver.save(step, tensors, STATE)
                if ranks.rank == 1 and step == 5:
                    raise RankError("rank 0 died or stopped")
        except CheckpointError as error:
            said.append(str(error))
        except RankError as error:
            said.append(str(error))

    one(1)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(os, "write", full_disk)
        one(2)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.is_first:
            patch.setattr(os, "rename", full_disk)
        one(3)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(Board, "post", lambda *_: None)
        one(4, timeout=1)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.is_first:
            patch.setattr(Board, "announce", lambda *_: None)
        began = time.monotonic()
        one(5, timeout=5 if ranks.rank == 1 else 0.5)
        assert time.monotonic() - began < 3
    ranks.wait_for_all()
    newest = newest_checkpoint(folder, ranks, said.append)
    assert newest is not None
    load(newest, zeros(tensors), one_each(ranks))
    assert same(tensors, spread(whole_tensors(1), "rows", ranks))
    return [*said, newest.name]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_fails_in_the_background_is_raised_on_every_rank_and_spoils_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(failures, 2, tmp_path)
    assert first[0] == second[0]
    assert "rank-00001.safetensors can not be written" in first[0]
    assert "No space left on device" in first[0]
    assert first[1] == second[1]
    assert "step-00000003 can not be completed" in first[1]
    assert first[2] == f"{tmp_path}/step-00000004 was not saved: no word from rank 1 within 1 s"
    assert f"{tmp_path}/step-00000004 was not saved: no word from" in second[2]
    assert first[3] == f"{tmp_path}/step-00000005 was not saved: no word from the first rank within 1 s"
    assert second[3] == "rank 0 died or stopped"  # not what came of it
    assert first[4:] == second[4:] == ["step-00000005"]


def test_a_part_that_lies_elsewhere_is_missed(tmp_path: Path) -> None:
    """Nodes that do not share the run folder: found at the first save, not when the job must resume."""
    (tmp_path / "half").mkdir()
    elsewhere = files.write_file(tmp_path / "rank-00001.safetensors", [b"tensors"])
    with pytest.raises(OSError, match=r"half/rank-00001.safetensors is not there: all nodes must share"):
        files.complete(tmp_path / "half", tmp_path / "step-00000001", {"rank-00001.safetensors": elsewhere}, {}, keep=1)
    assert not checkpoints(tmp_path)


def test_parts_that_do_not_make_the_whole_are_refused(tmp_path: Path) -> None:
    tensors = {"model/w": Part(local=torch.zeros(3, 2), shape=torch.Size([4, 2]), offsets=(1, 0))}
    with pytest.raises(ValueError, match="model/w: the ranks have 6 of its 8 elements"):
        saver_of(tmp_path, dict(tensors))
    with pytest.raises(ValueError, match=r"model/w is torch.complex64: must be one of"):
        saver_of(tmp_path, {"model/w": whole(torch.zeros(2, dtype=torch.complex64))})
    saver = saver_of(tmp_path, {"model/w": whole(torch.zeros(2))})
    with pytest.raises(ValueError, match=r"model/w is torch.float32 \[3\] on this rank: it was torch.float32 \[2\]"):
        saver.save(1, {"model/w": whole(torch.zeros(3))}, {})


def test_unfit_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointConfig(keep=0)
