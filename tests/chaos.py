"""A training job of which ranks are killed again and again ends with the weights of one that was left alone.

    python -m tests.chaos [--kills 20] [--ranks 2] [--seed 0]

Any rank, at random moments: while it starts and resumes, between steps, inside a save. After each kill the job is
started again. tests/trainer/test_train.py does a little of it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from seqmesh.trainer.checkpoints.read import read_model
from tests.jobs import SECONDS, VOCAB, finish, kill_rank, logged, rank_pid, ranks_of, start, wait_until, write_job
from tests.support import long_tail, make_set

MOMENTS = ("start", "step", "save")
MOST_STEPS = 3  # between two kills
PATIENCE = 1_800  # seconds for all steps


def kill_often(job: Path, kills: int, ranks: int, generator: random.Random) -> Counter[str]:
    """So many kills, each of any rank; how many of each kind. The job must have steps enough."""
    done: Counter[str] = Counter()
    for _ in range(kills):
        moment, rank = generator.choice(MOMENTS), generator.randrange(ranks)
        if moment == "start":
            kill_starting(job, rank, generator.uniform(0, 3))
        else:
            kill_rank(job, rank, generator.randint(1, MOST_STEPS), in_save=moment == "save")
        done[moment] += 1
        print(f"kill {done.total()}: rank {rank}, at {moment}, step {max(logged(job), default=0)}", flush=True)
        wait_until(lambda: not any(ranks_of(job)), SECONDS, "a rank went on")
    return done


def kill_starting(job: Path, rank: int, seconds: float) -> None:
    """SIGKILL a rank so long after it came up, or after some steps."""
    enough = max(logged(job), default=0) + MOST_STEPS
    with start(job) as process:
        wait_until(lambda: len(list(ranks_of(job))) > rank, SECONDS, "the job did not start")
        pid, moment = rank_pid(job, rank), time.monotonic() + seconds
        wait_until(lambda: time.monotonic() > moment or max(logged(job), default=0) >= enough, SECONDS, "no end")
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output


def run(folder: Path, *, kills: int, ranks: int, seed: int) -> Counter[str]:
    """The job with kills beside the one without; raises AssertionError where they differ."""
    data = make_set(folder / "set", long_tail(400, 60), vocab=VOCAB)
    steps = 2 * MOST_STEPS * kills + 10  # a kill comes a few steps later than it is meant to
    jobs = []
    for name in ("whole", "broken"):
        (folder / name).mkdir()
        jobs.append(write_job(folder / name, data, steps=steps, ranks=ranks))
    whole, broken = jobs
    finish(whole, seconds=PATIENCE)
    done = kill_often(broken, kills, ranks, random.Random(seed))
    finish(broken, seconds=PATIENCE)
    check_same(whole, broken, steps)
    return done


def check_same(whole: Path, broken: Path, steps: int) -> None:
    """Losses of all steps, and the weights after the last, bit for bit; no file more or less."""
    losses = [{step: record["loss"] for step, record in logged(job).items()} for job in (whole, broken)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == steps
    ours, theirs = (read_model(job.parent / "run" / f"step-{steps:08d}") for job in (whole, broken))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    names = [sorted(path.name for path in (job.parent / "run").iterdir()) for job in (whole, broken)]
    assert names[0] == names[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = run(Path(folder), kills=options.kills, ranks=options.ranks, seed=options.seed)
    words = ", ".join(f"{count} at {moment}" for moment, count in sorted(done.items()))
    print(f"{options.kills} kills on {options.ranks} ranks ({words}): the weights are those of the unbroken run")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
