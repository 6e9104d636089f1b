"""A training job's configuration: one YAML file, dotted overrides, every field checked before anything starts.

    config = load_config("job.yaml", ["steps=200", "optim.lr=1e-3"])

Each part is a frozen dataclass beside the code that uses it; this file puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.cost_file import read_cost
from seqmesh.loader.explain import explain
from seqmesh.loader.mapping import read_mapping
from seqmesh.loader.settings import LoaderSettings, TokenField
from seqmesh.packer.cost import CostModel
from seqmesh.trainer.checkpoint import CheckpointConfig
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.huggingface import CONFIG, huggingface_config
from seqmesh.trainer.models.llama import check_agreement
from seqmesh.trainer.models.presets import with_preset
from seqmesh.trainer.optim import OptimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """run: folder for logs, checkpoints and the resolved configuration. steps: optimizer steps in all. ranks:
    processes on this machine. seed: of the weights. timeout: seconds that any wait for the loader or another rank may
    take. credit_bytes: batches that the loader may send ahead, in bytes. cost: a file of `seqmesh bench calibrate`, or
    None to count the work of the model's shape. init: a folder of Llama-style Hugging Face weights to start from at
    step 0, None to draw them. The number of ranks and the cost model that the loader balances by come from here, not
    from `loader`.
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
    init: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "ranks", "credit_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.timeout <= 0:
            raise ValueError(f"timeout is {self.timeout}: must be over 0 seconds")
        if self.loader.ranks != 1 or self.loader.cost is not None:
            raise ValueError("loader.ranks and loader.cost are set by the trainer: leave them out")
        if missing := set(get_args(TokenField)) - set(self.loader.fields):
            raise ValueError(f"loader.fields leaves out {', '.join(sorted(missing))}: the trainer needs them")

    def cost_model(self) -> CostModel:
        """What ranks are balanced by: a file that was measured without windows is taken for layers that have the
        model's. Raises as `read_cost` does."""
        if self.cost is None:
            return self.model.shape.cost_model()
        cost = read_cost(Path(self.cost))
        return cost.through(self.model.shape.window_shares) if cost.windows == {None: 1} else cost


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
    except ValidationError as error:
        raise ValueError(f"{path} does not make a training job: {explain(error)}") from error
    if theirs is not None:
        check_agreement(config.model, theirs, f"{config.init}/{CONFIG}")
    config.cost_model()  # a cost file that can not be used is refused before anything starts
    return config


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration; `load_config` reads it back to the same."""
    path.write_text(yaml.safe_dump(asdict(config), sort_keys=False))


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
    if not equals or not name:
        raise ValueError(f"{override!r} is not an override: write it as name=value, for example optim.lr=1e-3")
    *parents, leaf = name.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
        if not isinstance(fields, dict):
            raise ValueError(f"{override!r}: {parent} is a value, not a group of settings")
    fields[leaf] = yaml.safe_load(text)
