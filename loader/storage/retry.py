"""Asking a storage again: a few times, with growing pauses, until a deadline.

Takes a function that asks once, gives its answer. What another try can not mend (nothing is there, no permission, a
fault of ours) ends at once. Messages show no password, wherever it came from. Knows nothing of storages.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from seqmesh.loader.errors import RemoteError

T = TypeVar("T")

GROWTH = 3  # of the pauses
REFUSED, GONE = {401, 403}, {404, 410}  # HTTP answers
WORTH_ANOTHER_TRY = {408, 425, 429}  # of those below 500
FAULTS = (TypeError, AttributeError, ValueError, NotImplementedError, ImportError, RemoteError)
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """tries: at most so many for one thing; seconds: for all of them together; pause: seconds after the first that
    failed, three times as long after each other."""

    seconds: float = 60.0
    tries: int = 6
    pause: float = 0.25

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries is {self.tries}: must be at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}: must be more than 0")


def without_password(text: str) -> str:
    """The same text, with `***` for the password of every URL in it."""
    return PASSWORD.sub(r"\1:***@", text)


def persist(ask: Callable[[float], T], what: str, patience: Patience) -> T:
    """What `ask` gives, which is told how many seconds it has. what: what it does, for messages ("reading ...").

    Raises FileNotFoundError where there is nothing, RemoteError where it is refused or failed too often.
    """
    began, pause, reason = time.monotonic(), patience.pause, ""
    for tried in range(1, patience.tries + 1):
        left = began + patience.seconds - time.monotonic()
        try:  # one that hangs leaves time for others
            return ask(max(left if tried == patience.tries else left / 2, 0.001))
        except Exception as caught:
            error = _meant(caught)
            reason = _said(error)
            if not _may_mend(error):
                raise _refused(error, what) from None  # its context might show a password
        left = began + patience.seconds - time.monotonic()
        if tried == patience.tries or left <= pause:
            break
        time.sleep(pause * random.uniform(0.75, 1.25))  # so that those who failed together do not come together
        pause *= GROWTH
    raise RemoteError(
        without_password(
            f"{what}: failed {tried} times in {time.monotonic() - began:.1f} s, last: {reason}; check the network and "
            "that the storage answers, then start again"
        )
    )


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` gives. It runs in a thread of its own, which is left alone after so many seconds: TimeoutError."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(timeout=seconds)


def _meant(error: Exception) -> Exception:
    """Over HTTP fsspec says of all that it can not ask about that it is not there."""
    cause = error.__cause__
    could_not_ask = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and could_not_ask else error


def _status(error: Exception) -> int:
    """Of an answer over HTTP; 0 for all else."""
    status = getattr(error, "status", 0)
    return status if isinstance(status, int) else 0


def _may_mend(error: Exception) -> bool:
    if status := _status(error):
        return status >= 500 or status in WORTH_ANOTHER_TRY
    final = (PermissionError, *NOT_THERE, *FAULTS)
    return not isinstance(error, final) and not _lacks_credentials(error)


def _lacks_credentials(error: Exception) -> bool:
    return "Credentials" in type(error).__name__  # of botocore, which is not imported here


def _refused(error: Exception, what: str) -> Exception:
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, NOT_THERE) or _status(error) in GONE:
        return FileNotFoundError(without_password(f"{what}: there is no such file ({_said(error)})"))
    denied = _lacks_credentials(error) or isinstance(error, PermissionError) or _status(error) in REFUSED
    advice = "check the credentials, and that they may read it" if denied else "another try would not mend it"
    return RemoteError(without_password(f"{what}: refused: {_said(error)}; {advice}"))


def _said(error: Exception) -> str:
    """One line; some errors say nothing but their name."""
    text = " ".join(str(error).split()) or ("no answer in time" if isinstance(error, TimeoutError) else "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
