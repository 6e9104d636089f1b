"""Whole jobs: torchrun, two ranks, a loader process, kills, resumes."""

import random
from pathlib import Path

import pytest

from seqmesh.loader.batch import batch_digest, step_digest
from seqmesh.loader.feed import Feed
from seqmesh.trainer.config import load_config
from seqmesh.trainer.monitor import read_steps
from seqmesh.trainer.train import loader_settings
from tests.chaos import check_same
from tests.jobs import (
    SECONDS,
    STEPS,
    VOCAB,
    finish,
    kill_after,
    kill_rank,
    logged,
    ranks_of,
    run_command,
    start,
    wait_for_step,
    write_job,
)
from tests.support import long_tail, make_set, walk


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), long_tail(80, 60), vocab=VOCAB)


def served(job: Path, rank: int) -> dict[int, str]:
    steps = read_steps(job.parent / "run" / f"batches-{rank}.jsonl")
    return {step: record["digest"] for step, record in steps.items()}


def uninterrupted(job: Path, ranks: int, rank: int) -> dict[int, str]:
    """Digests of a rank's steps, straight from the shards."""
    digests: dict[int, str] = {}
    batches: list[str] = []
    config = load_config(job)
    for _, batch in walk(Feed(loader_settings(config, ranks)), rank):
        batches.append(batch_digest(batch))
        if batch.last_in_step:
            digests[batch.step + 1] = step_digest(batches)
            batches = []
            if batch.step + 1 == config.steps:
                break
    return digests


def test_a_job_killed_at_random_and_resumed_equals_the_uninterrupted_one(tmp_path: Path, data: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = write_job(tmp_path / "whole", data, steps=2 * STEPS)
    run_command(whole)
    (tmp_path / "broken").mkdir()
    broken = write_job(tmp_path / "broken", data, steps=2 * STEPS)
    generator = random.Random(7)
    kill_after(broken, generator.randint(2, 4))
    kill_rank(broken, 0, 1, in_save=True)
    output = kill_rank(broken, 1, generator.randint(1, 4))
    assert "rank 1 died or stopped" in output or "rank 1 ended with exit code -9" in output
    assert "resumed from" in finish(broken)
    for rank in range(2):
        expected = uninterrupted(broken, 2, rank)
        assert served(whole, rank) == expected
        assert served(broken, rank) == expected
    check_same(whole, broken, 2 * STEPS)


def test_a_job_goes_on_with_the_same_global_batches_on_another_number_of_ranks(tmp_path: Path, data: Path) -> None:
    job = write_job(tmp_path, data)
    kill_after(job, 5)
    resumed_at = max(int(p.name[-8:]) for p in (tmp_path / "run").glob("step-*"))
    finish(job, "ranks=1")
    on_two, on_one = uninterrupted(job, 2, 0), uninterrupted(job, 1, 0)
    found = served(job, 0)
    assert found == {step: (on_two if step <= resumed_at else on_one)[step] for step in range(1, STEPS + 1)}
    alone = write_job(make_folder(tmp_path / "alone"), data, ranks=1)
    finish(alone)
    for step, record in logged(job).items():
        assert record["tokens"] == logged(alone)[step]["tokens"]
        assert record["loss"] == pytest.approx(logged(alone)[step]["loss"], rel=1e-4)


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_data_may_end_before_the_steps_do(tmp_path: Path, data: Path) -> None:
    loader = {"data": str(data), "tokens_per_step": 1024, "capacity": 512, "epochs": 1}
    job = write_job(tmp_path, data, loader=loader, ranks=1)
    output = finish(job)
    steps = max(logged(job))
    assert f"the data end after step {steps} of {STEPS}" in output
    assert (tmp_path / "run" / f"step-{steps:08d}").is_dir()
    assert "the data end after" in finish(job)  # and starting again does no harm


def test_a_second_job_is_kept_out_of_a_run_folder_that_is_in_use(tmp_path: Path, data: Path) -> None:
    job = write_job(tmp_path, data, steps=100_000)
    with start(job) as first:
        wait_for_step(first, job, 1)
        with start(job) as second:
            output, _ = second.communicate(timeout=SECONDS)
        assert second.returncode == 1
        assert "run is in use by another training job" in output
        first.terminate()
        first.communicate(timeout=SECONDS)
    assert not any(ranks_of(job))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=7", "model: width is 7"),
        ("loader.data=/nowhere", "/nowhere is not a finished shard set"),
        ("model.vocab_size=10", "model.vocab_size is 10: the shards' tokenizer has 60 ids"),
        ("loader.overlong=error", "max_document is 48"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, data: Path, override: str, message: str) -> None:
    with start(write_job(tmp_path, data, ranks=1), override) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert message in output
    assert "Traceback" not in output
