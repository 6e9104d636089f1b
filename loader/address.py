"""`Address`: where a loader is, as somebody says who may be slow, who may fail for a while, and who may say something
else later.

Asked in a thread, so that a rank never waits for an answer: it reads `answer` when it has nothing better to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PAUSE_SECONDS = 1.0  # between two questions at least


class Address:
    """`answer`: the newest, None before the first. `trouble`: why the last question got none; empty where it did."""

    def __init__(self, endpoint: str | Callable[[], str]) -> None:
        """endpoint: an address for good, or what is to be asked for it."""
        self.answer = endpoint if isinstance(endpoint, str) else None
        self.trouble = ""
        self._ask = None if isinstance(endpoint, str) else endpoint
        self._thread: threading.Thread | None = None
        self._asked = 0.0  # seconds of the monotonic clock

    def ask(self) -> None:
        """Ask again, unless the last question is open or was a moment ago. Never waits."""
        if self._ask is None or (self._thread and self._thread.is_alive()):
            return
        if self._thread and time.monotonic() - self._asked < PAUSE_SECONDS:
            return
        self._asked = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(self._ask,), name="loader address", daemon=True)
        self._thread.start()

    def refuse(self, why: str) -> None:
        """The answer can not be used; the next may."""
        self.answer, self.trouble = None, why

    def words_of_trouble(self) -> str:
        """What is wrong with the answers, for the end of a sentence; empty: nothing."""
        if self.trouble:
            return f"; who is asked for its address fails: {self.trouble}"
        if self._thread and self._thread.is_alive():
            return f"; who is asked for its address has said nothing for {time.monotonic() - self._asked:.1f} s"
        return ""

    def _run(self, ask: Callable[[], str]) -> None:
        try:
            answer = ask()
            if not isinstance(answer, str):
                raise TypeError(f"the address is {answer!r}: must be a str")
            self.answer, self.trouble = answer, ""
        except Exception as error:  # of somebody else's making: it may answer the next time
            self.trouble = f"{type(error).__name__}: {error}"
