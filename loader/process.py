"""`LoaderProcess`: starts the dedicated loader process of this machine, watches it, starts it again, ends it.

It is started with `python -m`, never forked, in a process group of its own, so that Ctrl-C reaches the training job
alone, which may still want batches. Its socket and its log lie in a private folder (mode 0700) with a random name. It
ends when it is told to, and by itself when its owner is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.order import FINAL, STOP, STOP_AND_CLEAR_UP, Order
from seqmesh.loader.settings import LoaderSettings

START_SECONDS = 120.0  # compiling the routines for the first time on a busy machine takes most of it
STOP_SECONDS = 2.0  # after each of: asking, SIGTERM
MAX_SOCKET_PATH = 107  # sun_path of a Unix socket, without its final zero

log = logging.getLogger("seqmesh.loader")


class LoaderProcess:
    """A running loader process. `endpoint` is what the ranks of this machine connect to.

    With `restarts`, a thread starts it again, that often in all, whenever it dies: the rank that owns it may be
    computing, or waiting for another rank that waits for the loader. Not where it refuses its data, or was ended by
    SIGTERM or SIGINT: see `order.FINAL`.
    """

    def __init__(self, settings: LoaderSettings, *, timeout: float = START_SECONDS, restarts: int = 0) -> None:
        """Start it and wait until it serves, for `timeout` seconds; so with every restart.

        Raises LoaderError with its own words where it refuses, LoaderTimeoutError where it is not up in time.
        """
        if restarts < 0:
            raise ValueError(f"restarts is {restarts}: must be at least 0")
        self._timeout = timeout
        self._folder = private_folder()
        self.endpoint = f"ipc://{self._folder / 'loader'}"
        self.log = self._folder / "log"
        self._order = Order(
            settings=settings.resolved(), endpoint=self.endpoint, owner=os.getpid(), folder=str(self._folder)
        )
        self._lock = threading.Lock()  # whoever starts, ends or reaps a process holds it
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)  # readable from the first `stop` on
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: str | None = None
        self._keeper: threading.Thread | None = None
        try:
            with self._lock:
                self._start()
        except BaseException:
            self.stop()
            raise
        if restarts:
            self._keeper = threading.Thread(target=self._keep, args=(restarts,), name="loader keeper", daemon=True)
            self._keeper.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        """Raises LoaderError if the process has ended and is not started again."""
        if self._keeper is None:
            with self._lock:
                self._failure = self._words_of_its_end()
        if self._failure:
            raise LoaderError(self._failure)

    def restart(self) -> None:
        """Start a new process at the same endpoint in place of the present one. Ranks that are connected go on at
        their exact next batch. Raises what `__init__` raises."""
        with self._lock:
            self._end()
            self._start()

    def stop(self) -> None:
        """End the process, within seconds, and remove its folder. Does nothing the second time."""
        if self._stopped:
            return
        self._stopped = True
        os.eventfd_write(self._stop, 1)
        with self._lock:
            self._end(STOP_AND_CLEAR_UP)
        if self._keeper:
            self._keeper.join()
        os.close(self._stop)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        """Start a process and wait until it serves. Raises what `__init__` raises."""
        if len(os.fsencode(path := self.endpoint.removeprefix("ipc://"))) > MAX_SOCKET_PATH:
            raise LoaderError(
                f"{path}: over {MAX_SOCKET_PATH} bytes, too long for a socket; set TMPDIR to a shorter one"
            )
        with self.log.open("ab") as log_file:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "seqmesh.loader.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                bufsize=0,
                process_group=0,
            )
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):  # its log says why
            process.stdin.write(self._order.to_json().encode() + b"\n")
        ready = _first_readable(process.stdout.fileno(), self._stop, seconds=self._timeout)
        if ready is None:
            raise LoaderTimeoutError(
                f"the loader process was not ready within {self._timeout:g} s: {self._last_words()}"
            )
        if ready == self._stop:
            raise LoaderError("the loader process was stopped while it started")
        if process.stdout.readline() != b"ready\n":
            process.wait()
            raise LoaderError(self._words_of_its_end())

    def _end(self, word: bytes = STOP) -> None:
        """End the process if there is one: ask, then insist."""
        if (process := self._process) is None:
            return
        assert process.stdin and process.stdout
        for insist in (process.terminate, process.kill):
            with contextlib.suppress(BrokenPipeError, ValueError):  # dead already; asked already
                process.stdin.write(word)
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
                break
            insist()
        process.wait()
        process.stdin.close()
        process.stdout.close()

    def _keep(self, restarts: int) -> None:
        """Start the process again whenever it dies, until `stop`. The keeper's thread."""
        while self._wait_for_its_end():
            try:
                with self._lock:
                    restarts = self._revive(restarts)
            except (LoaderError, OSError) as error:
                self._failure = str(error)
                return

    def _wait_for_its_end(self) -> bool:
        """Wait until the process ends: True, or `stop` is called: False."""
        with self._lock:
            if self._stopped:
                return False
            if self._process is None or self._process.returncode is not None:
                return True  # a restart failed
            end = os.pidfd_open(self._process.pid)
        try:
            return _first_readable(end, self._stop) == end
        finally:
            os.close(end)

    def _revive(self, restarts: int) -> int:
        """Start the process again if it is dead; how many restarts are left. Raises LoaderError where it stays dead."""
        if self._stopped or (words := self._words_of_its_end()) is None:
            return restarts  # `stop` or `restart` was quicker
        assert self._process is not None
        if restarts == 0 or self._process.returncode in FINAL:
            raise LoaderError(words)
        log.warning("%s; starting it again, %d restarts left", words, restarts - 1)
        self._end()
        try:
            self._start()
        except LoaderTimeoutError:
            self._end()
            raise
        except LoaderError:
            log.warning("the new loader process did not come up")  # it is dead, too: the next round says more
        return restarts - 1

    def _words_of_its_end(self) -> str | None:
        """How the process ended; None while it runs."""
        code = self._process.poll() if self._process else None
        return None if code is None else f"the loader process ended with exit code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1] if lines else "it left no message"


def _first_readable(*descriptors: int, seconds: float | None = None) -> int | None:
    """Wait for the first of the descriptors that can be read, or is at its end; of several, the last: to be stopped
    matters most. None when time is up. `poll`, since `select` takes no descriptor over 1023."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(None if seconds is None else seconds * 1000)}
    return next((descriptor for descriptor in reversed(descriptors) if descriptor in ready), None)


def private_folder() -> Path:
    """A new folder with a random name that only this user can enter, in the user's runtime folder where there is one,
    else in the place of temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(tempfile.mkdtemp(prefix="seqmesh-", dir=runtime if runtime and os.access(runtime, os.W_OK) else None))
