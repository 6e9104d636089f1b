"""The training job: exact gradients from balanced plans. Names resolve on first use (PEP 562)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqmesh.trainer.config import TrainConfig as TrainConfig
    from seqmesh.trainer.config import load_config as load_config
    from seqmesh.trainer.model import ModelConfig as ModelConfig
    from seqmesh.trainer.model import Transformer as Transformer

_HOMES = {
    "ModelConfig": "model",
    "TrainConfig": "config",
    "Transformer": "model",
    "load_config": "config",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
