"""A plain PyTorch model and loss, as a training loop of a tutorial has them: nothing of ours runs in it.

The same function as `trainer`'s parallel block with the same names of weights, so that both can begin from the same.
`padded` takes documents as rows of one length, causal attention and all; `packed` lays them end to end in one row and
attends document by document.

Shapes: B documents, L tokens of the longest, T tokens of all, W width, H and K query and key heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100


class Block(nn.Module):
    """x + attention(n) + mlp(n), n = norm(x)."""

    def __init__(self, width: int, kv_width: int, mlp_width: int, head_width: int, eps: float) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm = nn.RMSNorm(width, eps=eps)
        self.attention = nn.ModuleDict(
            {
                "query": nn.Linear(width, width, bias=False),
                "key": nn.Linear(width, kv_width, bias=False),
                "value": nn.Linear(width, kv_width, bias=False),
                "output": nn.Linear(width, width, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate": nn.Linear(width, mlp_width, bias=False),
                "up": nn.Linear(width, mlp_width, bias=False),
                "down": nn.Linear(mlp_width, width, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bounds: Sequence[int] | None) -> Tensor:
        """x [B, L, W]; bounds: where documents begin and end in the one row, None where each has its own."""
        n = self.norm(x)
        heads = [self.attention[name](n).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for name in NAMES]
        q, k, v = turned(heads[0], cos, sin), turned(heads[1], cos, sin), heads[2]
        if bounds is None:
            mixed = attend(q, k, v)
        else:
            cuts = [slice(a, b) for a, b in pairwise(bounds)]
            mixed = torch.cat([attend(q[:, :, cut], k[:, :, cut], v[:, :, cut]) for cut in cuts], dim=2)
        mlp = self.mlp["down"](functional.silu(self.mlp["gate"](n)) * self.mlp["up"](n))
        out: Tensor = x + self.attention["output"](mixed.transpose(1, 2).flatten(2)) + mlp
        return out


NAMES = ("query", "key", "value")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary: x [B, H, L, D]; cos, sin [L, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PlainModel(nn.Module):
    """Embedding, blocks, norm, head; sums the loss of a batch."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_width, self.base = config.head_dim, config.rope_base
        kv_width = config.kv_heads * config.head_dim
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, kv_width, config.mlp_width, config.head_dim, config.norm_eps)
            for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor, bounds: Sequence[int] | None) -> Tensor:
        """ids, labels [B, L], positions [L] -> the sum of the loss."""
        angles = torch.outer(
            positions.double(), self.base ** -(torch.arange(0, self.head_width, 2).double() / self.head_width)
        )
        cos, sin = (of.repeat(1, 2).to(self.norm.weight.dtype) for of in (angles.cos(), angles.sin()))
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin, bounds)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def padded(documents: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, None]:
    """Documents [B] as rows of the longest one's length: ids, positions, labels, no bounds."""
    rows = [nn.utils.rnn.pad_sequence(list(of), batch_first=True, padding_value=pad) for of, pad in _both(documents)]
    return rows[0], torch.arange(rows[0].shape[1]), rows[1], None


def packed(documents: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Documents [B] in one row: ids, positions, labels, and where each begins."""
    ids, labels = (torch.cat(list(of)).unsqueeze(0) for of, _ in _both(documents))
    bounds = [0, *torch.tensor([len(document) for document in documents]).cumsum(0).tolist()]
    return ids, torch.cat([torch.arange(len(document)) for document in documents]), labels, bounds


def _both(documents: Sequence[Tensor]) -> tuple[tuple[Sequence[Tensor], int], tuple[Sequence[Tensor], int]]:
    """Ids and labels, each with what pads them."""
    labels = [functional.pad(document[1:], (0, 1), value=IGNORED) for document in documents]
    return (documents, 0), (labels, IGNORED)


def rows_of(documents: Sequence[Tensor], tokens: int, *, pad: bool) -> list[list[Tensor]]:
    """Documents put together in order, as many as hold `tokens` (padded ones: rows times the longest); a longer one is
    alone. Sorted by length first where they are padded, as loops do to waste less."""
    ordered = sorted(documents, key=len) if pad else list(documents)
    found: list[list[Tensor]] = []
    for document in ordered:
        grown = [*found[-1], document] if found else []
        size = len(grown) * max(map(len, grown), default=0) if pad else sum(map(len, grown))
        if grown and size <= tokens:
            found[-1] = grown
        else:
            found.append([document])
    return found
