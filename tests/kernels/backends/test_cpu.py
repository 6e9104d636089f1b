"""The CPU back end where it cuts segments, and in what it promises beyond the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqmesh.kernels.backends import cpu_blocks
from seqmesh.kernels.backends.cpu import BACKEND
from seqmesh.kernels.backends.cpu_blocks import (
    LONGEST_CUT,
    SMALLEST_STRIP,
    Block,
    Cut,
    blocks,
    is_short,
    key_strips,
    query_strips,
)
from tests.kernels.backends.contract import Case, call_backward, call_forward, check, random_tensors, request
from tests.kernels.reference import allowed_pairs

SIDES = st.one_of(
    st.integers(0, 3), st.integers(SMALLEST_STRIP - 1, SMALLEST_STRIP + 1), st.integers(0, 3 * SMALLEST_STRIP + 5)
)


def pairs_of(block: Block, rows: int, keys: int) -> Tensor:
    """[rows, keys] bool: what a call of the block makes its queries see."""
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    part = seen[block.queries, block.keys]
    part.fill_(True)
    if block.causal:  # as the native operators have it: from the top left
        part.copy_(part.tril())
    if block.mask is not None:
        assert block.mask.shape == part.shape
        assert block.mask.stride(1) == 1  # what the native operators take for granted
        part &= block.mask == 0
    return seen


@settings(max_examples=150, deadline=None)
@given(rows=SIDES, keys=SIDES, square=st.booleans(), causal=st.booleans(), window=st.none() | st.integers(1, 210))
@pytest.mark.parametrize("cut", [query_strips, key_strips])
def test_blocks_have_every_visible_pair_once(
    cut: Cut, rows: int, keys: int, square: bool, causal: bool, window: int | None
) -> None:
    keys = rows if square else keys
    expected = allowed_pairs([rows], causal, window, [keys])
    if is_short(rows, keys, causal=causal, window=window):
        assert torch.equal(
            pairs_of(Block(queries=slice(0, rows), keys=slice(0, keys), causal=causal), rows, keys), expected
        )
        return
    count, met = torch.zeros(rows, keys), torch.zeros(rows, dtype=torch.bool)
    for block in blocks(rows, keys, causal=causal, window=window, cut=cut, dtype=torch.float32):
        pairs = pairs_of(block, rows, keys)
        count += pairs
        if cut is query_strips:
            assert bool(pairs[block.queries].any(dim=1).all()), "a row that sees nothing gets lse 0 from the operator"
            assert bool((met[block.queries] == block.again).all()), "merged with nothing, or written over"
            met[block.queries] = True
    assert torch.equal(count, expected.float())


@pytest.mark.parametrize(
    ("lengths", "key_lengths", "window"),
    [
        ([SMALLEST_STRIP, SMALLEST_STRIP + 1, 2 * SMALLEST_STRIP + 3], None, None),
        ([1, 3 * SMALLEST_STRIP], None, SMALLEST_STRIP),
        ([200, 1, 90], None, 1),
        ([70, 150, 64], [150, 70, 128], None),
        ([70, 150, 64], [150, 70, 128], 65),
        ([300, 20], [40, 300], 33),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_cut_segments_equal_the_reference(
    lengths: list[int], key_lengths: list[int] | None, window: int | None, causal: bool
) -> None:
    case = Case(lengths=lengths, key_lengths=key_lengths, window=window, causal=causal, width=5, padding=1)
    check(BACKEND, case)
    check(BACKEND, replace(case, heads=(2, 2), dtype=torch.float32))
    check(BACKEND, replace(case, heads=(3, 1), dtype=torch.bfloat16))


@pytest.mark.parametrize("length", [LONGEST_CUT, LONGEST_CUT + 1])
def test_the_longest_square_that_is_cut_and_the_next(length: int) -> None:
    check(BACKEND, Case(lengths=[length], heads=(1, 1), width=4, dtype=torch.float32))


def test_masks_are_made_once_for_all_segments_and_calls() -> None:
    cpu_blocks._kept_mask.cache_clear()
    case = Case(lengths=(200, 70, 130), window=40)
    check(BACKEND, case)
    made = cpu_blocks._kept_mask.cache_info().misses
    check(BACKEND, case)
    assert (made, cpu_blocks._kept_mask.cache_info().misses) == (2, 2)  # forward and backward


def test_a_window_no_smaller_than_the_keys_cuts_nothing() -> None:
    case = Case(lengths=[20, 300], dtype=torch.float32)
    assert is_short(50, 50, causal=False, window=50)
    assert not is_short(50, 50, causal=False, window=49)
    tensors = random_tensors(case)
    out, lse = call_forward(BACKEND, case, tensors)
    wide, wide_lse = call_forward(BACKEND, replace(case, window=300), tensors)
    assert torch.equal(out, wide)
    assert torch.equal(lse, wide_lse)


@pytest.mark.parametrize("window", [None, 70])
def test_same_bits_at_one_and_two_threads(window: int | None) -> None:
    case = Case(lengths=[500, 3, 97], heads=(4, 2), width=16, window=window, dtype=torch.float32)
    tensors, before = random_tensors(case), torch.get_num_threads()

    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        out, lse = call_forward(BACKEND, case, tensors)
        return [out, lse, *call_backward(BACKEND, case, tensors, out, lse)]

    try:
        assert all(torch.equal(one, two) for one, two in zip(run(1), run(2), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    case = Case(lengths=[130, 9], window=40, dtype=dtype)
    q, k, v, dout = random_tensors(case)
    out, lse = call_forward(BACKEND, case, (q, k, v, dout))
    gradients = call_backward(BACKEND, case, (q, k, v, dout), out, lse)
    wide = (q.float(), k.float(), v.float(), dout.float())
    wide_out, wide_lse = call_forward(BACKEND, case, wide)
    assert torch.equal(lse, wide_lse)
    assert torch.equal(out, wide_out.to(dtype))
    for got, expected in zip(gradients, call_backward(BACKEND, case, wide, out.float(), lse), strict=True):
        assert torch.equal(got, expected.to(dtype))


@pytest.mark.parametrize("shape", [(1, 2, 8), (1, 1, 1)], ids=["row", "number"])
def test_rows_that_are_one_in_memory(shape: tuple[int, ...]) -> None:
    """As a sum hands back its gradient, and the native operators cannot read."""
    case = Case(lengths=[70, 4], heads=(2, 2))
    q, k, v, dout = (x[: shape[0], : shape[1], : shape[2]].expand(x.shape) for x in random_tensors(case))
    dense = (q.contiguous(), k.contiguous(), v.contiguous(), dout.contiguous())
    out, lse = call_forward(BACKEND, case, (q, k, v, dout))
    got = (out, lse, *call_backward(BACKEND, case, (q, k, v, dout), out, lse))
    expected = (*call_forward(BACKEND, case, dense), *call_backward(BACKEND, case, dense, out, lse))
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_what_it_refuses() -> None:
    assert BACKEND.refusal(request(Case(lengths=[3], window=3, causal=False))) is None
    assert BACKEND.refusal(request(Case(lengths=[3], device="meta"))) == (
        "tensors are on meta, this back end runs on cpu"
    )
    refused = BACKEND.refusal(request(Case(lengths=[3], dtype=torch.int64)))
    assert refused is not None
    assert refused.startswith("dtype is torch.int64, must be one of torch.float64, torch.float32")
