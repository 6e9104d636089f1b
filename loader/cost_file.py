"""The cost file: one JSON object that every rank and every loader of a job reads, so that all plan with one cost model.

    {"version": 1, "unit_seconds": ..., "cost": {"fixed": ..., "linear": ..., ...}, "fit": {...}, "environment": {...}}

`cost` is what planning uses: integers. The rest says what a unit is, how well the model fits and where it was measured,
and may be left out. `seqmesh bench calibrate --cost FILE` writes one. Nothing is measured or fitted here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import xxhash
from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.explain import explain
from seqmesh.loader.files import atomic_write
from seqmesh.packer.cost import CostModel
from seqmesh.packer.fit import Fit

VERSION: Final = 1
LARGEST = 1 << 62  # of a coefficient


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFile:
    """unit_seconds: of one unit of `cost`, where that is known. fit: figures of `packer.fit.Fit`. environment: where it
    was measured."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    version: Literal[1]
    cost: CostModel
    unit_seconds: float | None = None
    fit: dict[str, float | None] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.unit_seconds is not None and not 0 < self.unit_seconds < float("inf"):
            raise ValueError(f"unit_seconds is {self.unit_seconds}: must be positive and finite")
        for name in ("fixed", "linear", "quadratic", "row_near", "row_far"):
            if getattr(self.cost, name) > LARGEST:
                raise ValueError(f"cost.{name} is {getattr(self.cost, name)}: must be at most 2**62")


_ADAPTER = TypeAdapter(CostFile)


def read_cost_file(path: Path) -> CostFile:
    """A cost file. Raises FileNotFoundError, or ValueError naming every field that is unknown, missing or unfit."""
    try:
        return _ADAPTER.validate_json(path.read_bytes(), strict=True)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(f"{path} is no cost file: there is no such file") from error
    except ValidationError as error:
        raise ValueError(f"{path} is not a valid cost file: {explain(error)}") from error


def read_cost(path: Path) -> CostModel:
    """The cost model of a file; raises as `read_cost_file` does."""
    return read_cost_file(path).cost


def write_cost(path: Path, fit: Fit, environment: Mapping[str, Any]) -> None:
    """Write a fit, whole or not at all. environment: JSON values."""
    crossover = fit.crossover if fit.crossover < float("inf") else None
    found = CostFile(
        version=VERSION,
        unit_seconds=fit.unit,
        cost=fit.cost,
        fit=asdict(fit.errors) | {"rounding": fit.rounding, "crossover": crossover},
        environment=dict(environment),
    )
    atomic_write(path, json.dumps(asdict(found), indent=1, allow_nan=False).encode() + b"\n")


def cost_digest(cost: CostModel) -> str:
    """xxh3-128 of a cost model's fields, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(json.dumps(asdict(cost), sort_keys=True).encode())
