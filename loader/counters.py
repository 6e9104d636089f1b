"""What a loader process has done so far: plain integers that are counted where things happen, and read by `metrics`.

Read, planned, sent and delivered are apart: what was planned need not have been read, what was read may be sent again
after a fault, and only what a rank acknowledged is delivered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class RankCounters:
    """Of one rank, all its processes and sessions together. sent, delivered: batches; sent_bytes: of their blocks;
    delivered_tokens: of batches that were acknowledged; under_way_bytes: not let go of now; hellos: sessions begun."""

    sent: int = 0
    sent_bytes: int = 0
    delivered: int = 0
    delivered_tokens: int = 0
    under_way_bytes: int = 0
    hellos: int = 0


@dataclass(slots=True)
class Counters:
    """planned_steps, planned_tokens, plan_seconds: steps planned; read_batches, read_tokens, read_bytes, read_seconds:
    batches gathered from the shards; refused: messages that were not ours; step: the newest that was planned;
    served: gives the tokens of each source up to there."""

    planned_steps: int = 0
    planned_tokens: int = 0
    plan_seconds: float = 0.0
    read_batches: int = 0
    read_tokens: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    refused: int = 0
    step: int = 0
    served: Callable[[], dict[str, int]] = dict
    ranks: dict[int, RankCounters] = field(default_factory=lambda: defaultdict(RankCounters))

    def note_planned(self, step: int, tokens: int, seconds: float, served: Callable[[], dict[str, int]]) -> None:
        """A step was planned, in so many seconds; served: gives the tokens of each source up to its end."""
        self.planned_steps += 1
        self.planned_tokens += tokens
        self.plan_seconds += seconds
        if step >= self.step:
            self.step, self.served = step, served
