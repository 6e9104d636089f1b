"""Which of the tensors that autograd saves are a layer's activations, and how many bytes of them a token has.

Saved are also weights, which every micro-batch shares, and what all layers are given alike: rotary tables, bounds. All
these are known by their storages. An activation has one row for each token of the micro-batch, or of a tensor peer's
share of them; of experts, for each token that chose them. Nothing is moved here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.rotary import rotary_tables
from seqmesh.kernels.tensor_parallel import ALONE, Peers
from seqmesh.trainer.models.blocks import make_block
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.experts import Experts
from seqmesh.trainer.recompute import Recompute, set_recompute

SMALL_BYTES = 1024  # a copy takes longer than it is worth
COUNTED_TOKENS = 4099  # unlike any other dimension of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """values: of a saved tensor, in one form for all tensors of the same values: contiguous rows are [T, ...] in two
    dimensions. dim: the one of its rows. key: equal for equal memory seen in equal form, as long as that lives."""

    values: Tensor
    dim: int
    key: Hashable

    @property
    def rows(self) -> int:
        return self.values.shape[self.dim]


class Activations:
    """Those of one layer of one micro-batch. rows: how many one may have. routed: whether one may have any number, in
    its first dimension. shared: tensors, in whatever nesting, that are none."""

    def __init__(self, rows: Collection[int], shared: Iterable[Any], *, routed: bool = False) -> None:
        self._rows, self._otherwise = rows, 0 if routed else None
        self._shared = {_storage(each) for each in tree_leaves(list(shared)) if isinstance(each, Tensor)}

    def find(self, saved: Tensor) -> Activation | None:
        """The activation that a saved tensor is; None for weights, tables, integers and small ones.

        The key has the storage itself, not its address, and how the tensor lies in it: views of one storage differ, and
        so do a matrix and its transpose.
        """
        dim = next((dim for dim, size in enumerate(saved.shape) if size in self._rows), self._otherwise)
        if dim is None or not saved.is_floating_point() or saved.nbytes < SMALL_BYTES:
            return None
        if (storage := _storage(saved)) in self._shared:
            return None
        values = saved.detach()
        if dim == 0 and values.is_contiguous():
            values = values.view(len(values), -1)
        key = storage, values.storage_offset(), values.shape, values.stride(), values.dtype, values._version
        return Activation(values=values, dim=dim, key=key)


def layer_activations(layer: nn.Module, x: Tensor, *given: Any) -> Activations:
    """Of a layer that is called with x [R, ...] and what all layers are given. To be called when its parameters are
    those that it computes with: FSDP puts them there just before."""
    peers: Peers = getattr(layer, "peers", ALONE)
    routed = any(isinstance(module, Experts) for module in layer.modules())
    shared = list(layer.parameters()), list(layer.buffers()), given
    return Activations({len(x), len(x) * peers.count}, shared, routed=routed)


def saved_bytes(layer: nn.Module, x: Tensor, *given: Any) -> int:
    """Bytes of all activations that one call of a layer saves, each counted once. On the meta device nothing is
    computed."""
    activations, found = layer_activations(layer, x, *given), dict[Hashable, Tensor]()

    def pack(saved: Tensor) -> Tensor:
        if (activation := activations.find(saved)) is not None:
            found[activation.key] = activation.values  # held, so that no other tensor can have the same storage
        return saved.detach()

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda saved: saved):
        layer(x.detach().requires_grad_(), *given)
    return sum(values.nbytes for values in found.values())


def bytes_per_token(config: ModelConfig, recompute: Recompute, dtype: torch.dtype, tensor: int = 1) -> float:
    """Bytes of a token's activations in all layers together, as one layer is found to save them for many tokens; on one
    of so many tensor peers."""
    tokens = COUNTED_TOKENS * tensor
    with torch.device("meta"):
        layer = make_block(config, None, Peers(count=tensor)).to(dtype)
        x = torch.empty(COUNTED_TOKENS, config.width, dtype=dtype)
        positions, bounds = torch.arange(tokens), torch.zeros(2, dtype=torch.int32)
    set_recompute([layer], recompute)
    tables = rotary_tables(positions, config.head_dim, config.rope_base, torch.promote_types(dtype, torch.float32))
    return config.layers * saved_bytes(layer, x, *tables, Layout(bounds, tokens)) / tokens


def _storage(tensor: Tensor) -> int:
    """What identifies a storage as long as it lives, even while FSDP has taken its memory away."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)
