"""`Mixture`: how many of the tokens come from which source of a set, and until when. A description, which `stream`
carries out; the names are those of the manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

from seqmesh.packer.overlong import Policy, check_policy

MAX_SOURCES = 1 << 8  # their places travel with every batch
SHARES = 1 << 30  # weights become whole parts of this

Exhausted = Literal["continue", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """weight: tokens of this source in proportion to the weights of the others; 0: never drawn. epochs, overlong: by
    default those of the settings."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    weight: float
    epochs: int | None = None
    overlong: Policy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """From `step` on these weights: of every source, by name."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    step: int
    weights: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """sources: options of every source of the set, by name. changes: other weights from later steps on. exhausted: what
    happens when a source has done its epochs: `continue` with the others, in the same proportions, until all have; or
    `stop` before the next step (in batching `rows`, the next window)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    sources: dict[str, SourceOptions]
    changes: tuple[WeightChange, ...] = ()
    exhausted: Exhausted = "continue"

    def __post_init__(self) -> None:
        if not 1 <= len(self.sources) <= MAX_SOURCES:
            raise ValueError(f"mixture has {len(self.sources)} sources: must be at least 1, and at most {MAX_SOURCES}")
        for name, options in self.sources.items():
            if options.epochs is not None and options.epochs < 1:
                raise ValueError(f"mixture.sources.{name}.epochs is {options.epochs}: must be at least 1")
            if options.overlong is not None:
                check_policy(options.overlong)
        if self.exhausted not in get_args(Exhausted):
            raise ValueError(f"mixture.exhausted is {self.exhausted!r}: must be continue or stop")
        steps = [0, *(change.step for change in self.changes)]
        if any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"mixture.changes are at steps {steps[1:]}: must be at least 1, and ascend")
        for step in steps:
            _check_weights(step, self.weights(step), self.sources)

    def weights(self, step: int) -> dict[str, float]:
        """Those in effect at a step, by name."""
        weights = {name: options.weight for name, options in self.sources.items()}
        for change in self.changes:
            if change.step <= step:
                weights = change.weights
        return weights

    def shares(self, names: Sequence[str], step: int) -> tuple[int, ...]:
        """The weights in effect at a step as parts of `SHARES`: integers, and the same for 2:1 and 4:2."""
        weights = self.weights(step)
        largest = max(weights.values())
        total = math.fsum(weight / largest for weight in weights.values())
        parts = [weights[name] / largest / total for name in names]
        return tuple(max(round(part * SHARES), 1) if part > 0 else 0 for part in parts)


def _check_weights(step: int, weights: dict[str, float], sources: dict[str, SourceOptions]) -> None:
    if differing := sorted(weights.keys() ^ sources.keys()):
        raise ValueError(f"mixture.changes: the weights from step {step} on must name every source: see {differing}")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"mixture: the weight of source {name!r} is {weight}: must be a number of at least 0")
    if not any(weights.values()):
        raise ValueError(f"mixture: from step {step} on all weights are 0: nothing could be drawn")
