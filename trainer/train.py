"""The training loop: join the ranks, resume from the newest whole checkpoint, run the steps.

Run by torchrun, one process per rank: `torchrun --nproc-per-node 2 -m seqmesh.trainer.train CONFIG.yaml key=value...`,
or through `seqmesh train`, which does that. The first rank of each machine starts the machine's loader process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import filelock
import torch
from filelock import FileLock
from torch import Tensor, nn

from seqmesh.kernels.layout import Traffic
from seqmesh.loader.batch import PackedBatch, batch_digest, step_digest
from seqmesh.loader.cost_file import cost_digest
from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.trainer.checkpoints.keep import clear_leftovers
from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.checkpoints.save import Saver
from seqmesh.trainer.config import TrainConfig, load_config, save_config
from seqmesh.trainer.model import Transformer
from seqmesh.trainer.monitor import JsonLines, StepClock, make_record, step_line
from seqmesh.trainer.optim import make_optimizer
from seqmesh.trainer.parallel import Ranks, end_with_parent, join_ranks
from seqmesh.trainer.part import Saved
from seqmesh.trainer.replica import make_replica
from seqmesh.trainer.step import EXTRA, StepResult, accumulate, finish_step

Say = Callable[[str], object]


def loader_settings(config: TrainConfig, ranks: int) -> LoaderSettings:
    """The loader's settings for this job: its mesh and its cost model."""
    settings = replace(config.loader, ranks=ranks, cost=config.cost_model())
    settings.check_mesh()
    return settings


class Job:
    """One rank's part of a training job: model, optimizer, loader and logs. `run` is the loop."""

    def __init__(self, config: TrainConfig, ranks: Ranks, loader: Loader, say: Say) -> None:
        self.config = config
        self.ranks = ranks
        self.loader = loader
        self.folder = Path(config.run)
        self.say: Say = say if ranks.is_first else lambda _text: None
        self.model = Transformer(config.model, seed=config.seed).to(ranks.device, getattr(torch, config.dtype))
        self.replica = make_replica(self.model, ranks, config.loader.mode, extra=EXTRA)
        self.optimizer = make_optimizer(self.model.parameters(), config.optim)
        self.traffic = Traffic()
        self.cost = cost_digest(loader.settings.cost or CostModel())
        self.agreed = ""  # digest of the plan that all ranks are known to have for the next step
        self.step = 0  # steps done
        self.saved = 0  # the step of the newest checkpoint
        self.saver = Saver(
            self.folder, self.tensors(), ranks, config=config.checkpoint, timeout=config.timeout, say=self.say
        )

    def tensors(self) -> Saved:
        """What a checkpoint holds, each tensor the storage that the next step changes."""
        return saved_tensors(self.model, self.optimizer)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, the same one on all ranks; begin at 0 where there is none."""
        if self.ranks.is_first:
            clear_leftovers(self.folder, self.say)
        path = newest_checkpoint(self.folder, self.ranks, self.say)
        if path is None:
            return
        state = load(path, self.tensors(), self.ranks).state
        loaded(self.optimizer)
        self.loader.load_state_dict(state["loader"])
        self.step = self.saved = state["step"]
        self.say(f"resumed from {path}")
        if state.get("cost", self.cost) != self.cost:
            self.say("its cost model was another: the same global batches may be spread over the ranks in another way")

    def run(self) -> None:
        """All steps that are left, and their checkpoints; stops early where the data end."""
        with self.saver:
            self._run()

    def _run(self) -> None:
        log = JsonLines(self.folder / "log.jsonl") if self.ranks.is_first else None
        batches_log = JsonLines(self.folder / f"batches-{self.ranks.rank}.jsonl")
        began, first_step = time.perf_counter(), self.step
        clock = StepClock()
        batches = iter(self.loader)
        try:
            while self.step < self.config.steps and (done := self._next_step(batches, clock)) is not None:
                result, last, digest = done
                batches_log.write({"step": self.step, "digest": digest})
                record = make_record(
                    result,
                    clock,
                    step=self.step,
                    epoch=last.epoch,
                    tokens=last.tokens_in_step,
                    rings=last.rings_in_step,
                    ring_bytes=self.traffic.sent,
                    imbalance=last.imbalance,
                )
                self.traffic = Traffic()
                clock.restart()
                if log:
                    log.write(record)
                left = (time.perf_counter() - began) / (self.step - first_step) * (self.config.steps - self.step)
                self.say(step_line(record, self.config.steps, left))
                with clock.phase("save"):
                    self.saver.check()
                    self._save_if_due(last_step=self.step == self.config.steps)
            if self.step < self.config.steps:
                self.say(f"the data end after step {self.step} of {self.config.steps}")
                self._save_if_due(last_step=True)
        finally:
            batches_log.close()
            if log:
                log.close()

    def _next_step(
        self, batches: Iterator[PackedBatch[Tensor]], clock: StepClock
    ) -> tuple[StepResult, PackedBatch[Tensor], str] | None:
        with self.ranks.naming_the_lost(f"rank {self.ranks.rank}, step {self.step + 1}"):
            return self._do_step(batches, clock)

    def _do_step(
        self, batches: Iterator[PackedBatch[Tensor]], clock: StepClock
    ) -> tuple[StepResult, PackedBatch[Tensor], str] | None:
        """One step, the last of its batches, and the digest of them all; None where the data end."""
        digests: list[str] = []
        while True:
            with clock.phase("data"):
                batch = next(batches, None)
            if batch is None:
                return None
            if self.agreed != batch.plan:
                self._agree(batch.plan, batch.step)
            digests.append(batch_digest(batch.map(lambda _name, tensor: tensor.cpu())))
            with clock.phase("compute"):
                accumulate(self.model, batch, self.replica, self.loader.settings.capacity, self.traffic)
            if batch.last_in_step:
                break
        with clock.phase("reduce"):
            self.replica.reduce_()
            self._agree(batch.next_plan, batch.step + 1)
        with clock.phase("update"):
            result = finish_step(
                self.replica,
                self.optimizer,
                self.config.optim,
                supervised=batch.supervised_tokens_in_step,
                step=self.step,
                steps=self.config.steps,
            )
        self.step += 1
        return result, batch, step_digest(digests)

    def _agree(self, plan: str, step: int) -> None:
        """One step ahead of its work: all ranks must have the same plan, or they would wait for each other for ever."""
        self.ranks.agree(plan, f"the plan of step {step + 1}")
        self.agreed = plan

    def _save_if_due(self, *, last_step: bool) -> None:
        if self.step == self.saved or not (last_step or self.step % self.config.checkpoint.every == 0):
            return
        state = {"ranks": self.ranks.count, "cost": self.cost, "model": asdict(self.config.model)}
        if self.ranks.is_first:
            state["loader"] = self.loader.state_dict()
        self.saver.save(self.step, self.tensors(), state)
        self.saved = self.step


def saved_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    """Parameters, and the optimizer's state of each, made as it is before the first update where it is not there."""
    tensors: Saved = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            state |= {"step": torch.zeros((), device=parameter.device)}
            state |= {slot: torch.zeros_like(parameter) for slot in ("exp_avg", "exp_avg_sq")}
        tensors[f"model/{name}"] = parameter
        tensors |= {f"optimizer/{name}/{slot}": state[slot] for slot in ("exp_avg", "exp_avg_sq")}
        tensors.setdefault("optimizer/step", state["step"])
    return tensors


def loaded(optimizer: torch.optim.Optimizer) -> None:
    """After the tensors of `saved_tensors` were loaded: every parameter's count of steps is that of the first."""
    counts = [state["step"] for state in optimizer.state.values()]
    for count in counts[1:]:
        count.copy_(counts[0])


def train(config: TrainConfig, say: Say = print) -> int:
    """Run the job on this rank; returns the steps done. `say` gets the first rank's lines.

    Raises ValueError for a configuration that does not fit the data, RuntimeError where another job uses the run
    folder, LoaderError, CheckpointError, and what torch.distributed raises where another rank is lost.
    """
    with join_ranks(config.timeout) as ranks, _claim(Path(config.run), ranks):
        if ranks.is_first:
            save_config(config, Path(config.run) / "config.yaml")
        settings = loader_settings(config, ranks.count)
        ranks.agree(cost_digest(settings.cost or CostModel()), "the digest of the cost model")
        with Loader(settings, device=ranks.device, timeout=config.timeout, credit_bytes=config.credit_bytes) as loader:
            _check_vocabulary(config, loader)
            job = Job(config, ranks, loader, say)
            job.resume()
            job.run()
            ranks.wait_for_all()  # the loader of this machine ends with its first rank: not before all have their data
            return job.step


@contextmanager
def _claim(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Make the run folder and keep other jobs out of it while this one runs, or dies in whatever way."""
    if not ranks.is_first:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", blocking=False):
            yield
    except filelock.Timeout:
        raise RuntimeError(f"{folder} is in use by another training job: wait for it, or choose another run") from None


def _check_vocabulary(config: TrainConfig, loader: Loader) -> None:
    if config.model.vocab_size < loader.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}: the shards' tokenizer has {loader.vocab_size} ids"
        )


def main(arguments: list[str]) -> int:
    """`CONFIG.yaml key=value...`; returns the exit code."""
    end_with_parent()
    try:
        train(load_config(arguments[0], arguments[1:]), say=_print)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("SEQMESH_DEBUG"):
            raise
        _print(f"error: rank {os.environ.get('RANK', '0')}: {error}")
        return 1
    return 0


def _print(text: Any) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
