"""Attention over packed documents as one writes it without a kernel for it; with autograd's gradients.

`loop`: torch's attention on the slice of each document. `dense`: one call over the whole pack behind a mask. `flex`:
FlexAttention compiled for the pack's block mask, which on the CPU has no backward pass. All are causal, and take and
give rows [T, H, D] as `benchmarks.attention_cases.Attend` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from seqmesh.benchmarks.attention_cases import Attend

BLOCK = 128  # rows and keys of a block that FlexAttention works on or leaves out


def loop(lengths: Sequence[int]) -> Attend:
    """One call for each document that has tokens."""
    bounds = [(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0)) if start < stop]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [_rows(scaled_dot_product_attention(*_slices(q, k, v, *each), is_causal=True)) for each in bounds]
        return torch.cat(parts)

    return attend


def dense(lengths: Sequence[int], window: int | None = None) -> Attend:
    """One call with a mask [T, T]."""
    document = _documents(lengths)
    position = torch.arange(len(document))
    distance = position.unsqueeze(1) - position
    mask = (document.unsqueeze(1) == document) & (distance >= 0)
    mask = mask if window is None else mask & (distance < window)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _rows(scaled_dot_product_attention(*_slices(q, k, v, 0, len(q)), attn_mask=mask))

    return attend


def flex(lengths: Sequence[int]) -> Attend:
    """Compiled at the first call, for each dtype and number of tokens anew; raises RuntimeError then, where no compiler
    is to be had. The tokens must be whole blocks of BLOCK."""
    document = _documents(lengths)

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[query] == document[key])

    counts, numbers = zip(*map(_listed, _blocks(document)), strict=True)
    mask = BlockMask.from_kv_blocks(counts[0], numbers[0], counts[1], numbers[1], BLOCK_SIZE=BLOCK, mask_mod=seen)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = _slices(q.detach(), k.detach(), v.detach(), 0, len(q))  # it refuses what wants gradients
        out: Tensor = compiled(query, key, value, block_mask=mask)
        return _rows(out)

    return attend


def _blocks(document: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks of keys the queries of each block see in part, and which as a whole: two [B, B] of bool. Made from
    the first and last document of each block: `create_block_mask` would fill a mask of [T, T] first."""
    block = document.view(-1, BLOCK)
    first, last = block[:, 0], block[:, -1]
    number = torch.arange(len(block))
    touched = (number.unsqueeze(1) >= number) & (first.unsqueeze(1) <= last)
    whole = (number.unsqueeze(1) > number) & (last.unsqueeze(1) == first)
    return touched & ~whole, whole


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many are chosen in each row, and which, those first: [1, 1, B] and [1, 1, B, B]."""
    numbers = chosen.to(torch.int32).argsort(dim=1, descending=True, stable=True)
    return chosen.sum(dim=1, dtype=torch.int32)[None, None], numbers.to(torch.int32)[None, None]


def _documents(lengths: Sequence[int]) -> Tensor:
    """Which document each row belongs to [T]."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _slices(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H, D] -> [1, H, n, D]."""
    query, key, value = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return query, key, value


def _rows(x: Tensor) -> Tensor:
    """[1, H, n, D] -> [n, H, D]."""
    return x[0].transpose(0, 1)
