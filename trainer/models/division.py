"""How a model is divided over processes: layers over the stages of a pipeline, every layer over tensor peers.

Rules and integers; no tensors, no process groups here. What a parameter is called decides how peers divide it: rows of
what makes heads and the MLP's inside, columns of what leads back from them, rows of the vocabulary. All else, norms and
what is added after a sum, every peer has whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from seqmesh.trainer.models.config import ModelConfig

# By the module that has the parameter, which of its dimensions is divided. A vector has no second one: it stays whole.
DIMENSIONS = {
    **dict.fromkeys(("query", "key", "value", "gate", "up", "embedding", "head"), 0),
    **dict.fromkeys(("output", "down"), 1),
}
STACK = 3  # dimensions of a stack of matrices, one for each expert: peers have some of them whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Where a process's piece of a parameter lies in the whole: of `shape`, beginning at `offsets`; the piece itself
    says how large it is. divided: over tensor peers; if not, each of them has all of it, and of its gradient a share:
    what came of its own rows."""

    shape: torch.Size
    offsets: tuple[int, ...]
    divided: bool


def box_of(name: str, shape: torch.Size, rank: int, count: int) -> Box:
    """The piece of peer `rank` of `count` of the parameter of this name and whole shape."""
    dimension = 0 if len(shape) == STACK else DIMENSIONS.get(name.split(".")[-2])
    if count == 1 or dimension is None or dimension >= len(shape):
        return Box(shape=shape, offsets=(0,) * len(shape), divided=False)
    start = first_of(shape[dimension], rank, count)
    offsets = tuple(start if each == dimension else 0 for each in range(len(shape)))
    return Box(shape=shape, offsets=offsets, divided=True)


def first_of(total: int, rank: int, count: int) -> int:
    """Where the share of `rank` of `count` begins, and that of the one before ends; shares differ by one at most."""
    return total * rank // count


def share_of(total: int, rank: int, count: int) -> int:
    """How much that share is."""
    return first_of(total, rank + 1, count) - first_of(total, rank, count)


def layers_of(layers: int, stretches: int) -> list[range]:
    """Cut layers into consecutive stretches that differ by one layer at most. Of a pipeline of S stages with P parts
    there are S · P, and stage s has number s, s + S, s + 2S, ...: `layers_of(layers, S * P)[s::S]`.

    Raises ValueError where one would be empty.
    """
    if stretches > layers:
        raise ValueError(
            f"{layers} layers for {stretches} parts of a pipeline (stages · parts): each needs one at least"
        )
    cuts = [first_of(layers, stretch, stretches) for stretch in range(stretches + 1)]
    return [range(first, end) for first, end in pairwise(cuts)]


def check_divisible(config: ModelConfig, count: int) -> None:
    """Raises ValueError unless `count` tensor peers can divide the model: heads and the MLP's width, or experts, into
    equal shares, the vocabulary into any that are not empty."""
    inner = ("the MLP's width", config.mlp_width) if config.experts is None else ("experts", config.experts)
    for name, total in (("heads", config.heads), ("kv_heads", config.kv_heads), inner):
        if total % count:
            raise ValueError(f"{name} is {total}: must be a multiple of the tensor peers, {count}")
    if config.vocab_size < count:
        raise ValueError(f"vocab_size is {config.vocab_size}: must be at least the number of tensor peers, {count}")
