"""`seqmesh train`: checks the configuration here, once, then has torchrun start the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from seqmesh.loader.formats.detect import find_set
from seqmesh.trainer.config import load_config


def run(*, config: Path, overrides: Sequence[str]) -> None:
    """The whole command. Raises ValueError or FileNotFoundError for what is wrong before any rank starts, RuntimeError
    naming the rank that failed after."""
    job = load_config(config, overrides)
    find_set(job.loader.data, job.loader.reading)
    # Ranks of one machine share its cores; without this each would use them all.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // job.ranks)))
    ranks = ["--standalone", "--nproc-per-node", str(job.ranks)]
    command = [*ranks, "-m", "seqmesh.trainer.train", str(config), *overrides]
    try:
        torchrun.run(torchrun.parse_args(command))  # type: ignore[no-untyped-call]  # torch leaves them untyped
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RuntimeError(f"rank {rank} ended with exit code {failure.exitcode}; its own words are above") from None
