"""The loop: batches in, steps done, each one logged and now and then saved. What a step computes is in `step`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from seqmesh.kernels.layout import Traffic
from seqmesh.loader.batch import batch_digest, step_digest
from seqmesh.trainer.job import Job
from seqmesh.trainer.logs import Sink, open_sinks
from seqmesh.trainer.models.balance import fullest, move_biases_, take_loads
from seqmesh.trainer.monitor import JsonLines, Pace, StepClock, StepRecord, make_record, step_line
from seqmesh.trainer.offload import Moved
from seqmesh.trainer.passes import Batch
from seqmesh.trainer.process import collecting, peak_memory
from seqmesh.trainer.saving import save_if_due
from seqmesh.trainer.step import EXTRA, StepResult, finish_step

LEAST_STEP_TIMEOUT = 30.0  # seconds, where `step_timeout` is not set
SLOW_STEP = 10  # times the median, likewise

StepDone = tuple[StepResult, Batch, str]  # what came out, the last batch, the digest of all batches


def run(job: Job) -> None:
    """All steps that are left; stops early where the data end."""
    job.say(f"{job.peak.flops:.3g} FLOP/s a process are 100 % MFU: {job.peak.source}")
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if job.grid.world.is_first:
            settings = asdict(job.config)
            sinks = stack.enter_context(open_sinks(job.config.log, job.folder, job.step, settings))
        batches_log = None
        if job.grid.speaks:
            batches_log = JsonLines(job.folder / f"batches-{job.grid.data.rank}.jsonl")
            stack.callback(batches_log.close)
        collect = stack.enter_context(collecting(job.config.gc_every))
        stack.enter_context(job.saver)
        loop = Loop(job, sinks, batches_log, collect)
        stack.enter_context(loop.watched())
        loop.run()


class Loop:
    """What lives as long as the loop: the batches, the clock, and which plan the ranks have agreed on."""

    def __init__(
        self, job: Job, sinks: list[Sink], batches_log: JsonLines | None, collect: Callable[[int], None]
    ) -> None:
        self.job, self.sinks, self.batches_log, self.collect = job, sinks, batches_log, collect
        self.batches: Iterator[Batch] = iter(job.loader)
        self.clock = StepClock()
        self.pace = Pace()
        self.agreed = ""  # digest of the plan that all ranks are known to have for the next step

    def run(self) -> None:
        job, steps = self.job, self.job.config.steps
        while job.step < steps and (done := self._next_step()) is not None:
            self._log(*done)
            with self.clock.phase("gc"):
                self.collect(job.step)
            self._save(last_step=job.step == steps)
        if job.step < steps:
            job.say(f"the data end after step {job.step} of {steps}")
            self._save(last_step=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let the other ranks know what this one does, until the end of the block."""
        watch = self.job.grid.world.watch
        watch.doing = lambda: f"step {self.job.step + 1}, {self.clock.doing or 'between phases'}"
        try:
            yield
        finally:
            watch.silence = watch.deadline = math.inf

    def _next_step(self) -> StepDone | None:
        world = self.job.grid.world
        with world.naming_the_lost(f"rank {world.rank}, step {self.job.step + 1}"):
            return self._do_step()

    def _do_step(self) -> StepDone | None:
        """One step, the last of its batches, and the digest of them all; None where the data end."""
        job, digests, newest = self.job, list[str](), deque[Batch](maxlen=1)
        job.replica.begin_step()
        with self.clock.phase("compute"):
            job.runner.run(self._batches_of_step(digests, newest))
        if not newest or not newest[0].last_in_step:
            return None
        (last,) = newest
        with self.clock.phase("reduce"):
            job.replica.extra[EXTRA:] = take_loads(job.model)
            job.replica.reduce_()
            self._agree(last.next_plan, last.step + 1)
        with self.clock.phase("update"):
            result = finish_step(
                job.replica,
                job.optimizer,
                job.config.optim,
                supervised=last.supervised_tokens_in_step,
                step=job.step,
                steps=job.config.steps,
            )
            if result.updated:
                move_biases_(job.model, result.loads)
        job.step += 1
        return result, last, step_digest(digests)

    def _batches_of_step(self, digests: list[str], newest: deque[Batch]) -> Iterator[Batch]:
        """As they are taken they are agreed on, and written down."""
        while not newest or not newest[0].last_in_step:
            with self.clock.phase("data"):
                batch = next(self.batches, None)
            if batch is None:
                return
            if self.agreed != batch.plan:
                self._agree(batch.plan, batch.step)
            digests.append(batch_digest(batch.map(lambda _name, tensor: tensor.cpu())))
            newest.append(batch)
            yield batch

    def _agree(self, plan: str, step: int) -> None:
        """One step ahead of its work: all ranks must have the same plan, or they would wait for each other for ever."""
        self.job.grid.world.agree(plan, f"the plan of step {step + 1}")
        self.agreed = plan

    def _log(self, result: StepResult, last: Batch, digest: str) -> None:
        job, steps = self.job, self.job.config.steps
        if self.batches_log:
            self.batches_log.write({"step": job.step, "digest": digest})
        record = self._record(result, last)
        self.clock.restart()
        self.pace.add(record.total)
        job.runner.passes.traffic = Traffic()
        if job.offloader:
            job.offloader.moved = Moved()
        for sink in self.sinks:
            sink.write(record)
        job.say(step_line(record, steps, self.pace.mean * (steps - job.step)))
        self._expect()

    def _record(self, result: StepResult, last: Batch) -> StepRecord:
        job = self.job
        return make_record(
            result,
            self.clock,
            step=job.step,
            epoch=last.epoch,
            tokens=last.tokens_in_step,
            rings=last.rings_in_step,
            ring_bytes=job.runner.passes.traffic.sent,
            offload_bytes=job.offloader.moved.nbytes if job.offloader else 0,
            imbalance=last.imbalance,
            flops=job.work.of_step(
                tokens=last.tokens_in_step,
                supervised=last.supervised_tokens_in_step,
                layer_pairs=result.layer_pairs,
            ),
            peak=job.peak.flops * job.grid.world.count,
            expert_load=fullest(result.loads, job.config.model),
            memory=peak_memory(job.grid.world.device),
        )

    def _save(self, *, last_step: bool) -> None:
        self._expect(self.job.config.timeout)
        with self.clock.phase("save"):
            save_if_due(self.job, last_step=last_step)
        self._expect()

    def _expect(self, at_least: float = 0.0) -> None:
        """Another step or save is begun: from the third step on, the others are not waited for long. In the first they
        compile and connect, after it their garbage is collected, and they give no sign of life meanwhile."""
        watch, config = self.job.grid.world.watch, self.job.config
        if self.pace.steps > 1:
            seconds = config.step_timeout or max(LEAST_STEP_TIMEOUT, SLOW_STEP * self.pace.median)
            watch.silence, watch.deadline = config.heartbeat, time.monotonic() + max(seconds, at_least)
