"""`Child`: one loader process that this process started; `process` decides when to start and end them.

It is started with `python -m`, never forked, in a process group of its own, so that Ctrl-C reaches the training job
alone, which may still want batches.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.logs import message_of
from seqmesh.loader.order import FINAL, READY, STANDBY, STOP, Order
from seqmesh.loader.ready import first_readable

STOP_SECONDS = 2.0  # after each of: asking, SIGTERM


class Child:
    """A loader process, from its start to its end. log: what it writes to its error output goes to the end of that."""

    def __init__(self, order: Order, log: Path) -> None:
        """Start it; `wait` tells when it serves."""
        self._log = log
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "seqmesh.loader.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                bufsize=0,
                process_group=0,
            )
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # its log says why
            self._process.stdin.write(order.to_json().encode() + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_final(self) -> bool:
        """Whether it has ended in a way after which another would end alike, or was wanted to end."""
        return self._process.poll() in FINAL

    def wait(self, stop: int, timeout: float) -> None:
        """Wait until it serves, or stands by where it was to. Raises LoaderError with its own words where it refuses,
        LoaderTimeoutError where it is not up in time; stop: a descriptor that ends the wait."""
        assert self._process.stdout
        ready = first_readable(self._process.stdout.fileno(), stop, seconds=timeout)
        if ready is None:
            raise LoaderTimeoutError(f"the loader process was not ready within {timeout:g} s: {self._last_words()}")
        if ready == stop:
            raise LoaderError("the loader process was stopped while it started")
        if self._process.stdout.readline() not in (READY, STANDBY):
            self._process.wait()
            raise LoaderError(self.words_of_its_end())

    def open_end(self) -> int | None:
        """A pidfd, which becomes readable at its end; None where it has ended."""
        try:
            return os.pidfd_open(self.pid) if self._process.returncode is None else None
        except ProcessLookupError:  # another thread has just looked how it ended
            return None

    def end(self, word: bytes = STOP) -> None:
        """End it: ask, then insist."""
        assert self._process.stdin and self._process.stdout
        for insist in (self._process.terminate, self._process.kill):
            with contextlib.suppress(BrokenPipeError, ValueError):  # dead already; asked already
                self._process.stdin.write(word)
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
                break
            insist()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def words_of_its_end(self) -> str | None:
        """How it ended; None while it runs."""
        code = self._process.poll()
        return None if code is None else f"the loader process ended with exit code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return message_of(lines[-1]) if lines else "it left no message"
