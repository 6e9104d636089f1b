"""The training job: exact gradients from balanced plans. Names resolve on first use (PEP 562)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqmesh.packer.lazy import lazy_names

if TYPE_CHECKING:
    from seqmesh.trainer.config import TrainConfig as TrainConfig
    from seqmesh.trainer.config import load_config as load_config
    from seqmesh.trainer.models.config import ModelConfig as ModelConfig
    from seqmesh.trainer.models.transformer import Transformer as Transformer
    from seqmesh.trainer.passes import layout_of as layout_of

_HOMES = {
    "ModelConfig": "models.config",
    "TrainConfig": "config",
    "Transformer": "models.transformer",
    "layout_of": "passes",
    "load_config": "config",
}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
