"""Rings and exchanges that cannot be right are refused before any message; what lies on a device is never read."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.backends.base import Rule
from seqmesh.kernels.layout import Layout, Ring
from seqmesh.kernels.rings import circuit, gather
from seqmesh.kernels.rings.checks import check_rings
from seqmesh.kernels.rings.messages import Messages, Rows
from seqmesh.kernels.rings.spread import spread_backward, spread_forward
from seqmesh.trainer.parallel import Ranks
from tests.kernels.reference import layout_of
from tests.ranks import run_ranks

GOOD = Ring(segment=0, start=0, ranks=(0, 1), index=0, chunks=(1, 2, 2, 2))
BAD: list[tuple[tuple[Ring, ...], str]] = [
    ((replace(GOOD, ranks=(0, 0)),), "rings[0].ranks is (0, 0): must be distinct ranks, at least one"),
    ((replace(GOOD, ranks=()),), "rings[0].ranks is (): must be distinct"),
    ((replace(GOOD, index=2),), "rings[0].index is 2: must be from 0 to 1"),
    ((replace(GOOD, index=-1),), "rings[0].index is -1: must be from 0 to 1"),
    ((replace(GOOD, chunks=(1, 2, 4)),), "rings[0].chunks is (1, 2, 4): must be 4 sizes, none negative"),
    ((replace(GOOD, chunks=(4, 2, 2, -1)),), "must be 4 sizes, none negative"),
    ((replace(GOOD, segment=2),), "rings[0].segment is 2: the layout has 2 segments"),
    ((replace(GOOD, segment=-1),), "rings[0].segment is -1: the layout has 2 segments"),
    ((replace(GOOD, start=1),), "rings[0].start is 1: segment 0 begins at row 0"),
    ((replace(GOOD, segment=1),), "rings[0].start is 0: segment 1 begins at row 3"),
    ((replace(GOOD, chunks=(2, 2, 2, 2)),), "rings[0]: segment 0 has 3 rows, its two chunks have 4"),
    ((GOOD, GOOD), "rings have segments [0, 0]: must be distinct"),
    ((replace(GOOD, segment=1, start=2), GOOD), "segment 1 begins at row 2, before row 3, where segment 0 ends"),
    ((replace(GOOD, ranks=(0, 2)),), "rings[0].ranks is (0, 2): the process group has ranks 0 to 1"),
    ((replace(GOOD, ranks=(-1, 0)),), "the process group has ranks 0 to 1"),
    ((replace(GOOD, ranks=(1, 0)),), "rings[0]: member 0 of (1, 0) is not this rank, 0"),
]


def layout_with(*rings: Ring) -> Layout:
    return replace(layout_of([3, 2]), rings=rings)


def complaint(layout: Layout) -> str:
    try:
        check_rings(layout)
    except ValueError as error:
        return str(error)
    return ""


def complaints_on_rank(ranks: Ranks, layouts: list[Layout]) -> list[str]:
    return [complaint(layout) for layout in layouts] if ranks.is_first else []


def test_rings_that_contradict_the_layout_or_the_group_are_refused() -> None:
    found, _ = run_ranks(complaints_on_rank, 2, [layout_with(*rings) for rings, _ in BAD] + [layout_with(GOOD)])
    assert found.pop() == ""
    for said, (_, message) in zip(found, BAD, strict=True):
        assert message in said


def test_rings_need_a_process_group_unless_they_have_one_rank() -> None:
    with pytest.raises(RuntimeError, match=re.escape("rings[0] has 2 ranks and there is no process group")):
        check_rings(layout_with(GOOD))
    check_rings(layout_with(replace(GOOD, ranks=(0,), chunks=(1, 2))))


def attend(layout: Layout, *, exchange: str = "auto", causal: bool = True, window: int | None = None) -> Tensor:
    rows = torch.ones(5, 2, 4)
    return varlen_attention(rows, rows, rows, layout, causal=causal, window=window, scale=0.5, exchange=exchange)


def test_a_ring_of_one_rank_is_a_whole_document() -> None:
    alone = replace(GOOD, ranks=(0,), chunks=(1, 2))
    for exchange in ("ring", "gather", "auto"):
        assert torch.equal(attend(layout_with(alone), exchange=exchange), attend(layout_with()))


def test_exchanges_that_cannot_do_what_is_asked_are_refused() -> None:
    """No process group is there to send anything."""
    with pytest.raises(ValueError, match="exchange is 'halo': must be one of 'auto', 'ring', 'gather'"):
        attend(layout_with(GOOD), exchange="halo")
    for rings in ((), (GOOD,)):  # alike on all ranks, whatever this micro-batch brings them
        with pytest.raises(ValueError, match="exchange is 'ring' and window is 3: it has no window, use 'gather'"):
            attend(layout_with(*rings), exchange="ring", window=3)
    with pytest.raises(NotImplementedError, match="window is 3 without causal, and the layout has rings"):
        attend(layout_with(GOOD), causal=False, window=3)
    attend(layout_with(replace(GOOD, ranks=(0,), chunks=(1, 2))), causal=False, window=3)


Gradients = tuple[Tensor, Tensor, Tensor]


def never_sent(send: list[Rows], receive: list[Rows]) -> Messages:
    return Messages([], send, receive)


def forward_of_shapes(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    assert len(q)
    assert k.shape == v.shape
    return torch.empty_like(q), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)


def backward_of_shapes(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Gradients:
    assert dout.shape == q.shape
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_nothing_waits_for_a_device(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on "meta" have no values: reading one raises."""
    for module in (circuit, gather):
        monkeypatch.setattr(module, "exchange", never_sent)
    later = Ring(segment=2, start=5, ranks=(1, 0, 2), index=1, chunks=(1, 2, 2, 2, 2, 2))
    layout = replace(layout_of([3, 2, 4, 6], device="meta"), rings=(later, GOOD))
    q, k = (torch.empty(17, heads, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    terms = Rule(causal=True, window=None, scale=0.5), exchange
    out, lse = spread_forward(q, k, k, layout, forward_of_shapes, *terms)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (4, 17), torch.float32)
    gradients = spread_backward(q, q, k, k, out, lse, layout, backward_of_shapes, *terms)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, k)]
