"""Keep experts evenly loaded: after a step the bias of each expert's choice moves against its load.

    loads = take_loads(model)     # on every process; their sum over all processes is the step's
    move_biases_(model, loads)    # once, with that sum

An expert that more rows chose than the mean loses `balance_rate`, one that fewer chose gains it. The loads are those of
the step's tokens, each counted once for either of its two experts, in every layer: integers that no plan changes, so
all processes move alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.experts import Experts
from seqmesh.trainer.models.transformer import Transformer


def loads_size(config: ModelConfig) -> int:
    """How many numbers the loads are; 0 for a model without experts."""
    return config.layers * (config.experts or 0)


def take_loads(model: Transformer) -> Tensor:
    """[layers · experts] float64: rows that chose each expert in each layer of the whole model, 0 where that is for
    another process to say: of a replica, each layer's first tensor peer counts. Counting begins anew."""
    config, device = model.config, next(model.parameters()).device
    loads = torch.zeros(config.layers, config.experts or 0, dtype=torch.float64, device=device)
    for layer, experts in _layers(model):
        loads[layer] = experts.take_counts()
    return loads.flatten()


@torch.no_grad()
def move_biases_(model: Transformer, loads: Sequence[float]) -> None:
    """To be called once for each step that changes the weights, with the loads of all replicas, the same on all
    processes."""
    count = model.config.experts or 0
    for layer, experts in _layers(model):
        own = torch.tensor(loads[layer * count : (layer + 1) * count], dtype=torch.float64)
        above = (own * count - own.sum()).sign()  # of integers: exact
        experts.balance -= model.config.balance_rate * above.to(experts.balance)


def fullest(loads: Sequence[float], config: ModelConfig) -> float:
    """Rows of the fullest expert over the mean of its layer, in the layer where that is most; 1 without experts."""
    layers = torch.tensor(loads, dtype=torch.float64).view(config.layers, -1)
    if not layers.any():
        return 1.0
    return float((layers.amax(dim=1) / layers.mean(dim=1)).max())


def _layers(model: Transformer) -> Iterator[tuple[int, Experts]]:
    """Experts of this process, by the number of their layer in the whole model: it is in their names, blocks.5.mlp."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield int(name.split(".")[-2]), module
