"""Packed attention against a dense float64 reference, and every refusal of its contract."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout
from tests.kernels.reference import layout_of, leaves, reference_attention, relative_error

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}

HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (4, 1)])  # as many, grouped, one for all
SMALL_LENGTHS = st.lists(st.integers(0, 12), max_size=8)
ADVERSARIAL_LENGTHS = [[0], [1], [], [0, 0, 5, 0], [1] * 40, [700], [1, 600, 0, 1, 2], [256, 257, 1]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


QKV = tuple[Tensor, Tensor, Tensor]


def random_rows(rows: int, q_heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> QKV:
    """q, k, v as strided views of one fused projection, as models have them."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(rows, q_heads + 2 * kv_heads, width, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = torch.split(fused, [q_heads, kv_heads, kv_heads], dim=1)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def errors_against_reference(
    lengths: list[int],
    heads: tuple[int, int],
    *,
    width: int = 8,
    padding: int = 0,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
    backend: str = "auto",
) -> dict[str, float]:
    """Relative errors of the output and of the three gradients."""
    q, k, v = random_rows(sum(lengths) + padding, *heads, width, dtype)
    out = varlen_attention(q, k, v, layout_of(lengths), causal=causal, window=window, backend=backend)
    assert out.dtype == dtype
    assert out.shape == q.shape
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    exact = leaves(q, k, v)
    expected = reference_attention(exact, lengths, causal=causal, window=window, scale=width**-0.5)
    expected_gradients = torch.autograd.grad(expected, exact, dout.double())
    pairs = zip(("out", "dq", "dk", "dv"), (out, *gradients), (expected, *expected_gradients), strict=True)
    return {name: relative_error(got, want) for name, got, want in pairs}


def assert_exact(errors: dict[str, float], dtype: torch.dtype = torch.float64) -> None:
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@settings(max_examples=60, deadline=None)
@given(
    lengths=SMALL_LENGTHS,
    heads=HEADS,
    padding=st.integers(0, 3),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 14),
    width=st.integers(1, 9),
    backend=st.sampled_from(["auto", "reference"]),
)
def test_small_packs_equal_the_reference(
    lengths: list[int],
    heads: tuple[int, int],
    padding: int,
    causal: bool,
    window: int | None,
    width: int,
    backend: str,
) -> None:
    assert_exact(
        errors_against_reference(
            lengths, heads, padding=padding, causal=causal, window=window, width=width, backend=backend
        )
    )


@settings(max_examples=15, deadline=None)
@given(lengths=SMALL_LENGTHS, heads=HEADS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_small_packs_equal_the_reference_in_lower_precision(
    lengths: list[int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    assert_exact(errors_against_reference(lengths, heads, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("lengths", ADVERSARIAL_LENGTHS, ids=str)
def test_adversarial_packs_equal_the_reference(lengths: list[int], dtype: torch.dtype) -> None:
    assert_exact(errors_against_reference(lengths, (4, 2), padding=2, dtype=dtype), dtype)


def test_gradients_pass_gradcheck() -> None:
    layout = layout_of([3, 0, 1, 4])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, layout)

    assert torch.autograd.gradcheck(attend, leaves(*random_rows(9, 4, 2, 3, torch.float64)))


def test_scale_is_used() -> None:
    q, k, v = random_rows(6, 2, 2, 4, torch.float64)
    out = varlen_attention(q, k, v, layout_of([6]), scale=0.9)
    assert relative_error(out, reference_attention((q, k, v), [6], causal=True, scale=0.9)) <= 1e-12
    assert relative_error(out, varlen_attention(q, k, v, layout_of([6]))) > 1e-3


def test_last_dimension_with_a_stride() -> None:
    q, k, v = (x.detach().transpose(0, 2).contiguous().transpose(0, 2) for x in random_rows(7, 2, 2, 4, torch.float64))
    assert q.stride(-1) != 1
    out = varlen_attention(q, k, v, layout_of([3, 4]))
    assert relative_error(out, reference_attention((q, k, v), [3, 4], causal=True, scale=0.5)) <= 1e-12


def test_expanded_output_gradient() -> None:
    q, k, v = leaves(*random_rows(7, 2, 2, 4, torch.float64))
    summed = torch.autograd.grad(varlen_attention(q, k, v, layout_of([3, 4])).sum(), (q, k, v))
    out = varlen_attention(q, k, v, layout_of([3, 4]))
    for got, expected in zip(summed, torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), strict=True):
        assert torch.equal(got, expected)


def test_same_bits_at_one_and_two_threads() -> None:
    q, k, v = random_rows(600, 4, 2, 16, torch.float32)

    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        out = varlen_attention(q, k, v, layout_of([500, 3, 97]))
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    assert all(torch.equal(one, two) for one, two in zip(run(1), run(2), strict=True))


@pytest.mark.parametrize(
    ("bounds", "max_seqlen", "message"),
    [
        ([1, 4], 3, "cu_seqlens[0] is 1: must be 0"),
        ([0, 3, 2, 4], 3, "cu_seqlens falls from 3 to 2 at segment 1"),
        ([0, 3, 6], 3, "cu_seqlens ends at 6, beyond the 4 rows"),
        ([0, 1, 4], 1, "max_seqlen is 1, the longest segment has 3 rows"),
        ([], 0, "cu_seqlens is torch.int32 [0]: must be int32 [N + 1]"),
    ],
)
def test_wrong_bounds_are_refused(bounds: list[int], max_seqlen: int, message: str) -> None:
    layout = Layout(torch.tensor(bounds, dtype=torch.int32), max_seqlen)
    with pytest.raises(ValueError, match=re.escape(message)):
        varlen_attention(*random_rows(4, 2, 2, 4, torch.float32), layout)


@pytest.mark.parametrize("cu_seqlens", [torch.tensor([0, 4]), torch.tensor([[0, 4]], dtype=torch.int32)])
def test_wrong_kind_of_bounds_is_refused(cu_seqlens: Tensor) -> None:
    with pytest.raises(ValueError, match=re.escape("must be int32 [N + 1]")):
        varlen_attention(*random_rows(4, 2, 2, 4, torch.float32), Layout(cu_seqlens, 4))


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((4, 2), (4, 2), (4, 2), "must be q [T, Hq, D]"),
        ((4, 2, 8), (4, 2, 8), (4, 1, 8), "must be q [T, Hq, D]"),
        ((4, 2, 8), (5, 2, 8), (5, 2, 8), "rows and head width must be equal"),
        ((4, 2, 8), (4, 2, 6), (4, 2, 6), "rows and head width must be equal"),
        ((4, 3, 8), (4, 2, 8), (4, 2, 8), "q has 3 heads and k has 2"),
        ((4, 2, 8), (4, 4, 8), (4, 4, 8), "q has 2 heads and k has 4"),
        ((4, 0, 8), (4, 2, 8), (4, 2, 8), "must be at least 1"),
        ((4, 2, 0), (4, 2, 0), (4, 2, 0), "must be at least 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        varlen_attention(torch.ones(q), torch.ones(k), torch.ones(v), layout_of([4]))


def test_mixed_dtypes_are_refused() -> None:
    q, k, v = random_rows(4, 2, 2, 4, torch.float32)
    with pytest.raises(ValueError, match=re.escape("k torch.float64")):
        varlen_attention(q, k.double(), v, layout_of([4]))


def test_a_negative_window_is_refused_and_none_or_zero_is_all() -> None:
    q, k, v = random_rows(4, 2, 2, 4, torch.float32)
    with pytest.raises(ValueError, match="window is -1"):
        varlen_attention(q, k, v, layout_of([4]), window=-1)
    full = varlen_attention(q, k, v, layout_of([4]))
    assert torch.equal(varlen_attention(q, k, v, layout_of([4]), window=0), full)
    assert torch.equal(varlen_attention(q, k, v, layout_of([4]), window=4), full)
    assert not torch.equal(varlen_attention(q, k, v, layout_of([4]), window=3), full)


@pytest.mark.parametrize("backend", ["torch", "flash2", "flash3", "flash4"])
def test_a_back_end_for_another_device_is_refused_by_name(backend: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{backend}: .*cpu"):
        varlen_attention(*random_rows(4, 2, 2, 4, torch.float32), layout_of([4]), backend=backend)


def test_a_family_is_refused_with_the_reason_of_each_member() -> None:
    with pytest.raises(NotImplementedError, match=r"flash3: .*flash4: .*flash2: .*backend='reference' does anything"):
        varlen_attention(*random_rows(4, 2, 2, 4, torch.float32), layout_of([4]), backend="flash")


def test_bounds_on_another_device_are_refused() -> None:
    q, k, v = (x.detach().to("meta") for x in random_rows(4, 2, 2, 4, torch.float32))
    with pytest.raises(ValueError, match="cu_seqlens is on cpu, q on meta"):
        varlen_attention(q, k, v, layout_of([4]))


def test_an_unknown_back_end_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"backend is 'magic': must be 'auto', 'flash', or one of cpu, .*reference"):
        varlen_attention(*random_rows(4, 2, 2, 4, torch.float32), layout_of([4]), backend="magic")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_log_sum_exp_is_handed_out_and_carries_no_gradient(backend: str) -> None:
    q, k, v = random_rows(8, 4, 2, 4, torch.float64)
    _, lse = varlen_attention(q, k, v, layout_of([3, 4]), causal=False, backend=backend, return_lse=True)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) / 2
    expected = torch.cat((scores[:, :3, :3].logsumexp(-1), scores[:, 3:7, 3:7].logsumexp(-1)), dim=1)
    assert lse.shape == (4, 8) and not lse.requires_grad
    assert relative_error(lse[:, :7], expected) <= 1e-12
    assert torch.equal(lse[:, 7:], lse.new_full((4, 1), -torch.inf))


def test_a_dtype_without_a_kernel_is_refused() -> None:
    q, k, v = (torch.ones(4, 2, 4, dtype=torch.int64) for _ in range(3))
    with pytest.raises(NotImplementedError, match=re.escape("dtype is torch.int64")):
        varlen_attention(q, k, v, layout_of([4]))
