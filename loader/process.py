"""`LoaderProcess`: starts the dedicated loader process of this machine, watches it, ends it.

It is started with `python -m`, never forked. Its socket and its log lie in a private folder (mode 0700) with a random
name. It ends when it is told to, and by itself when its owner is gone.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.server import Order
from seqmesh.loader.settings import LoaderSettings

START_SECONDS = 120.0  # compiling the routines for the first time on a busy machine takes most of it
STOP_SECONDS = 5.0
MAX_SOCKET_PATH = 107  # sun_path of a Unix socket, without its final zero


class LoaderProcess:
    """A running loader process. `endpoint` is what the ranks of this machine connect to."""

    def __init__(self, settings: LoaderSettings, *, timeout: float = START_SECONDS) -> None:
        """Start it and wait until it serves.

        Raises LoaderError with its own words where it refuses, LoaderTimeoutError where it is not up in time.
        """
        self._folder = private_folder()
        self.endpoint = f"ipc://{self._folder / 'loader'}"
        self.log = self._folder / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "seqmesh.loader.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            self._order(Order(settings=settings.resolved(), endpoint=self.endpoint, owner=os.getpid()))
            self._wait_ready(timeout)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises LoaderError if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise LoaderError(f"the loader process ended with exit code {code}: {self._last_words()}")

    def stop(self) -> None:
        """End the process and remove its folder. Does nothing the second time."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _order(self, order: Order) -> None:
        path = order.endpoint.removeprefix("ipc://")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise LoaderError(
                f"{path}: over {MAX_SOCKET_PATH} bytes, too long for a socket; set TMPDIR to a shorter one"
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order.to_json().encode() + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            self._process.wait()
            self.check()

    def _wait_ready(self, timeout: float) -> None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not readable:
            raise LoaderTimeoutError(f"the loader process was not ready within {timeout:g} s: {self._last_words()}")
        if self._process.stdout.readline() != b"ready\n":
            self._process.wait()
            self.check()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1] if lines else "it left no message"


def private_folder() -> Path:
    """A new folder with a random name that only this user can enter, in the user's runtime folder where there is one,
    else in the place of temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(tempfile.mkdtemp(prefix="seqmesh-", dir=runtime if runtime and os.access(runtime, os.W_OK) else None))
