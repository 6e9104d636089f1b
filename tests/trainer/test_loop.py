"""Whole jobs on one rank in this process: what is logged, and whether it repeats."""

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqmesh.loader.embedded import Loader
from seqmesh.trainer import logs
from seqmesh.trainer.config import TrainConfig, load_config
from seqmesh.trainer.grid import alone
from seqmesh.trainer.job import make_job
from seqmesh.trainer.logs import LogConfig, Wandb, WandbConfig, check_installed, scalars
from seqmesh.trainer.loop import run
from seqmesh.trainer.monitor import StepClock, make_record, read_steps
from seqmesh.trainer.process import repeatable
from seqmesh.trainer.saving import resume
from seqmesh.trainer.step import StepResult
from seqmesh.trainer.train import loader_settings
from tests.jobs import VOCAB, write_job
from tests.support import long_tail, make_set

STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), long_tail(80, 60), vocab=VOCAB)


class Killed(Exception):  # noqa: N818 -- not an error
    pass


def run_job(config: TrainConfig, killed_at: int | None = None) -> list[str]:
    """Run it in this process, until the line of a step is said; what it said."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if killed_at is not None and line.startswith(f"step {killed_at}/"):
            raise Killed

    with repeatable(config.deterministic, config.seed), Loader(loader_settings(config, 1), mode="inline") as loader:
        job = make_job(config, alone(torch.device("cpu")), loader, say)
        resume(job)
        run(job)
    return said


def test_a_resumed_run_goes_on_in_tensorboard_and_no_step_is_there_twice(tmp_path: Path, data: Path) -> None:
    job = write_job(tmp_path, data, ranks=1, steps=STEPS, log={"tensorboard": True})
    (tmp_path / "run").mkdir()
    with pytest.raises(Killed):
        run_job(load_config(job), killed_at=5)  # the newest checkpoint is that of step 4
    assert any("resumed from" in line for line in run_job(load_config(job)))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = read_steps(tmp_path / "run" / "log.jsonl")
    for name in ("loss", "mfu", "tokens_per_second", "seconds/data"):
        assert [event.step for event in events.Scalars(name)] == list(range(1, STEPS + 1))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([r["loss"] for r in logged.values()])


def test_a_repeatable_job_gives_the_same_bits(tmp_path: Path, data: Path) -> None:
    losses = []
    for name in "ab":
        (tmp_path / name / "run").mkdir(parents=True)
        job = write_job(tmp_path / name, data, ranks=1, steps=3, deterministic=True, gc_every=1)
        said = run_job(load_config(job))
        assert "FLOP/s a process are 100 % MFU: measured by matmuls" in said[0]
        records = read_steps(tmp_path / name / "run" / "log.jsonl")
        losses.append([(record["loss"], record["grad_norm"]) for record in records.values()])
        assert all(record["seconds"]["gc"] > 0 for record in list(records.values())[1:])
        assert 0 < records[3]["mfu"] < 1
        assert records[3]["memory"] > 1 << 20
    assert losses[0] == losses[1]
    assert not torch.are_deterministic_algorithms_enabled()


class WandbRun:
    def __init__(self) -> None:
        self.logged: dict[int, dict[str, Any]] = {}
        self.finished = 0

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        assert commit is None
        assert all(isinstance(value, float) for value in data.values())
        self.logged[step] = data

    def finish(self, exit_code: int | None = None) -> None:
        assert exit_code is None
        self.finished += 1


def stand_in(starts: list[dict[str, Any]], run: WandbRun) -> ModuleType:
    """A module that takes what the real `wandb.init` (0.31) takes, and nothing else."""

    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | str | None = None,
        mode: str | None = None,
        resume: bool | str | None = None,
    ) -> WandbRun:
        assert mode in ("online", "offline", "disabled", "shared")
        assert resume in ("allow", "never", "must", "auto")
        assert id is not None
        assert not set(id) & set("/\\#?%:")
        json.dumps(config)
        starts.append({"entity": entity, "project": project, "dir": dir, "id": id, "name": name})
        return run

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]  # what it is there for
    return module


def test_a_resumed_run_goes_on_in_its_own_run_of_wandb(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[dict[str, Any]] = []
    run_of_wandb = WandbRun()
    monkeypatch.setitem(sys.modules, "wandb", stand_in(starts, run_of_wandb))
    config = load_config(write_job(tmp_path, data))
    result = StepResult(loss=1.0, grad_norm=1.0, fill=1.0, rows=5, layer_pairs=1, lr=0.1, updated=True)
    record = make_record(result, StepClock(), step=3, epoch=0, tokens=5, rings=0, ring_bytes=0, imbalance=1.0)
    for _ in range(2):
        sink = Wandb(WandbConfig(project="p", name="n", mode="offline"), tmp_path, asdict(config))
        sink.write(record)
        sink.close()
    assert Counter(start["id"] for start in starts).most_common(1)[0][1] == 2
    assert starts[0] == {"entity": None, "project": "p", "dir": str(tmp_path), "id": starts[1]["id"], "name": "n"}
    assert run_of_wandb.logged == {3: scalars(record)}
    assert run_of_wandb.finished == 2


def test_what_is_not_installed_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda _name: None)
    check_installed(LogConfig())
    with pytest.raises(ValueError, match=r"log.tensorboard is set.*pip install 'seqmesh\[tensorboard\]'"):
        check_installed(LogConfig(tensorboard=True))
    with pytest.raises(ValueError, match=r"log.wandb is set, but wandb is not installed"):
        check_installed(LogConfig(wandb=WandbConfig(project="p")))
