"""How far a run is, how fast, and how long it will take."""

from __future__ import annotations

import time

from seqmesh.tools.ingest import Tally
from seqmesh.tools.prepare_report import Progress


class Clock:
    """Begins with a run. total: bytes of all inputs as stored, 0 where unknown. resumed_tokens: of earlier runs."""

    def __init__(self, total: int, max_tokens: int | None, resumed_tokens: int) -> None:
        self._total = total
        self._max_tokens = max_tokens
        self._resumed_tokens = resumed_tokens
        self._started = time.perf_counter()
        self._first: tuple[float, float] | None = None  # fraction and time of the first update

    def progress(self, tally: Tally, position: int) -> Progress:
        """An update. position: bytes of the inputs that are read."""
        read = position / self._total if self._total else 0.0
        limit = tally.tokens / self._max_tokens if self._max_tokens else 0.0
        fraction, seconds = min(max(read, limit), 1.0), time.perf_counter() - self._started
        return Progress(
            documents=tally.documents_in,
            tokens=tally.tokens,
            fraction=fraction,
            seconds=seconds,
            resumed_tokens=self._resumed_tokens,
            remaining=self._remaining(fraction, seconds),
        )

    def _remaining(self, fraction: float, seconds: float) -> float | None:
        """Judged by what came since the first update: an earlier run's part took no time, starting took some."""
        if self._first is None:
            self._first = fraction, seconds
        done, spent = fraction - self._first[0], seconds - self._first[1]
        return spent * (1 - fraction) / done if done > 0 else None
