"""Run a function on several real ranks (gloo), each a process from one forkserver that has torch loaded already.

    results = run_ranks(work, 3, argument)    # work(ranks: Ranks, argument) on each rank; its return values in order

Every run has a deadline; when a rank fails or time is up, all are killed and the failure is shown.
"""

import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch forgets to export it

from seqmesh.trainer.parallel import join_ranks
from tests.warm import CONTEXT

SECONDS = 90.0

_context = CONTEXT


def run_ranks(
    work: Callable[..., Any],
    count: int,
    *arguments: Any,
    seconds: float = SECONDS,
    before: Callable[[], None] | None = None,
    join: bool = True,
) -> list[Any]:
    """Call `work(ranks, *arguments)` on each of `count` ranks; returns what they returned, which must pickle. before:
    called in each process before it joins the others. join: False to leave that to `work(*arguments)`."""
    store = new_store()
    pipes, processes = [], []
    for rank in range(count):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_main, args=(work, rank, count, store.port, sender, arguments, before, join), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes, seconds)
    finally:
        _end(processes)


def new_store() -> TCPStore:
    """What processes meet in, at `port`."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start_process(work: Callable[..., Any], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Call `work(pipe, *arguments)` in a process of its own, which has torch already; the other end of its pipe."""
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=work, args=(sender, *arguments), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in missing], max(deadline - time.monotonic(), 0))
        assert ready, f"ranks {missing} did not finish within {seconds:g} s"
        for rank in (rank for rank in missing if pipes[rank] in ready):
            try:
                succeeded, value = pipes[rank].recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            assert succeeded, f"rank {rank} failed:\n{value}"
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _main(
    work: Callable[..., Any],
    rank: int,
    count: int,
    port: int,
    sender: Connection,
    arguments: tuple[Any, ...],
    before: Callable[[], None] | None,
    join: bool,
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        if before:
            before()
        if join:
            with join_ranks(SECONDS) as ranks:
                value = work(ranks, *arguments)
        else:
            value = work(*arguments)
        sender.send((True, value))
    except BaseException:
        sender.send((False, traceback.format_exc()))
