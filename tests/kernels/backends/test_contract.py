"""The back ends that run anywhere keep the contract: any layout, window, heads, strides, dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.kernels.backends import cpu, reference
from seqmesh.kernels.backends.base import Backend
from tests.kernels.backends.contract import Case, check, check_split

BACKENDS = {"reference": reference.BACKEND, "cpu": cpu.BACKEND}
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))

HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)])  # as many, grouped, one for all
WINDOWS = st.none() | st.integers(1, 16)
LENGTHS = st.integers(0, 12)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Segments with as many keys as queries, or fewer, or more, or none of either."""
    segments = draw(st.lists(st.tuples(LENGTHS, LENGTHS, st.booleans()), max_size=6))
    return Case(
        lengths=[rows for rows, _, _ in segments],
        key_lengths=[rows if square else keys for rows, keys, square in segments],
        heads=draw(HEADS),
        width=draw(st.integers(1, 9)),
        padding=draw(st.integers(0, 2)),
        causal=draw(st.booleans()),
        window=draw(WINDOWS),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        strided=draw(st.booleans()),
    )


@every_backend
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_random_calls_equal_the_reference(backend: Backend, case: Case) -> None:
    check(backend, case)


@every_backend
@settings(max_examples=25, deadline=None)
@given(
    segments=st.lists(st.tuples(LENGTHS, LENGTHS, LENGTHS), max_size=5),
    heads=HEADS,
    padding=st.integers(0, 2),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
)
def test_keys_in_two_calls_merge_to_the_undivided_attention(
    backend: Backend,
    segments: list[tuple[int, int, int]],
    heads: tuple[int, int],
    padding: int,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    """Causal, the late keys are at least as many as the rows, so that every row sees every early one."""
    lengths = [rows for rows, _, _ in segments]
    early = [first for _, first, _ in segments]
    keys = [first + (rows if causal else 0) + more for rows, first, more in segments]
    check_split(
        backend,
        Case(lengths=lengths, key_lengths=keys, heads=heads, padding=padding, causal=causal, dtype=dtype),
        early,
    )


@every_backend
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [0, 0, 5, 0]], ids=str)
@pytest.mark.parametrize("window", [None, 2])
def test_segments_without_rows(backend: Backend, lengths: list[int], window: int | None) -> None:
    check(backend, Case(lengths=lengths, padding=3, window=window))
    check(backend, Case(lengths=[0 for _ in lengths], key_lengths=lengths, padding=3, window=window))
    check(backend, Case(lengths=lengths, key_lengths=[0 for _ in lengths], window=window, causal=False))
