"""A job and its checkpoints: when to save, what goes in, and how a job goes on from one."""

from __future__ import annotations

from pathlib import Path

from seqmesh.trainer.checkpoint import gather_saved, load_saved, newest_checkpoint, save_checkpoint
from seqmesh.trainer.job import Job
from seqmesh.trainer.models.huggingface import load_huggingface


def resume(job: Job) -> None:
    """Go on from the newest whole checkpoint, the same one on all ranks; where there is none begin at 0, with the
    weights of `init`."""
    newest = newest_checkpoint(job.folder, job.say) if job.ranks.is_first else None
    step = job.ranks.from_first(int(newest.name.rpartition("-")[2]) if newest else -1)
    if step < 0:
        _start(job)
        return
    path = job.folder / f"step-{step:08d}"
    state = load_saved(path, job.replica.tensors(job.optimizer))
    job.replica.loaded(job.optimizer)
    job.loader.load_state_dict(state["loader"])
    job.step = state["step"]
    job.say(f"resumed from {path}")
    if state.get("cost", job.cost) != job.cost:
        job.say("its cost model was another: the same global batches may be spread over the ranks in another way")


def _start(job: Job) -> None:
    if job.config.init is not None:
        load_huggingface(Path(job.config.init), job.config.model, dict(job.model.named_parameters()))
        job.say(f"starts from {job.config.init}")


def save_if_due(job: Job, *, last_step: bool) -> None:
    """Save after every `checkpoint.every` steps, and after the last one. Every rank calls it after every step."""
    if not (last_step or job.step % job.config.checkpoint.every == 0):
        return
    tensors = gather_saved(job.replica.tensors(job.optimizer))
    if job.ranks.is_first:
        state = {"loader": job.loader.state_dict(), "ranks": job.ranks.count, "cost": job.cost}
        path = save_checkpoint(job.folder, job.step, tensors, state, keep=job.config.checkpoint.keep)
        job.say(f"saved {path}")
