"""The frame of a rank that `seqmesh.benchmarks.ranks` has started: read the job, measure, let the first rank write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter

from seqmesh.trainer.parallel import Ranks, end_with_parent, join_ranks

TIMEOUT = 120.0  # seconds for any exchange
JobT = TypeVar("JobT")


def answer(kind: type[JobT], measure: Callable[[JobT, Ranks], Any]) -> None:
    """Main of the module: `JOB OUT` are paths; the job is read as `kind`, what `measure` returns is a dataclass."""
    job, out = sys.argv[1:]
    end_with_parent()
    with join_ranks(TIMEOUT) as ranks:
        measured = measure(TypeAdapter(kind).validate_json(Path(job).read_bytes()), ranks)
    if ranks.is_first:
        Path(out).write_text(json.dumps(asdict(measured)))


def by_rank(number: float, ranks: Ranks) -> list[float]:
    """Every rank's number; whole ones are exact up to 2^53."""
    own = torch.zeros(ranks.count, dtype=torch.float64, device=ranks.device)
    own[ranks.rank] = number
    ranks.sum_(own)
    return [float(each) for each in own]
