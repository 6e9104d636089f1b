"""The model: a decoder-only transformer over packed rows, or what one process holds of it, and its first weights.

Rows of one pack see each other only inside the segments of the layout; positions come with the batch. No optimizer and
no replicas here: what crosses processes is what tensor peers exchange (`kernels.tensor_parallel`).

Shapes: T packed rows, R of them that this process holds between layers, W width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import UNSUPERVISED, linear_cross_entropy_sum
from seqmesh.kernels.losses.vocabulary import vocab_parallel_cross_entropy_sum
from seqmesh.kernels.rotary import rotary_tables
from seqmesh.kernels.tensor_parallel import ALONE, Peers, gather_linear, sum_linear
from seqmesh.trainer.models.blocks import ParallelBlock, SerialBlock, make_block, make_norm
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import STACK, Box, box_of, check_divisible, first_of, share_of
from seqmesh.trainer.models.linear import make_linear, unset
from seqmesh.trainer.models.places import part_of
from seqmesh.trainer.part import Part

Block = ParallelBlock | SerialBlock


class Layers(nn.Module):
    """Some of a model's layers, first to last, each by its number in the whole model."""

    def __init__(self, layers: Mapping[int, Block]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, number: int) -> Block:
        layer = self.get_submodule(str(number))
        assert isinstance(layer, Block)
        return layer

    def __iter__(self) -> Iterator[Block]:
        return (self[int(number)] for number, _ in self.named_children())

    def __len__(self) -> int:
        return len(self._modules)


class Transformer(nn.Module):
    """Token ids to logits, or to their loss. The weights follow from `config` and `seed` alone: torch's global
    generator is not used.

    layers: the stretches of layers that this process holds, first to last; None: all. The embedding comes with layer 0,
    and with the last layer the final norm and the head, which is the embedding where they are tied. peers: who divides
    every layer, the embedding and the head. Parameters are called as in the whole model, and have what is here.

    Made under `torch.device("meta")` it has no memory and no weights. Sharded as it is, moved by `to_empty` and given
    them by `init_weights`, no rank ever holds it whole.

    Raises ValueError where peers can not divide the model.
    """

    def __init__(
        self, config: ModelConfig, *, seed: int, layers: Sequence[range] | None = None, peers: Peers = ALONE
    ) -> None:
        super().__init__()
        check_divisible(config, peers.count)
        self.config, self.peers = config, peers
        self.parts = (range(config.layers),) if layers is None else tuple(layers)
        held = [layer for part in self.parts for layer in part]
        ends = config.layers - 1 in held
        vocabulary = share_of(config.vocab_size, peers.rank, peers.count)
        self.embedding = (
            unset(nn.Embedding(vocabulary, config.width, device="meta"))
            if 0 in held or (ends and config.tied_embeddings)
            else None
        )
        self.blocks = Layers({layer: make_block(config, config.layer_windows[layer], peers) for layer in held})
        self.norm = make_norm(config) if ends else None
        self.head = make_linear(config.width, vocabulary, bias=False) if ends and not config.tied_embeddings else None
        if not any(parameter.is_meta for parameter in self.parameters()):
            init_weights(self, seed)

    def rows(self, packed: int) -> int:
        """Rows of so many packed ones that this process holds between layers."""
        return self.peers.rows(packed)

    def boxes(self) -> dict[str, Box]:
        """Where in the whole model each parameter here lies, in the order of the whole model's."""
        held = {name for name, _ in self.named_parameters()}
        shapes = {name: shape for name, shape in parameter_shapes(self.config).items() if name in held}
        return {name: box_of(name, shape, self.peers.rank, self.peers.count) for name, shape in shapes.items()}

    def forward(
        self, x: Tensor, position_ids: Tensor, layout: Layout, labels: Tensor | None = None, part: int = 0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x: input ids [T] int32 or int64, or, where part number `part` of this process does not begin with layer 0,
        what the part before gave, [R, W]. position_ids [T]: inside the document. -> rows [R, W] for the part after; or,
        of the last layer's part, logits [T, V], with peers only this one's share of the vocabulary; with labels [T] the
        sum of the loss and the number of supervised rows, as `linear_cross_entropy_sum` has them, and no logits are
        made.

        Rows after the layout's last segment are padding: they need valid ids and positions, attend to nothing, and
        touch no other row. T must be at least 1: a rank without documents does not call the model; ValueError
        otherwise, and for an x that does not fit.
        """
        layers, packed = self.parts[part], len(position_ids)
        self._check(x, position_ids, begins=layers.start == 0)
        padding = self.rows(packed) * self.peers.count - packed
        if layers.start == 0:
            x = self._embed(_padded(x, padding))
        cos, sin = self._tables(_padded(position_ids, padding), x.dtype)
        for layer in layers:
            x = self.blocks[layer](x, cos, sin, layout)
        if layers.stop < self.config.layers:
            return x
        if labels is None:
            return self._logits(x)[:packed]
        return self._loss(x, _padded(labels, padding, UNSUPERVISED))

    def _check(self, x: Tensor, position_ids: Tensor, *, begins: bool) -> None:
        packed = len(position_ids)
        expected = (packed,) if begins else (self.rows(packed), self.config.width)
        if position_ids.ndim != 1 or packed == 0 or x.shape != expected:
            shapes = f"{'input_ids' if begins else 'x'} {list(x.shape)}, position_ids {list(position_ids.shape)}"
            wanted = "both must be [T]" if begins else f"must be {list(expected)} and [T]"
            raise ValueError(f"{shapes}: {wanted} with T at least 1")

    def _tables(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        config = self.config
        table_dtype = torch.promote_types(dtype, torch.float32)
        return rotary_tables(position_ids, config.head_dim, config.rope_base, table_dtype, config.rope_scaling)

    def _embed(self, input_ids: Tensor) -> Tensor:
        assert self.embedding is not None
        if self.peers.count == 1:
            embedded: Tensor = self.embedding(input_ids)
            return embedded
        own = input_ids - first_of(self.config.vocab_size, self.peers.rank, self.peers.count)
        elsewhere = (own < 0) | (own >= len(self.embedding.weight))
        partial = self.embedding(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(1), 0.0)
        return sum_linear((), (), self.peers, partial=partial)

    def _logits(self, x: Tensor) -> Tensor:
        n, head = self._ends(x)
        if self.peers.count == 1:
            return functional.linear(n, head)
        (logits,) = gather_linear(n, [(head, None)], self.peers)
        return logits

    def _loss(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        n, head = self._ends(x)
        if self.peers.count == 1:
            return linear_cross_entropy_sum(n, head, labels)
        (rows,) = gather_linear(n, (), self.peers, rows=True)
        return vocab_parallel_cross_entropy_sum(rows, head, labels, self.peers.group)

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normed rows, and the head's weight."""
        assert self.norm is not None
        last = self.embedding if self.head is None else self.head
        assert last is not None
        return self.norm(x), last.weight


def _padded(values: Tensor, padding: int, value: int = 0) -> Tensor:
    return functional.pad(values, (0, padding), value=value) if padding else values


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Set every weight from `seed`: norms to 1, biases to 0, the rest to normal numbers of standard deviation
    `init_std`. Buffers, of experts, become 0.

    The matrices that write to the residual are drawn 1/sqrt(2 · layers) times smaller (GPT-2), so that the sum over
    2 · layers branches starts as wide as one. Drawn whole in float32 on the CPU, each from the seed and its own name,
    one at a time: device, dtype and division of the model do not change the numbers.
    """
    std = model.config.init_std
    for buffer in model.buffers():
        buffer.zero_()
    for name, part in parts_of(model).items():
        if part.local.numel() == 0:
            continue
        if len(part.shape) == 1:
            part.local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        to_residual = name.endswith(("attention.output.weight", "down.weight"))
        scaled = std / math.sqrt(2 * model.config.layers) if to_residual else std
        for local, numbers in _drawn(part, f"{seed}/{name}"):
            local.copy_(numbers * scaled)


def parts_of(model: Transformer) -> dict[str, Part]:
    """This process's part of every parameter, in the order of the whole model's."""
    boxes, held = model.boxes(), dict(model.named_parameters())
    return {name: part_of(held[name].detach(), box) for name, box in boxes.items()}


def _drawn(part: Part, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """What is held, matrix by matrix, each with normal numbers of this name. Every matrix of a stack has numbers of its
    own: those of others are not drawn."""
    if len(part.shape) < STACK:
        yield part.local, _normal(part.shape, name)[part.place]
        return
    first, *inner = part.place
    for number, local in zip(range(first.start, first.stop), part.local, strict=True):
        yield local, _normal(part.shape[1:], f"{name}/{number}")[tuple(inner)]


def _normal(shape: torch.Size, name: str) -> Tensor:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.randn(shape, generator=generator, device="cpu")


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The shape of every parameter, by name, without allocating any."""
    with torch.device("meta"):
        model = Transformer(replace(config, layers=1, windows=config.windows[:1]), seed=0)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    block = {name: shapes.pop(name) for name in list(shapes) if name.startswith("blocks.")}  # layers are alike
    layers = {
        name.replace("blocks.0.", f"blocks.{layer}.", 1): shape
        for layer in range(config.layers)
        for name, shape in block.items()
    }
    first = {"embedding.weight": shapes.pop("embedding.weight")}
    return first | layers | shapes
