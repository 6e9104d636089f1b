"""A training job's configuration: one YAML file, dotted overrides, every field checked before anything starts.

    config = load_config("job.yaml", ["steps=200", "optim.lr=1e-3"])

Each part is a frozen dataclass beside the code that uses it; this file puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.cost_file import read_cost, read_cost_file
from seqmesh.loader.explain import explain
from seqmesh.loader.mapping import read_mapping
from seqmesh.loader.settings import LoaderSettings, TokenField
from seqmesh.packer.cost import PAIR_UNITS, CostModel
from seqmesh.packer.offload import Offload
from seqmesh.trainer.activations import bytes_per_token
from seqmesh.trainer.checkpoint import CheckpointConfig
from seqmesh.trainer.model import ModelConfig
from seqmesh.trainer.offload import OffloadConfig
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.recompute import Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """run: folder for logs, checkpoints and the resolved configuration. steps: optimizer steps in all. ranks:
    processes on this machine. seed: of the weights. timeout: seconds that any wait for the loader or another rank may
    take. credit_bytes: batches that the loader may send ahead, in bytes. cost: a file of `seqmesh bench calibrate`, or
    None to count the work of the model's shape. offload: None for none; recompute: what layers make again in backward
    instead of saving it. The number of ranks, the cost model that the loader balances by and what it is told of offload
    come from here, not from `loader`.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    run: str
    steps: int
    loader: LoaderSettings
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ranks: int = 1
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    timeout: float = 120.0
    credit_bytes: int = 64 << 20
    cost: str | None = None
    offload: OffloadConfig | None = None
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for name in ("steps", "ranks", "credit_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout}: must be over 0 seconds")
        if self.loader.ranks != 1 or self.loader.cost is not None or self.loader.offload is not None:
            raise ValueError("loader.ranks, loader.cost and loader.offload are set by the trainer: leave them out")
        if missing := set(get_args(TokenField)) - set(self.loader.fields):
            raise ValueError(f"loader.fields leaves out {', '.join(sorted(missing))}: the trainer needs them")

    def cost_model(self) -> CostModel:
        """What ranks are balanced by. Raises as `read_cost` does."""
        return self.model.shape.cost_model() if self.cost is None else read_cost(Path(self.cost))

    def planned_offload(self) -> Offload | None:
        """What steps are planned with. Raises as `read_cost` does, and ValueError where it can not be said."""
        if self.offload is None:
            return None
        token_bytes = bytes_per_token(self.model, self.recompute, getattr(torch, self.dtype))
        return self.offload.planned(self.model.layers, token_bytes, self._unit_seconds(self.offload.flops))

    def _unit_seconds(self, flops: float | None) -> float:
        """Seconds of one unit of `cost_model`."""
        measured = None if self.cost is None else read_cost_file(Path(self.cost)).unit_seconds
        if (measured is None) == (flops is None):
            known = f"{self.cost or 'no cost file'} says {'nothing' if measured is None else 'it, too'}"
            raise ValueError(f"offload.flops is {flops}: it says how long a unit of cost takes, {known}")
        if flops is None:
            assert measured is not None
            return measured
        if self.cost is not None:
            raise ValueError(
                f"offload.flops is {flops}: {self.cost} counts in units of its own and does not say theirs"
            )
        return self.model.shape.flops_per_pair / PAIR_UNITS / flops


_ADAPTER = TypeAdapter(TrainConfig)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and apply overrides such as `optim.lr=1e-3` (values are YAML too).

    Raises FileNotFoundError, or ValueError naming every field that is unknown, missing or unfit; of a cost file, too.
    """
    fields = read_mapping(path)
    for override in overrides:
        _apply(fields, override)
    try:
        config = _ADAPTER.validate_python(fields)
    except ValidationError as error:
        raise ValueError(f"{path} does not make a training job: {explain(error)}") from error
    config.cost_model()  # a cost file that can not be used is refused before anything starts
    config.planned_offload()
    return config


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration; `load_config` reads it back to the same."""
    path.write_text(yaml.safe_dump(asdict(config), sort_keys=False))


def _apply(fields: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ValueError(f"{override!r} is not an override: write it as name=value, for example optim.lr=1e-3")
    *parents, leaf = name.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
        if not isinstance(fields, dict):
            raise ValueError(f"{override!r}: {parent} is a value, not a group of settings")
    fields[leaf] = yaml.safe_load(text)
