"""`seqmesh train`: checks the configuration here, once, then has torchrun start the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from seqmesh.loader.formats.detect import find_set
from seqmesh.trainer.config import load_config, to_yaml
from seqmesh.trainer.logs import check_installed

# torchrun gives ranks that it ends so many seconds before it kills them. A stopped one would have it wait for all of
# them, and none has anything to do in that time: a rank that is killed leaves nothing behind.
SHUTDOWN_SECONDS = 3


def run(*, config: Path, overrides: Sequence[str], max_restarts: int = 0) -> None:
    """The whole command. max_restarts: how often all ranks are started again after one has failed. Raises ValueError
    or FileNotFoundError for what is wrong before any rank starts, RuntimeError naming the rank that failed after."""
    job = load_config(config, overrides)
    job.parallel.replicas(job.ranks)
    find_set(job.loader.data, job.loader.reading)
    check_installed(job.log)
    # Ranks of one machine share its cores; without this each would use them all.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // job.ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    # Where one rank has failed, torch 2.13 ends the others without a look at that: by this default.
    PContext.close.__defaults__ = (None, SHUTDOWN_SECONDS)
    if max_restarts:  # in torchrun's own store, restarted ranks find addresses of those before
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    ranks = ["--standalone", "--nproc-per-node", str(job.ranks), "--max-restarts", str(max_restarts)]
    command = [*ranks, "-m", "seqmesh.trainer.train", str(config), *overrides]
    try:
        torchrun.run(torchrun.parse_args(command))  # type: ignore[no-untyped-call]  # torch leaves them untyped
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RuntimeError(f"rank {rank} ended with exit code {failure.exitcode}; its own words are above") from None


def show(*, config: Path, overrides: Sequence[str]) -> None:
    """Print the resolved settings, as a file that can be started in its turn."""
    sys.stdout.write(to_yaml(load_config(config, overrides)))
