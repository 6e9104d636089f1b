"""What `seqmesh plan` counts as cost: a named model, alone or on a machine, or a cost file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from seqmesh.loader.cost_file import read_cost_file
from seqmesh.packer.cost import MODEL_8B, PAIR_UNITS, CostModel, Machine, ModelShape

SHAPES: dict[str, ModelShape] = {"8b": MODEL_8B}
FREE_LINK = 1e30  # bytes per second: a row's cost rounds to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """A named shape (None: 8b) and what is known of the machine, see `Machine`; or a file of coefficients instead."""

    shape: str | None = None
    file: Path | None = None
    flops: float | None = None
    near: float | None = None
    far: float | None = None
    launch: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The cost model; what tells seconds and bytes of costs and rows, where that is known."""

    cost: CostModel
    units_per_second: float | None = None
    row_bytes: int | None = None


def prices_of(options: CostOptions) -> Prices:
    """Raises ValueError or OSError for options that do not go together, or a file that holds no cost model."""
    if options.file is not None:
        _check_alone(options)
        return read_prices(options.file)
    name = options.shape or next(iter(SHAPES))
    if name not in SHAPES:
        raise ValueError(f"shape is {name!r}: must be one of {', '.join(SHAPES)}")
    shape, machine = SHAPES[name], _machine(options)
    per_second = None if machine is None else machine.flops * PAIR_UNITS / shape.flops_per_pair
    return Prices(cost=shape.cost_model(machine), units_per_second=per_second, row_bytes=shape.bytes_per_row)


def read_prices(path: Path) -> Prices:
    """What a cost file says; raises as `read_cost_file` does."""
    file = read_cost_file(path)
    return Prices(cost=file.cost, units_per_second=None if file.unit_seconds is None else 1 / file.unit_seconds)


def _check_alone(options: CostOptions) -> None:
    others = [f.name for f in fields(options) if f.name != "file" and getattr(options, f.name) is not None]
    if others:
        named = ", ".join(f"--{name}" for name in others)
        raise ValueError(f"{named} can not be combined with --cost: the coefficients in the file are all there is")


def _machine(options: CostOptions) -> Machine | None:
    """Links that nothing is said of are free; far ones are as fast as near ones unless said otherwise."""
    if options.flops is None:
        for name in ("near", "far", "launch"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} needs --flops: how much work goes into a second")
        return None
    near = FREE_LINK if options.near is None else options.near
    far = near if options.far is None else options.far
    return Machine(flops=options.flops, near=near, far=far, launch=options.launch or 0.0)
