"""Attention over rings of real ranks equals the undivided computation; its parts equal obvious references."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout, Ring
from seqmesh.kernels.ring import merge, visible_block
from seqmesh.trainer.parallel import Ranks
from tests.kernels.reference import layout_of, relative_error
from tests.kernels.spread import Wave, random_rows, run, run_piece, run_whole
from tests.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}
COUNT = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    wave: Wave
    heads: tuple[int, int] = (4, 2)
    width: int = 8
    dtype: torch.dtype = torch.float64
    causal: bool = True
    layers: int = 1

    def inputs(self) -> list[Tensor]:
        return random_rows(sum(self.wave.lengths), self.heads, self.width, self.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """As many layers as the case has: keys and values of a later one are heads of the output before it."""
        out = varlen_attention(q, k, v, layout, causal=self.causal)
        step = self.heads[0] // self.heads[1]
        for _ in range(self.layers - 1):
            out = varlen_attention(out + q, out[:, ::step] + k, out[:, step - 1 :: step], layout, causal=self.causal)
        return out


WAVES = {
    "two pairs": Wave(rings=[(13, (0, 1)), (50, (2, 3))], whole={0: [3], 2: [1, 9]}),
    "overlapping triples": Wave(rings=[(29, (0, 1, 2)), (31, (1, 2, 3))], whole={1: [5, 0, 2]}, padding=2),
    "odd orders": Wave(rings=[(17, (2, 0)), (23, (3, 1, 0, 2)), (7, (1, 3))], padding=1),
    "three share a rank": Wave(rings=[(11, (0, 1)), (19, (0, 2)), (43, (3, 0))], whole={0: [4], 3: [6]}),
    "short": Wave(rings=[(length, (0, 1, 2, 3)) for length in range(1, 9)]),
    "one rank": Wave(rings=[(9, (1,)), (5, (0, 1))], whole={2: [12]}, padding=3),
    "empty": Wave(rings=[(0, (0, 1, 2)), (1, (1, 0)), (2, (2, 0, 1))], whole={3: [0, 1]}),
    "later ring on some": Wave(rings=[(37, (1, 2))], whole={3: [8]}),
}


def random_waves(count: int) -> list[Wave]:
    choose = random.Random(0)
    waves = []
    for _ in range(count):
        members = [tuple(choose.sample(range(COUNT), choose.randint(1, COUNT))) for _ in range(choose.randint(1, 5))]
        whole = {rank: choose.choices(range(20), k=choose.randint(0, 3)) for rank in range(COUNT)}
        rings = [(choose.randint(1, 50), ranks) for ranks in members]
        waves.append(Wave(rings=rings, whole=whole, padding=choose.randint(0, 2)))
    return waves


def exact_cases() -> list[Case]:
    cases = [Case(wave=wave) for wave in (*WAVES.values(), *random_waves(12))]
    cases += [Case(wave=wave, causal=False) for wave in WAVES.values()]
    cases += [Case(wave=wave, heads=heads) for wave in random_waves(3) for heads in [(8, 2), (4, 1), (2, 2)]]
    cases += [Case(wave=wave, layers=layers) for wave in WAVES.values() for layers in (2, 3)]
    return cases


def rounded_cases() -> list[Case]:
    # Blocks beyond the size up to which the back end computes in float32, and messages beyond what a socket buffers.
    long = Wave(rings=[(2500, (0, 1, 2, 3)), (700, (3, 1))], whole={0: [300, 5]}, padding=1)
    waves = [*WAVES.values(), *random_waves(4), long]
    return [Case(wave=wave, dtype=dtype, heads=(8, 2)) for wave in waves for dtype in (torch.float32, torch.bfloat16)]


def errors_on_rank(ranks: Ranks, cases: list[Case]) -> list[float | None]:
    """Worst error of each case; none where this rank has no micro-batch: it goes on, as in a step of unequal waves."""
    torch.set_num_threads(1)
    errors: list[float | None] = []
    for case in cases:
        layout, rows = case.wave.on(ranks.rank)
        if len(layout.cu_seqlens) == 1:
            errors.append(None)
            continue
        inputs = case.inputs()
        got, expected = run_piece(case.wave, ranks.rank, inputs, case.attend), run_whole(case.wave, inputs, case.attend)
        assert all(x.dtype == case.dtype for x in got)
        assert all(torch.equal(x[len(rows) :], torch.zeros_like(x[len(rows) :])) for x in got)
        errors.append(max(relative_error(x[: len(rows)], y[rows]) for x, y in zip(got, expected, strict=True)))
    return errors


@pytest.mark.parametrize("cases", [exact_cases(), rounded_cases()], ids=["exact", "rounded"])
def test_rings_equal_the_undivided_computation(cases: list[Case]) -> None:
    for errors in run_ranks(errors_on_rank, COUNT, cases):
        assert any(error is not None for error in errors)
        for case, error in zip(cases, errors, strict=True):
            assert error is None or error <= TOLERANCE[case.dtype], case


def rounding_on_rank(ranks: Ranks, case: Case) -> list[float]:
    """Mean error of the output and each gradient here, in units of that of one undivided call in the same dtype."""
    torch.set_num_threads(1)
    _, rows = case.wave.on(ranks.rank)
    *qkv, dout = case.inputs()
    exact = run_whole(case.wave, [*qkv, dout])
    undivided = run(case.attend, qkv, dout, layout_of(case.wave.lengths))
    pairs = zip(run_piece(case.wave, ranks.rank, [*qkv, dout]), undivided, exact, strict=True)
    return [float((got - want[rows]).abs().mean() / (one - want)[rows].abs().mean()) for got, one, want in pairs]


def test_sums_over_a_ring_are_not_rounded_on_the_way() -> None:
    """A ring rounds each block's part where an undivided call rounds once: 1.6 times the error, not 1.8 and growing."""
    case = Case(wave=Wave(rings=[(200, (0, 1, 2, 3))]), dtype=torch.bfloat16)
    for ratios in run_ranks(rounding_on_rank, COUNT, case):
        assert max(ratios) <= 1.7


def sent_on_rank(ranks: Ranks, cases: list[Case]) -> list[tuple[int, int]]:
    """Bytes sent forward and backward."""
    sent = []
    for case in cases:
        layout, rows = case.wave.on(ranks.rank)
        q, k, v, dout = (x[rows].requires_grad_() for x in case.inputs())
        out = varlen_attention(q, k, v, layout, causal=case.causal)
        forward = layout.traffic.sent
        torch.autograd.grad(out, (q, k, v), dout)
        sent.append((forward, layout.traffic.sent - forward))
    return sent


def rows_sent(wave: Wave, causal: bool) -> int:
    """Rows of blocks that all ranks together send: every member gets each key that it sees and does not hold, once."""
    rows = 0
    for length, members in wave.rings:
        D = len(members)
        starts = [chunk * length // (2 * D) for chunk in range(2 * D + 1)]
        for owner in range(D):
            early, late = (starts[chunk + 1] - starts[chunk] for chunk in (owner, 2 * D - 1 - owner))
            rows += (D - 1) * early + (owner if causal else D - 1) * late
    return rows


def test_bytes_sent_are_counted_exactly() -> None:
    waves = [*WAVES.values(), *random_waves(4)]
    cases = [Case(wave=wave, dtype=dtype) for wave in waves for dtype in (torch.float64, torch.bfloat16)]
    cases += [Case(wave=wave, dtype=torch.float32, causal=False) for wave in waves]
    counts = run_ranks(sent_on_rank, COUNT, cases)
    for i, case in enumerate(cases):
        values = rows_sent(case.wave, case.causal) * 2 * case.heads[1] * case.width
        wide = max(case.dtype.itemsize, 4)  # gradients travel as float32, or float64 for float64
        assert sum(count[i][0] for count in counts) == values * case.dtype.itemsize
        assert sum(count[i][1] for count in counts) == values * (case.dtype.itemsize + wide)
    one_rank = next(i for i, case in enumerate(cases) if case.wave is WAVES["one rank"])
    # Chunks of 5 tokens on two ranks are 1, 1, 1, 2 rows. The first sends its early one, the second all it has.
    row = 2 * 2 * 8 * 8
    assert [count[one_rank] for count in counts] == [(row, (1 + 2) * row), (2 * row, (2 + 1) * row), (0, 0), (0, 0)]


def repeat_on_rank(ranks: Ranks, case: Case) -> bool:
    runs = [run_piece(case.wave, ranks.rank, case.inputs(), case.attend) for _ in range(3)]
    return all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


def test_results_have_the_same_bits_in_every_run() -> None:
    wave = Wave(rings=[(1100, (0, 3, 2, 1)), (301, (2, 1, 0)), (90, (3, 0))], whole={1: [40]})
    assert all(run_ranks(repeat_on_rank, COUNT, Case(wave=wave, dtype=torch.float32, layers=2)))


GOOD = Ring(0, (0, 1), 0, (1, 2, 2, 2))
BAD_RINGS: list[tuple[tuple[Ring, ...], str]] = [
    ((replace(GOOD, ranks=(0, 0)),), "rings[0].ranks is (0, 0): must be distinct ranks, at least one"),
    ((replace(GOOD, ranks=()),), "rings[0].ranks is (): must be distinct"),
    ((replace(GOOD, index=2),), "rings[0].index is 2: must be from 0 to 1"),
    ((replace(GOOD, index=-1),), "rings[0].index is -1: must be from 0 to 1"),
    ((replace(GOOD, chunks=(1, 2, 4)),), "rings[0].chunks is (1, 2, 4): must be 4 sizes, none negative"),
    ((replace(GOOD, chunks=(4, 2, 2, -1)),), "must be 4 sizes, none negative"),
    ((replace(GOOD, segment=2),), "rings[0].segment is 2: the layout has 2 segments"),
    ((replace(GOOD, segment=-1),), "rings[0].segment is -1: the layout has 2 segments"),
    ((replace(GOOD, chunks=(2, 2, 2, 2)),), "rings[0]: segment 0 has 3 rows, its two chunks have 4"),
    ((GOOD, GOOD), "rings have segments [0, 0]: must be distinct"),
    ((replace(GOOD, ranks=(0, 2)),), "rings[0].ranks is (0, 2): the process group has ranks 0 to 1"),
    ((replace(GOOD, ranks=(-1, 0)),), "the process group has ranks 0 to 1"),
    ((replace(GOOD, ranks=(1, 0)),), "rings[0]: member 0 of (1, 0) is not this rank, 0"),
]


def attend_with(rings: tuple[Ring, ...], window: int | None = None) -> Tensor:
    rows = torch.ones(5, 2, 4)
    return varlen_attention(rows, rows, rows, replace(layout_of([3, 2]), rings=rings), window=window)


def complaints_on_rank(ranks: Ranks, calls: list[Callable[[], Tensor]]) -> list[str]:
    found = []
    for call in calls if ranks.is_first else []:
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def test_rings_that_contradict_the_layout_or_the_group_are_refused() -> None:
    found, _ = run_ranks(complaints_on_rank, 2, [partial(attend_with, rings) for rings, _ in BAD_RINGS])
    for complaint, (_, message) in zip(found, BAD_RINGS, strict=True):
        assert message in complaint


def test_rings_need_a_process_group_unless_they_have_one_rank() -> None:
    with pytest.raises(RuntimeError, match=re.escape("rings[0] has 2 ranks and there is no process group")):
        attend_with((GOOD,))
    assert torch.equal(attend_with((Ring(0, (0,), 0, (1, 2)),)), attend_with(()))


def test_a_window_over_rings_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="window is 3 and the layout has rings"):
        attend_with((GOOD,), window=3)


CHUNKS = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, 4), min_size=2 * size, max_size=2 * size))


@given(chunks=CHUNKS, causal=st.booleans())
def test_members_compute_every_visible_pair_once(chunks: list[int], causal: bool) -> None:
    size, starts = len(chunks) // 2, list(accumulate(chunks, initial=0))
    ring = Ring(0, tuple(range(size)), 0, tuple(chunks))
    held = [
        [token for chunk in (i, 2 * size - 1 - i) for token in range(starts[chunk], starts[chunk + 1])]
        for i in range(size)
    ]
    count = torch.zeros(starts[-1], starts[-1], dtype=torch.int64)
    for i, tokens in enumerate(held):
        for row, query in enumerate(tokens):  # inside the segment: causal by row
            count[query, tokens[: row + 1] if causal else tokens] += 1
        for j in set(range(size)) - {i}:
            first, keys = visible_block(ring, i, j, causal)
            for query in tokens[first:]:
                count[query, held[j][:keys]] += 1
    assert torch.equal(count, torch.ones_like(count).tril() if causal else torch.ones_like(count))


LSE = st.one_of(st.just(-torch.inf), st.floats(-1e4, 1e4), st.floats(-5, 5))
PARTS = st.lists(st.tuples(LSE, st.floats(-3, 3)), min_size=1, max_size=6)


def merge_in_order(parts: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros(1, 1, 1, dtype=torch.float64), torch.full((1, 1), -torch.inf, dtype=torch.float64)
    for part_lse, value in parts:
        seen = part_lse > -torch.inf
        out, lse = merge(out, lse, torch.full_like(out, value if seen else 0.0), torch.full_like(lse, part_lse))
    return out, lse


@given(parts=PARTS)
def test_merging_is_a_weighted_mean_and_a_log_of_a_sum(parts: list[tuple[float, float]]) -> None:
    out, lse = merge_in_order(parts)
    scores = torch.tensor([part_lse for part_lse, _ in parts], dtype=torch.float64)
    if bool((scores == -torch.inf).all()):
        assert (out.item(), lse.item()) == (0.0, -torch.inf)
        return
    expected = torch.softmax(scores, dim=0) @ torch.tensor([value for _, value in parts], dtype=torch.float64)
    assert abs(out.item() - float(expected)) <= 1e-10
    assert abs(lse.item() - float(torch.logsumexp(scores, dim=0))) <= 1e-10
    assert torch.allclose(merge_in_order(parts[::-1])[0], out, rtol=0, atol=1e-10)


def test_a_row_without_keys_is_neutral_in_merging() -> None:
    out = torch.tensor([[[0.3, -2.0]]])
    for lse in (torch.tensor([[-90.0]]), torch.tensor([[1e30]])):
        none = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        for merged in (merge(out, lse, *none), merge(*none, out, lse)):
            assert torch.equal(merged[0], out)
            assert torch.equal(merged[1], lse)
