"""What a store of local copies does next: a plain record of what is wanted, here, failed and missed, and its rules.

Decides, and does nothing but let go of what is given up: no files, no threads, no clock. Parts are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from seqmesh.loader.storage.copies import release


@dataclass(slots=True)
class Held:
    """A copy that is kept here by a descriptor: size in bytes; used: somebody has its path."""

    descriptor: int
    size: int
    used: bool = False


@dataclass(slots=True)
class Agenda:
    """rank: of what is wanted, 0 the most urgent; busy: what threads bring; line: which of these have no room yet;
    failed: why and when; missed: what somebody needs, since when; awaited: what somebody needs who can let go of
    nothing meanwhile. Times are the caller's."""

    rank: dict[int, int] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    line: set[int] = field(default_factory=set)
    held: dict[int, Held] = field(default_factory=dict)
    failed: dict[int, tuple[Exception, float]] = field(default_factory=dict)
    missed: dict[int, float] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    closed: bool = False

    def plan(self, numbers: Iterable[int], retry_before: float) -> None:
        """Want these and nothing else. What failed before a time may be tried again."""
        self.rank = {number: rank for rank, number in enumerate(dict.fromkeys(numbers))}
        self.missed = {number: since for number, since in self.missed.items() if number in self.rank}
        again = [n for n, (_, when) in self.failed.items() if n in self.rank and when <= retry_before]
        for number in again:
            del self.failed[number]
        for number in [n for n, held in self.held.items() if n not in self.rank and not held.used]:
            self.drop(number)

    def drop(self, number: int) -> None:
        """Let go of a copy, if it is here."""
        if number in self.held:
            release(self.held.pop(number).descriptor)

    def urgency(self, number: int) -> float:
        """Less is sooner; infinite for what is not wanted."""
        return self.rank.get(number, math.inf)

    def next(self) -> int | None:
        """What to begin with. While something has no room yet, nothing begins that is less urgent."""
        if self.closed:
            return None
        last = min((self.urgency(number) for number in self.line), default=math.inf)
        for number, rank in self.rank.items():
            if rank >= last:
                return None
            if number not in self.held and number not in self.busy and number not in self.failed:
                return number
        return None

    def goes_on(self, number: int) -> bool:
        """Whether a thread that waits, for room or for another process, has nothing better to do."""
        following = self.next()
        wanted = number in self.rank and not self.closed
        return wanted and (following is None or self.urgency(following) > self.urgency(number))

    def is_first_in_line(self, number: int) -> bool:
        """Whether the next room there is belongs to this one."""
        return all(self.urgency(number) <= self.urgency(other) for other in self.line)

    def least_urgent(self, number: int) -> int | None:
        """What is given up so that there is room for a part: a copy nobody has the path of, needed later than it."""
        unused = [n for n, held in self.held.items() if not held.used and self.urgency(n) > self.urgency(number)]
        return max(unused, key=self.urgency, default=None)

    def in_the_way(self, number: int) -> list[int]:
        """Sizes of the copies that are not given up for a part."""
        return [held.size for n, held in self.held.items() if held.used or self.urgency(n) <= self.urgency(number)]

    def is_over(self, needed: Sequence[int]) -> bool:
        """Whether waiting for these has come to an end: all are here, or one failed."""
        return any(n in self.failed for n in needed) or all(n in self.held for n in needed)

    def missed_for(self, number: int, now: float) -> float:
        """Seconds."""
        return now - self.missed.get(number, now)
