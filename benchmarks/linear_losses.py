"""The loss of a linear layer, forward and backward, as each candidate computes it.

`python -m seqmesh.benchmarks.linear_losses NAME ROWS WIDTH VOCABULARY DTYPE` runs a candidate once in a fresh process
and prints, as JSON, the peak of its memory over what was held before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from seqmesh.benchmarks.processes import held_bytes, reset_peak
from seqmesh.kernels.loss import linear_cross_entropy_sum

TIMEOUT = 300  # seconds
BLOCK = 256  # rows of the truth at a time

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    rows: int
    width: int
    vocabulary: int
    dtype: str

    @property
    def name(self) -> str:
        return f"loss, {self.rows:,} rows, width {self.width:,}, {self.vocabulary:,} words, {self.dtype}"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """hidden, weight, labels: logits have a standard deviation of 1."""
        generator, dtype = torch.Generator().manual_seed(0), getattr(torch, self.dtype)
        hidden = torch.randn(self.rows, self.width, generator=generator).to(dtype)
        weight = torch.randn(self.vocabulary, self.width, generator=generator).mul_(self.width**-0.5).to(dtype)
        labels = torch.randint(0, self.vocabulary, (self.rows,), generator=generator)
        return hidden.requires_grad_(), weight.requires_grad_(), labels


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy_sum(hidden, weight, labels, backend="chunked")[0]


def logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")


def torch_chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's own, of 2.13 on."""
    total: Tensor = functional.linear_cross_entropy(
        hidden, weight, labels, reduction="sum", options=torch.nn.LinearCrossEntropyOptions()
    )
    return total


SEQMESH, LOGITS, TORCH = "seqmesh", "all logits", "torch linear_cross_entropy"
CANDIDATES: dict[str, Loss] = {SEQMESH: chunked, LOGITS: logits, TORCH: torch_chunked}


def available(name: str) -> bool:
    return name != TORCH or hasattr(functional, "linear_cross_entropy")


def step(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """Forward and backward of the mean; the sum."""
    hidden, weight, labels = inputs
    total = loss(hidden, weight, labels)
    torch.autograd.grad(total / len(labels), (hidden, weight))
    return float(total.detach())


def truth(inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """The sum in float64."""
    hidden, weight, labels = (x.detach() for x in inputs)
    wide = weight.double()
    blocks = [slice(start, start + BLOCK) for start in range(0, len(hidden), BLOCK)]
    return sum(float(logits(hidden[rows].double(), wide, labels[rows])) for rows in blocks)


def extra_bytes(name: str, case: Case) -> int:
    """Peak memory of one step over what was held before, inputs included, in a process of its own."""
    command = [sys.executable, "-m", __name__, name, *map(str, astuple(case))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


def measure_here(name: str, case: Case) -> dict[str, int]:
    """The same in this process, after a small step that loads whatever is loaded at first."""
    torch.set_num_threads(1)
    step(CANDIDATES[name], Case(64, case.width, 512, case.dtype).inputs())
    inputs = case.inputs()
    reset_peak()
    before = held_bytes("VmRSS")
    step(CANDIDATES[name], inputs)
    return {"bytes": max(0, held_bytes("VmHWM") - before)}


if __name__ == "__main__":
    rows, width, vocabulary = map(int, sys.argv[2:5])
    print(json.dumps(measure_here(sys.argv[1], Case(rows, width, vocabulary, sys.argv[5]))))  # noqa: T201
