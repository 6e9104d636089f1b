"""Cross entropy as a sum and a count, so that the caller divides once, by the supervised tokens of the whole step.

A mean per micro-batch or per rank weighs tokens wrongly where the counts differ, and is 0/0 where there is nothing to
learn. This module never divides by a count.

`cross_entropy_sum` takes logits; `linear_cross_entropy_sum` takes what they are made of, and never holds more than a
chunk of them. A vocabulary that is spread over ranks is in `losses/vocabulary.py`.

Shapes: T rows, W width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from seqmesh.kernels.losses import chunked, liger

UNSUPERVISED = -100  # the label of a row that has nothing to learn

# Rows are worked through in chunks of about this many logits. What lives besides the logits and their gradient is one
# chunk, not the [T, V] log-probabilities that the plain formula keeps until backward; and it fits a CPU's cache: 1 MiB
# took 0.6 times as long as the plain formula, forward and backward, for vocabularies of 8,192 to 128,256.
CHUNK_ELEMENTS = 1 << 18

# (rows [T, W], weight [V, W], targets [T] int64) -> sum, every row supervised. The first that can is chosen.
LinearSum = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS: dict[str, tuple[LinearSum, Callable[[Tensor], str | None]]] = {
    "liger": (liger.linear_sum, liger.refusal),
    "chunked": (chunked.linear_sum, lambda rows: None),  # noqa: ARG005 -- it can do everything
}


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over supervised rows of logsumexp(logits) − logits[label], and the number of those rows.

    logits [T, V], labels [T] int32 or int64, UNSUPERVISED or 0..V−1 -> (sum [], count [] int64). The sum is in natural
    log units, float32 (float64 for float64 logits) whatever the dtype of the logits. Rows that are not supervised give
    exactly 0 to the sum and to the gradient, whatever they hold. Differentiable once in logits.

    Raises ValueError for shapes or dtypes that do not fit and for any label out of range, with its row: one look at
    the labels, for which a device has to catch up.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or logits.shape[1] == 0:
        raise ValueError(f"logits is {list(logits.shape)}, labels {list(labels.shape)}: must be [T, V] and [T]")
    if not logits.is_floating_point():
        raise ValueError(f"logits is {logits.dtype}: must be floating point")
    check_labels(labels, logits.shape[1])
    labels = labels.to(torch.int64)
    total: Tensor = _CrossEntropySum.apply(logits, labels)  # type: ignore[no-untyped-call]
    return total, (labels != UNSUPERVISED).sum()


def linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_sum` of hidden @ weightᵀ, of which only a chunk of rows exists at a time.

    hidden [T, W], weight [V, W] of the same dtype, labels [T] int32 or int64, UNSUPERVISED or 0..V−1 -> (sum [], count
    [] int64). The softmax, the sum and the sum of the weight's gradient over chunks are float32, float64 for float64
    inputs. Only supervised rows are computed: the others give exactly 0 to the sum and to the gradients, NaN or not.
    Differentiable once in hidden and weight; the gradients that are wanted are made with the sum, and only scaled in
    backward, so each row's part of the sum cannot be weighted afterwards: call it once per weight.

    backend: a name in BACKENDS, or "auto" for the first that can honour the request. Raises ValueError like
    `cross_entropy_sum` and for an unknown back end, NotImplementedError where the one named cannot do it.
    """
    check_linear(hidden, weight, labels)
    check_labels(labels, len(weight))
    linear_sum = _choose(backend, hidden)
    rows, targets = supervised_rows(hidden, labels)
    return linear_sum(rows, weight, targets), (labels != UNSUPERVISED).sum()


def supervised_rows(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are supervised, differentiably, and their labels as int64: the others' gradients are then 0
    whatever they hold, and they cost nothing."""
    supervised = (labels != UNSUPERVISED).nonzero().squeeze(1)
    if len(supervised) == len(labels):
        return hidden, labels.to(torch.int64)
    return hidden.index_select(0, supervised), labels.index_select(0, supervised).to(torch.int64)


class _CrossEntropySum(torch.autograd.Function):
    """Keeps only the logits; backward makes the probabilities again, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        losses = logits.new_zeros(len(logits), dtype=_wide(logits))
        for rows in _chunks(logits):
            losses[rows] = functional.cross_entropy(
                logits[rows].to(losses.dtype), labels[rows], ignore_index=UNSUPERVISED, reduction="none"
            )
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        supervised = (labels != UNSUPERVISED).unsqueeze(1)
        targets = labels.clamp(min=0).unsqueeze(1)
        dlogits = torch.empty_like(logits)
        for rows in _chunks(logits):
            chunk = torch.softmax(logits[rows], dim=1, dtype=_wide(logits))
            chunk.scatter_add_(1, targets[rows], chunk.new_full((len(chunk), 1), -1.0))
            dlogits[rows] = chunk.mul_(dtotal).masked_fill_(~supervised[rows], 0.0)
        return dlogits, None


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _choose(name: str, hidden: Tensor) -> LinearSum:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend is {name!r}: must be 'auto' or one of {sorted(BACKENDS)}")
    for candidate in BACKENDS if name == "auto" else (name,):
        linear_sum, refusal = BACKENDS[candidate]
        if (reason := refusal(hidden)) is None:
            return linear_sum
    raise NotImplementedError(f"backend is {name!r}: {reason}")


def check_linear(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Raises ValueError unless hidden is [T, W], weight [V, W] of its dtype and device, and labels [T]."""
    shapes = f"hidden is {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        raise ValueError(f"{shapes}: must be [T, W], [V, W] and [T]")
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: must be one floating point dtype")
    if not hidden.device == weight.device == labels.device:
        raise ValueError(
            f"hidden is on {hidden.device}, weight on {weight.device}, labels on {labels.device}: must be the same"
        )


def check_labels(labels: Tensor, vocabulary: int) -> None:
    """Raises ValueError for another dtype than int32 or int64, and for the first label out of range, with its row."""
    check_label_dtype(labels)
    bad = (labels != UNSUPERVISED) & ((labels < 0) | (labels >= vocabulary))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"labels[{row}] is {int(labels[row])}: must be {UNSUPERVISED} or from 0 to {vocabulary - 1}")


def check_label_dtype(labels: Tensor) -> None:
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels is {labels.dtype}: must be int32 or int64")
