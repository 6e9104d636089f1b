"""What other trainers want to be given, made from a `TorchBatch`: pure functions on tensors. None of these trainers is
imported.

All of them attend within one rank, so documents that are spread over ranks are refused. All of them compute on every
row of a batch: rows of padding after the last document become one more document, without labels; and a batch of no
tokens, which a rank gets where a step has no documents for it, becomes one row of such padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqmesh.loader.tensors import TorchBatch

UNSUPERVISED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A batch whose every row belongs to a document: input_ids, labels, positions [T] int64; bounds [N + 1] int32;
    longest: rows of the longest document."""

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    bounds: Tensor
    longest: int


def padding_free(batch: TorchBatch) -> dict[str, Any]:
    """Keyword arguments of Hugging Face's causal language models.

    input_ids, position_ids and labels [1, T]; cu_seq_lens_q and _k [N + 1] int32, max_length_q and _k int;
    use_cache False: with a cache, attention other than flash attention would let documents see each other. The models
    shift labels themselves, so these are one row later than the batch's: token i + 1 is what row i is to predict.
    Their loss is the mean over labels that are not -100, or the sum over `num_items_in_batch`, where that is given: it
    is the batch's `supervised_tokens_in_step` if all of a step's are counted. Raises ValueError for documents that are
    spread over ranks, and for a batch without labels or positions.
    """
    rows = _rows(batch)
    before = rows.labels.new_full((1,), UNSUPERVISED)
    return {
        "input_ids": rows.input_ids[None],
        "position_ids": rows.positions[None],
        "labels": torch.cat([before, rows.labels[:-1]])[None],
        "cu_seq_lens_q": rows.bounds,
        "cu_seq_lens_k": rows.bounds,
        "max_length_q": rows.longest,
        "max_length_k": rows.longest,
        "use_cache": False,
    }


def packed_seq_params(batch: TorchBatch) -> dict[str, Any]:
    """Fields of Megatron-Core's `PackedSeqParams`, for attention in the `thd` layout.

    There is no padding between documents, and what follows them is one more, so the bounds cover every row, as
    Megatron's rotary embedding needs; the bounds of padded documents are None: they would be the same. Not for context
    parallelism, which cuts every document anew. Raises as `padding_free`.
    """
    rows = _rows(batch)
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": rows.bounds,
        "cu_seqlens_kv": rows.bounds,
        "cu_seqlens_q_padded": None,
        "cu_seqlens_kv_padded": None,
        "max_seqlen_q": rows.longest,
        "max_seqlen_kv": rows.longest,
    }


def megatron_batch(batch: TorchBatch) -> dict[str, Any]:
    """The batch that Megatron-style `get_batch` functions give: tokens, labels and position_ids [1, T] int64, loss_mask
    [1, T] float32, attention_mask None; see `packed_seq_params` for the boundaries. Labels are shifted, and 0 where the
    mask is 0. Raises as `padding_free`."""
    rows = _rows(batch)
    learned = rows.labels != UNSUPERVISED
    return {
        "tokens": rows.input_ids[None],
        "labels": torch.where(learned, rows.labels, 0)[None],
        "loss_mask": learned.to(torch.float32)[None],
        "attention_mask": None,
        "position_ids": rows.positions[None],
    }


def torchtitan_batch(batch: TorchBatch) -> tuple[dict[str, Tensor], Tensor]:
    """torchtitan's `({"input": ids, "positions": positions}, labels)`, each [1, T] int64: a document begins where the
    position is 0. Labels are shifted, -100 where nothing is to be learned. Raises as `padding_free`."""
    rows = _rows(batch)
    return {"input": rows.input_ids[None], "positions": rows.positions[None]}, rows.labels[None]


def _rows(batch: TorchBatch) -> _Rows:
    _check(batch)
    ids, labels, positions = batch.input_ids.long(), batch.labels.long(), batch.position_ids.long()
    bounds, pad = batch.cu_seqlens, batch.pad
    if len(ids) == 0:
        pad = 1
        ids, labels = ids.new_zeros(pad), labels.new_full((pad,), UNSUPERVISED)
    if pad:
        positions = torch.cat([positions[: len(ids) - pad], torch.arange(pad, device=ids.device)])
        bounds = torch.cat([bounds, bounds.new_tensor([len(ids)])])
    return _Rows(input_ids=ids, labels=labels, positions=positions, bounds=bounds, longest=max(batch.max_seqlen, pad))


def _check(batch: TorchBatch) -> None:
    where = f"step {batch.step}, wave {batch.wave}"
    if (spread := batch.ring_sizes > 1).any():
        first = int(batch.document_ids[spread][0])
        raise ValueError(
            f"{where}: document {first} is spread over {int(batch.ring_sizes[spread][0])} ranks, and this trainer "
            "attends within one: use batching 'rows', which keeps documents whole"
        )
    for name in ("labels", "position_ids"):
        if len(getattr(batch, name)) != len(batch.input_ids):
            raise ValueError(f"{where}: has no {name}: the setting fields leaves them out")
