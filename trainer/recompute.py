"""Recompute: what a layer saves for backward is thrown away and made again when its backward begins.

`full`: a layer keeps its input alone, and its forward runs once more. `selective`: it keeps what attention gave, too
(its output and the log-sum-exp of each row), and all but attention runs once more: norms, projections and MLP, whose
work goes with tokens. Attention's goes with their square and its rings exchange keys, so with long documents, for which
memory is short, it is dear to repeat, and what it gave is one row of the layer's width in about thirteen.
There are no random numbers in a layer. Gradients are those without recompute, to the bit.

With rings. `selective` sends nothing again. `full` does: in backward, a layer's forward exchange comes once more, right
before its backward exchange. That is still one total order on all ranks: layers go from the last to the first on every
rank, a layer's backward cannot begin before that of the layer above has given the whole gradient of what is between
them, and inside a layer the attention that runs again comes before the backward of any attention, since that needs what
it saves. Every member must run the same kind of recompute: the configuration is one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqmesh.kernels.attention import attention_again, varlen_attention
from seqmesh.kernels.layout import Layout
from seqmesh.trainer.models.blocks import Attention

Recompute = Literal["none", "selective", "full"]


def set_recompute(layers: Iterable[nn.Module], how: Recompute) -> None:
    """Replace the `forward` of each layer, in place. To be called once, before anything else does the same.

    FSDP stays outside: its parameters are gathered when a layer's backward begins, and so when its forward runs again.
    """
    for layer in layers:
        if how == "full":
            layer.forward = partial(_again, layer.forward)
        elif how == "selective":
            (attention,) = (module for module in layer.modules() if isinstance(module, Attention))
            layer.forward = partial(_all_but_attention, layer.forward, attention)


def _again(run: Callable[..., Tensor], *arguments: Any) -> Tensor:
    out: Tensor = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


def _all_but_attention(forward: Callable[..., Tensor], attention: Attention, *arguments: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*arguments)
    memory = _Memory()

    def run(*arguments: Any) -> Tensor:
        with _attending(attention, memory.attend):
            return forward(*arguments)

    out = _again(run, *arguments)
    kept: Tensor = _Keep.apply(out, memory, *memory.take())  # type: ignore[no-untyped-call]
    return kept


class _Memory:
    """What attention gave in one forward pass of one layer: made there, kept by `_Keep`, given when it runs again."""

    def __init__(self) -> None:
        self._given: tuple[Tensor, Tensor] | None = None
        self._backward = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Tensor:
        if self._backward:
            return attention_again(q, k, v, layout, *self.take())
        out, lse = varlen_attention(q, k, v, layout, **options, return_lse=True)
        self._given = out.detach(), lse
        return out

    def take(self) -> tuple[Tensor, Tensor]:
        """Nothing stays here."""
        given, self._given = self._given, None
        assert given is not None
        return given

    def give(self, out: Tensor, lse: Tensor) -> None:
        """From now on attention is not to be run."""
        self._given, self._backward = (out, lse), True


class _Keep(torch.autograd.Function):
    """Saves what attention gave outside of what is made again; the layer's last node, so its backward comes first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: _Memory, out: Tensor, lse: Tensor) -> Tensor:
        ctx.save_for_backward(out, lse)
        ctx.memory = memory
        ctx.mark_dirty(x)  # or it would come out as a view, which FSDP warns of
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.memory.give(*ctx.saved_tensors)
        return dx, None, None, None


@contextmanager
def _attending(attention: Attention, attend: Callable[..., Tensor]) -> Iterator[None]:
    before, attention.attend = attention.attend, attend
    try:
        yield
    finally:
        attention.attend = before
