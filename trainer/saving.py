"""A job and its checkpoints: when to save, what goes in, and how a job goes on from one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from seqmesh.trainer.checkpoints.keep import clear_leftovers
from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.checkpoints.read import MODEL
from seqmesh.trainer.job import Job
from seqmesh.trainer.models.huggingface import load_huggingface


def resume(job: Job) -> None:
    """Go on from the newest whole checkpoint, the same one on all ranks; where there is none begin at 0, with the
    weights of `init`."""
    if job.grid.world.is_first:
        clear_leftovers(job.folder, job.say)
    path = newest_checkpoint(job.folder, job.grid.world, job.say)
    if path is None:
        _start(job)
        return
    state = load(path, job.tensors(), job.grid).state
    job.replica.loaded(job.optimizer)
    job.loader.load_state_dict(state["loader"])
    job.step = job.saved = state["step"]
    job.say(f"resumed from {path}")
    if state.get("cost", job.cost) != job.cost:
        job.say("its cost model was another: the same global batches may be spread over the ranks in another way")


def _start(job: Job) -> None:
    if job.config.init is not None:
        held = {name.removeprefix(MODEL): each for name, each in job.tensors().items() if name.startswith(MODEL)}
        load_huggingface(Path(job.config.init), job.config.model, held)
        job.replica.loaded(job.optimizer)
        job.say(f"starts from {job.config.init}")


def save_if_due(job: Job, *, last_step: bool) -> None:
    """Save after every `checkpoint.every` steps, and after the last one. Every rank calls it after every step."""
    job.saver.check()
    if job.step == job.saved or not (last_step or job.step % job.config.checkpoint.every == 0):
        return
    state: dict[str, Any] = {
        "ranks": job.grid.world.count,
        "parallel": asdict(job.config.parallel),
        "cost": job.cost,
        "model": asdict(job.config.model),
    }
    if job.grid.world.is_first:
        state["loader"] = job.loader.state_dict()
    job.saver.save(job.step, job.tensors(), state)
    job.saved = job.step
