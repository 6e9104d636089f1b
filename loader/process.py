"""`LoaderProcess`: starts the dedicated loader process of this machine, watches it, starts it again, ends it.

Its socket and its log lie in a private folder (mode 0700) with a random name. It ends when it is told to, and by itself
when its owner is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Self

from seqmesh.loader.child import Child
from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.folder import private_folder
from seqmesh.loader.handover import check_length
from seqmesh.loader.order import STOP, STOP_AND_CLEAR_UP, Order, ServeOptions
from seqmesh.loader.ready import first_readable
from seqmesh.loader.settings import LoaderSettings

START_SECONDS = 120.0  # compiling the routines for the first time on a busy machine takes most of it

log = logging.getLogger("seqmesh.loader")


class LoaderProcess:
    """A running loader process. `endpoint` is what the ranks of this machine connect to.

    With `restarts`, a thread starts it again, that often in all, whenever it dies: the rank that owns it may be
    computing, or waiting for another rank that waits for the loader. Not where it refuses its data, or was ended by
    SIGTERM or SIGINT: see `order.FINAL`. With `standby` a second process has opened the data, too, and takes over
    within a fraction of a second when the first dies; its own place is then filled again, as a restart.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        *,
        timeout: float = START_SECONDS,
        restarts: int = 0,
        standby: bool = False,
        options: ServeOptions | None = None,
        log: Path | None = None,
    ) -> None:
        """Start it and wait until it serves, for `timeout` seconds; so with every restart. log: file to add its log to
        (JSON, one object a line), by default one that is removed at the end.

        Raises LoaderError with its own words where it refuses, LoaderTimeoutError where it is not up in time.
        """
        if restarts < 0:
            raise ValueError(f"restarts is {restarts}: must be at least 0")
        self._timeout = timeout
        self._folder = private_folder()
        self.endpoint = f"ipc://{self._folder / 'loader'}"
        self.log = log or self._folder / "log"
        self.restarted = 0  # times so far
        self._order = Order(
            settings=settings.resolved(),
            endpoint=self.endpoint,
            owner=os.getpid(),
            folder=str(self._folder),
            options=options or ServeOptions(),
        )
        self._places = 2 if standby else 1
        self._lock = threading.Lock()  # whoever starts, ends or reaps a process holds it
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)  # readable from the first `stop` on
        self._stopped = False
        self._children: list[Child] = []  # the oldest serves, the next stands by
        self._newest = 0  # process that was started
        self._failure: str | None = None
        self._keeper: threading.Thread | None = None
        try:
            with self._lock:
                self._fill_places()
        except BaseException:
            self.stop()
            raise
        if restarts:
            self._keeper = threading.Thread(target=self._keep, args=(restarts,), name="loader keeper", daemon=True)
            self._keeper.start()

    @property
    def pid(self) -> int:
        """Of the process that serves, or is about to."""
        living = (child.pid for child in [*self._children] if child.words_of_its_end() is None)
        return next(living, self._newest)  # none lives while the keeper puts another in its place

    def check(self) -> None:
        """Raises LoaderError if the process has ended and nothing takes its place."""
        if self._keeper is None:
            with self._lock:
                ends = [child.words_of_its_end() for child in self._children]
                self._failure = ends[-1] if all(ends) else None
        if self._failure:
            raise LoaderError(self._failure)

    def restart(self) -> None:
        """Put a new process in place of the present one. Ranks that are connected go on at their exact next batch.
        Raises what `__init__` raises."""
        with self._lock:
            self._children.pop(0).end()
            self._fill_places()

    def stop(self) -> None:
        """End the process, within seconds, and remove its folder. Does nothing the second time, nor in a process that
        was forked from the owner."""
        if self._stopped or os.getpid() != self._order.owner:
            return
        self._stopped = True
        os.eventfd_write(self._stop, 1)
        with self._lock:
            for child in reversed(self._children):  # the one that stands by first: it must not take over
                child.end(STOP_AND_CLEAR_UP if child is self._children[0] else STOP)
        if self._keeper:
            self._keeper.join()
        os.close(self._stop)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _fill_places(self) -> None:
        """Start as many processes as are missing. Raises what `__init__` raises."""
        try:
            check_length(self.endpoint)
        except ValueError as error:
            raise LoaderError(f"{error}: set TMPDIR to one") from error
        while len(self._children) < self._places:
            options = replace(self._order.options, standby=bool(self._children))
            child = Child(replace(self._order, options=options), self.log)
            self._children.append(child)
            self._newest = child.pid
            child.wait(self._stop, self._timeout)

    def _keep(self, restarts: int) -> None:
        """Start a process again whenever one dies, until `stop`. The keeper's thread."""
        while self._wait_for_an_end():
            try:
                with self._lock:
                    restarts = self._revive(restarts)
            except (LoaderError, OSError) as error:
                self._failure = str(error)
                return

    def _wait_for_an_end(self) -> bool:
        """Wait until a process ends: True, or `stop` is called: False."""
        with contextlib.ExitStack() as stack:
            with self._lock:
                if self._stopped:
                    return False
                ends = [child.open_end() for child in self._children]
                for end in ends:
                    if end is not None:
                        stack.callback(os.close, end)
            if not ends or None in ends:
                return True  # a restart failed
            return first_readable(*(end for end in ends if end is not None), self._stop) != self._stop

    def _revive(self, restarts: int) -> int:
        """Replace a dead process; how many restarts are left. Raises LoaderError where it stays dead."""
        dead = next((child for child in self._children if child.words_of_its_end()), None)
        if self._stopped or dead is None:
            return restarts  # `stop` or `restart` was quicker
        words = dead.words_of_its_end()
        final = restarts == 0 or dead.is_final
        if final and len(self._children) == 1:
            raise LoaderError(words)
        if final:  # the other one serves on
            log.warning("%s; going on without it", words)
            self._places = 1
        else:
            log.warning("%s; starting it again, %d restarts left", words, restarts - 1)
        self._children.remove(dead)
        dead.end()
        self.restarted += not final
        if final:
            return restarts
        try:
            self._fill_places()
        except LoaderTimeoutError:
            self._children.pop().end()
            raise
        except LoaderError:
            log.warning("the new loader process did not come up")  # it is dead, too: the next round says more
        return restarts - 1
