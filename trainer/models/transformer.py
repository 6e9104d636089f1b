"""The model: a decoder-only transformer over packed rows, and its first weights.

Rows of one pack see each other only inside the segments of the layout; positions come with the batch. No optimizer, no
process group here.

Shapes: T packed rows, W width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import linear_cross_entropy_sum
from seqmesh.kernels.rotary import rotary_tables
from seqmesh.trainer.models.blocks import make_block, make_linear, make_norm, unset
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.places import part_of


class Transformer(nn.Module):
    """Token ids to logits, or to their loss. The weights follow from `config` and `seed` alone: torch's global
    generator is not used.

    Made under `torch.device("meta")` it has no memory and no weights. Sharded as it is, moved by `to_empty` and given
    them by `init_weights`, no rank ever holds it whole.
    """

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = unset(nn.Embedding(config.vocab_size, config.width, device="meta"))
        self.blocks = nn.ModuleList(make_block(config, window) for window in config.layer_windows)
        self.norm = make_norm(config)
        self.head = None if config.tied_embeddings else make_linear(config.width, config.vocab_size, bias=False)
        if not self.embedding.weight.is_meta:
            init_weights(self, seed)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, layout: Layout, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input_ids [T] int32 or int64, position_ids [T] inside the document, -> logits [T, V]; with labels [T] the sum
        of the loss and the number of supervised rows, as `linear_cross_entropy_sum` has them, and no logits are made.

        Rows after the layout's last segment are padding: they need valid ids and positions, attend to nothing, and
        touch no other row. T must be at least 1: a rank without documents does not call the model; ValueError
        otherwise, and for ids that are not [T].
        """
        if input_ids.ndim != 1 or len(input_ids) == 0 or position_ids.shape != input_ids.shape:
            shapes = f"input_ids {list(input_ids.shape)}, position_ids {list(position_ids.shape)}"
            raise ValueError(f"{shapes}: both must be [T] with T at least 1")
        config = self.config
        x = self.embedding(input_ids)
        table_dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = rotary_tables(position_ids, config.head_dim, config.rope_base, table_dtype, config.rope_scaling)
        for block in self.blocks:
            x = block(x, cos, sin, layout)
        n = self.norm(x)
        head = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(n, head) if labels is None else linear_cross_entropy_sum(n, head, labels)


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Set every weight from `seed`: norms to 1, biases to 0, the rest to normal numbers of standard deviation
    `init_std`.

    The matrices that write to the residual are drawn 1/sqrt(2 · layers) times smaller (GPT-2), so that the sum over
    2 · layers branches starts as wide as one. Drawn whole in float32 on the CPU, in the order of `named_parameters`,
    one at a time: device, dtype and sharding of the model do not change the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    std = model.config.init_std
    for name, weight in model.named_parameters():
        part = part_of(weight)
        if weight.ndim == 1:
            part.local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        to_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        scaled = std / math.sqrt(2 * model.config.layers) if to_residual else std
        part.local.copy_(torch.randn(part.shape, generator=generator, device="cpu")[part.place] * scaled)


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The shape of every parameter, by name, without allocating any."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in Transformer(config, seed=0).named_parameters()}
