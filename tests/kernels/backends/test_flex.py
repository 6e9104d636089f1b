"""The FlexAttention back end: what a row sees, and on the CPU, uncompiled, its forward pass."""

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from seqmesh.kernels.backends import flex, reference
from seqmesh.kernels.backends.base import Rule, Segments
from seqmesh.tools.kernel_cases import TOLERANCES, Case, cases, compare

CPU = torch.device("cpu")


def seen(segments: Segments, rule: Rule, rows: int, keys: int) -> Tensor:
    """[rows, keys] bool, segment by segment."""
    mask = torch.zeros(rows, keys, dtype=torch.bool)
    for queries, others in reference.row_ranges(segments):
        sizes = queries.stop - queries.start, others.stop - others.start
        mask[queries, others] = reference.visible(*sizes, rule)
    return mask


def test_a_row_sees_one_run_of_keys_and_tiles_follow() -> None:
    draw = random.Random(0)
    for causal, window in itertools.product((True, False), (None, 1, 2, 50, 700)):
        for _ in range(12):
            lengths = [[draw.choice((0, 1, 3, 130, 300)) for _ in range(4)] for _ in range(2)]
            cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in lengths)
            rows, keys = (int(cu[-1]) + draw.choice((1, 200)) for cu in (cu_q, cu_k))
            segments, rule = Segments(cu_q, cu_k, *map(max, lengths)), Rule(causal, window, 1.0)
            first, stop = flex.key_ranges(segments, rule, rows)
            true = seen(segments, rule, rows, keys)
            key = torch.arange(keys)
            assert torch.equal((first[:, None] <= key) & (key < stop[:, None]), true)
            some, every = flex.visible_tiles(first, stop, keys)
            assert_tiles(some, every, true)


def assert_tiles(some: Tensor, every: Tensor, true: Tensor) -> None:
    """Nothing visible is left out, and the mask is not asked just where the whole of a tile is visible."""
    for row, tile in enumerate(torch.split(true, flex.TILE)):
        for column, block in enumerate(torch.split(tile, flex.TILE, dim=1)):
            assert bool(some[row, column]) >= bool(block.any())
            assert bool(every[row, column]) == (bool(block.all()) and block.shape[1] == flex.TILE)


def test_forward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # traces nothing: it is quick
    for case in cases()[::5]:
        assert_forward(case, torch.float32)
    assert_forward(cases()[0], torch.bfloat16)


def assert_forward(case: Case, dtype: torch.dtype) -> None:
    errors = compare(flex.BACKEND, case, CPU, dtype)
    assert errors.keys() == {"out", "lse"}
    assert max(errors.values()) <= TOLERANCES[dtype], (case, errors)


def test_as_called_on_the_cpu_without_a_word_of_warning() -> None:
    assert_forward(cases()[0], torch.float32)
