"""The loop: batches in, steps done, each one logged and now and then saved. What a step computes is in `step`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from seqmesh.kernels.layout import Traffic
from seqmesh.loader.batch import PackedBatch, batch_digest, step_digest
from seqmesh.trainer.job import Job
from seqmesh.trainer.monitor import JsonLines, StepClock, make_record, step_line
from seqmesh.trainer.saving import save_if_due
from seqmesh.trainer.step import StepResult, accumulate, finish_step

StepDone = tuple[StepResult, PackedBatch[Tensor], str]  # what came out, the last batch, the digest of all batches


def run(job: Job) -> None:
    """All steps that are left; stops early where the data end."""
    Loop(job).run()


class Loop:
    """What lives as long as the loop: the batches, the clock, and which plan the ranks have agreed on."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.batches: Iterator[PackedBatch[Tensor]] = iter(job.loader)
        self.clock = StepClock()
        self.traffic = Traffic()
        self.agreed = ""  # digest of the plan that all ranks are known to have for the next step

    def run(self) -> None:
        job, steps = self.job, self.job.config.steps
        log = JsonLines(job.folder / "log.jsonl") if job.ranks.is_first else None
        batches_log = JsonLines(job.folder / f"batches-{job.ranks.rank}.jsonl")
        began, first_step = time.perf_counter(), job.step
        try:
            while job.step < steps and (done := self._next_step()) is not None:
                result, last, digest = done
                batches_log.write({"step": job.step, "digest": digest})
                record = make_record(
                    result,
                    self.clock,
                    step=job.step,
                    epoch=last.epoch,
                    tokens=last.tokens_in_step,
                    rings=last.rings_in_step,
                    ring_bytes=self.traffic.sent,
                    imbalance=last.imbalance,
                )
                self.traffic = Traffic()
                self.clock.restart()
                if log:
                    log.write(record)
                left = (time.perf_counter() - began) / (job.step - first_step) * (steps - job.step)
                job.say(step_line(record, steps, left))
                with self.clock.phase("save"):
                    save_if_due(job, last_step=job.step == steps)
            if job.step < steps:
                job.say(f"the data end after step {job.step} of {steps}")
                save_if_due(job, last_step=True)
        finally:
            batches_log.close()
            if log:
                log.close()

    def _next_step(self) -> StepDone | None:
        with self.job.ranks.naming_the_lost(f"rank {self.job.ranks.rank}, step {self.job.step + 1}"):
            return self._do_step()

    def _do_step(self) -> StepDone | None:
        """One step, the last of its batches, and the digest of them all; None where the data end."""
        job, digests = self.job, list[str]()
        while True:
            with self.clock.phase("data"):
                batch = next(self.batches, None)
            if batch is None:
                return None
            if self.agreed != batch.plan:
                self._agree(batch.plan, batch.step)
            digests.append(batch_digest(batch.map(lambda _name, tensor: tensor.cpu())))
            with self.clock.phase("compute"):
                accumulate(job.model, batch, job.replica, job.loader.settings.capacity, self.traffic)
            if batch.last_in_step:
                break
        with self.clock.phase("reduce"):
            job.replica.reduce_()
            self._agree(batch.next_plan, batch.step + 1)
        with self.clock.phase("update"):
            result = finish_step(
                job.replica,
                job.optimizer,
                job.config.optim,
                supervised=batch.supervised_tokens_in_step,
                step=job.step,
                steps=job.config.steps,
            )
        job.step += 1
        return result, batch, step_digest(digests)

    def _agree(self, plan: str, step: int) -> None:
        """One step ahead of its work: all ranks must have the same plan, or they would wait for each other for ever."""
        self.job.ranks.agree(plan, f"the plan of step {step + 1}")
        self.agreed = plan
