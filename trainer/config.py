"""A training job's configuration: one YAML file, dotted overrides, every field checked before anything starts.

    config = load_config("job.yaml", ["steps=200", "optim.lr=1e-3"])

Each part is a frozen dataclass beside the code that uses it; this file puts them together.
"""

from __future__ import annotations

import math
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
from seqmesh.packer.cost import CostModel
from seqmesh.packer.offload import Offload
from seqmesh.trainer.activations import bytes_per_token
from seqmesh.trainer.checkpoints.config import CheckpointConfig
from seqmesh.trainer.grid import ParallelConfig
from seqmesh.trainer.logs import LogConfig
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import check_divisible
from seqmesh.trainer.models.huggingface import CONFIG, huggingface_config
from seqmesh.trainer.models.llama import check_agreement
from seqmesh.trainer.models.presets import with_preset
from seqmesh.trainer.offload import OffloadConfig
from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.recompute import Recompute
from seqmesh.trainer.replicas.replica import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """run: folder for logs, checkpoints and the resolved configuration. steps: optimizer steps in all. ranks:
    processes on this machine. parallel: how many of all share one replica of the model; what the loader calls a rank is
    such a replica. seed: of the weights. credit_bytes: batches that the loader may send ahead, in bytes.
    cost: a file of `seqmesh bench calibrate`, or None to count the work of the model's shape. init: a folder of
    Llama-style Hugging Face weights to start from at step 0, None to draw them. sharding: how model and optimizer lie
    on the ranks; None for what suits `loader.mode`. offload: of activations, None for none; recompute: what layers make
    again in backward instead of saving it. The numbers of ranks and of stages, the cost model that the loader balances
    by and what it is told of offload come from here, not from `loader`.

    timeout: seconds that any wait for the loader or another rank may take; that is for the start and for checkpoints.
    step_timeout: seconds that a step may take from the third on, None for ten times the median of the latest, and 30 at
    least. heartbeat: seconds after which a rank that gives no sign of life is lost, from then on. gc_every: steps
    between collections of garbage, None to leave it to Python. deterministic: only algorithms that repeat bit by bit.
    peak_flops: FLOP/s of a process that are 100 % MFU, None to look the GPU up, or to measure.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    run: str
    steps: int
    loader: LoaderSettings
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    ranks: int = 1
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    timeout: float = 120.0
    step_timeout: float | None = None
    heartbeat: float = 15.0
    gc_every: int | None = 50
    deterministic: bool = False
    peak_flops: float | None = None
    credit_bytes: int = 64 << 20
    cost: str | None = None
    init: str | None = None
    sharding: Sharding | None = None
    offload: OffloadConfig | None = None
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("run is empty: must be a folder")
        for name in ("steps", "ranks", "credit_bytes", "gc_every"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"{name} is {count}: must be at least 1")
        for name in ("timeout", "step_timeout", "heartbeat", "peak_flops"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}: must be over 0, and finite")
        if (self.loader.ranks, self.loader.stages, self.loader.cost, self.loader.offload) != (1, 1, None, None):
            raise ValueError(
                "loader.ranks, loader.stages, loader.cost and loader.offload are set by the trainer: leave them out"
            )
        if missing := set(get_args(TokenField)) - set(self.loader.fields):
            raise ValueError(f"loader.fields leaves out {', '.join(sorted(missing))}: the trainer needs them")
        self._check_parallel()

    def _check_parallel(self) -> None:
        stages, parts = self.parallel.stages, self.parallel.parts
        check_divisible(self.model, self.parallel.tensor)
        if self.model.layers < stages * parts:
            raise ValueError(
                f"parallel.stages · parallel.parts is {stages} · {parts}: at most as many as model.layers, "
                f"{self.model.layers}"
            )
        if stages > 1 and self.loader.mode == "waves":
            raise ValueError(f"parallel.stages is {stages}: needs loader.mode 'free', 'waves' is chosen")

    def cost_model(self) -> CostModel:
        """What ranks are balanced by: a file that was measured without windows is taken for layers that have the
        model's. Raises as `read_cost` does."""
        if self.cost is None:
            return self.model.shape.cost_model()
        cost = read_cost(Path(self.cost))
        return cost.through(self.model.shape.window_shares) if cost.windows == {None: 1} else cost

    def planned_offload(self) -> Offload | None:
        """What steps are planned with. Raises as `read_cost` does, and ValueError where it can not be said."""
        if self.offload is None:
            return None
        dtype: torch.dtype = getattr(torch, self.dtype)
        token_bytes = bytes_per_token(self.model, self.recompute, dtype, self.parallel.tensor)
        unit_seconds = self._unit_seconds(self.offload.flops) / self.parallel.tensor  # of a process's share of it
        return self.offload.planned(self.model.layers, token_bytes, unit_seconds)

    def _unit_seconds(self, flops: float | None) -> float:
        """Seconds of one unit of `cost_model` on one process."""
        file = None if self.cost is None else read_cost_file(Path(self.cost))
        measured = None if file is None else file.unit_seconds
        if (measured is None) == (flops is None):
            known = f"{self.cost or 'no cost file'} says {'nothing' if measured is None else 'it, too'}"
            raise ValueError(f"offload.flops is {flops}: it says how long a unit of cost takes, {known}")
        if flops is None:
            assert file is not None
            assert measured is not None
            return measured * file.cost.windows.total() / self.cost_model().windows.total()
        if self.cost is not None:
            raise ValueError(
                f"offload.flops is {flops}: {self.cost} counts in units of its own and does not say theirs"
            )
        return self.model.shape.unit_flops / flops


_ADAPTER = TypeAdapter(TrainConfig)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and apply overrides such as `optim.lr=1e-3` (values are YAML too).

    `model.preset` names a model whose values the section takes where it gives none, and so does the config.json of
    `init`; what the weights decide must then be alike. Raises FileNotFoundError, or ValueError naming every field that
    is unknown, missing or unfit; of a cost file, too.
    """
    fields = read_mapping(path)
    for override in overrides:
        _apply(fields, override)
    theirs = _complete_model(fields)
    try:
        config = _ADAPTER.validate_python(fields)
        refuse_booleans(fields, asdict(config))
    except ValidationError as error:
        raise ValueError(f"{path} does not make a training job: {explain(error, TrainConfig)}") from error
    if theirs is not None:
        check_agreement(config.model, theirs, f"{config.init}/{CONFIG}")
    config.cost_model()  # a cost file that can not be used is refused before anything starts
    config.planned_offload()
    return config


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration; `load_config` reads it back to the same."""
    path.write_text(to_yaml(config))


def to_yaml(config: TrainConfig) -> str:
    """Every setting with its value, as a file that `load_config` reads."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def refuse_booleans(given: Any, taken: Any, place: str = "") -> None:
    """Raises ValueError where `yes` or `true` was taken for the number 1."""
    if isinstance(given, dict) and isinstance(taken, dict):
        for name in given.keys() & taken.keys():
            refuse_booleans(given[name], taken[name], f"{place}.{name}" if place else str(name))
    elif isinstance(given, bool) and not isinstance(taken, bool):
        raise ValueError(f"{place} is {str(given).lower()}: must be a number")


def _complete_model(fields: dict[str, Any]) -> ModelConfig | None:
    """Fill the model section in place; returns the model of `init`. A folder that is not there is missed when the job
    starts from it: one that resumes does not need it."""
    model, init = fields.get("model", {}), fields.get("init")
    if not isinstance(model, dict) or not isinstance(init, str | None):
        return None  # validation says what is wrong
    model = with_preset(model)
    theirs = None
    if init is not None and (not model or (Path(init) / CONFIG).exists()):
        theirs = huggingface_config(Path(init))
        model = asdict(theirs) | model
    if model:
        fields["model"] = model
    return theirs


def _apply(fields: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *parents, leaf = name.split(".")
    if not equals or not all((*parents, leaf)):
        raise ValueError(f"{override!r} is not an override: write it as name=value, for example optim.lr=1e-3")
    for parent in parents:
        if fields.get(parent) is None:  # not there, or with nothing under it
            fields[parent] = {}
        fields = _group(fields[parent], parent, override)
    try:
        fields[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{override!r}: what follows = is not valid YAML: {error}") from error


def _group(value: Any, name: str, override: str) -> dict[str, Any]:
    if isinstance(value, list):
        raise ValueError(f"{override!r}: {name} is a list: give all of it, as {name}=[...]")
    if not isinstance(value, dict):
        raise ValueError(f"{override!r}: {name} is a value, not a group of settings")
    return value
