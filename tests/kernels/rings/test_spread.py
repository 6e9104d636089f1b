"""Attention over rings of real ranks equals the undivided computation, whatever is spread and however it is exchanged.

All cases run once, one after the other, on the same six ranks; tests look at what came of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.rings import spread
from seqmesh.packer.pieces import piece_rows, piece_tokens, rows_sent
from seqmesh.trainer.parallel import Ranks
from tests.kernels.reference import layout_of, relative_error
from tests.kernels.spread import Terms, Wave, attend, random_rows, run, with_nan_rows
from tests.ranks import run_ranks

COUNT = 6
BACKEND = "cpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A micro-batch and what layers do with it, the next with what the one before made of it."""

    wave: Wave
    layers: tuple[Terms, ...]
    heads: tuple[int, int] = (4, 2)
    width: int = 4
    dtype: torch.dtype = torch.float64
    mixed: bool = False  # whether "auto" chooses by whether a document's length is even
    repeat: bool = False  # whether to compare the bits of two runs
    means: bool = False  # whether all scores are 0 and every value is its row's number

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        rows = sum(self.wave.lengths)
        q, k, v, dout = random_rows(rows, self.heads, self.width, self.dtype)
        if self.means:
            q, v = torch.zeros_like(q), torch.arange(rows).view(-1, 1, 1).expand_as(v)
        return [x.to(dtype) for x in (q, k, v, dout)]

    def attend(self, backend: str, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Keys and values of a later layer are heads of the output before it."""
        first, *later = self.layers
        out, step = attend(q, k, v, layout, backend, first), self.heads[0] // self.heads[1]
        for terms in later:
            out = attend(out + q, out[:, ::step] + k, out[:, step - 1 :: step], layout, backend, terms)
        return out


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank has of a case: output, dq, dk and dv of its rows; bytes sent forward and in all, and how many of them
    were gradients; whether rows past the end are 0, and whether a second run, if there was one, gave the same bits."""

    values: list[npt.NDArray[np.float64]]
    forward: int
    sent: int
    gradients: int
    zeros: bool
    repeated: bool | None


WAVES = {
    "two pairs": Wave(rings=[(13, (0, 1)), (50, (2, 3))], whole={0: [3], 2: [1, 9]}),
    "overlapping triples": Wave(rings=[(29, (0, 1, 2)), (31, (1, 2, 3))], whole={1: [5, 0, 2]}, padding=2),
    "odd orders": Wave(rings=[(17, (2, 0)), (23, (3, 1, 0, 2)), (7, (1, 3))], padding=1),
    "three share a rank": Wave(rings=[(11, (0, 1)), (19, (0, 2)), (44, (3, 0))], whole={0: [4], 3: [6]}),
    "short": Wave(rings=[(length, (0, 1, 2, 3)) for length in range(1, 9)]),
    "one rank": Wave(rings=[(9, (1,)), (5, (0, 1))], whole={2: [12]}, padding=3),
    "empty": Wave(rings=[(0, (0, 1, 2)), (1, (1, 0)), (2, (2, 0, 1))], whole={3: [0, 1]}),
    "later ring on some": Wave(rings=[(37, (1, 2))], whole={3: [8]}),
    "four, two, one, one": Wave(rings=[(41, (0, 1, 2, 3)), (18, (4, 5)), (6, (4,)), (7, (5,))], padding=64),
    "three, two, one": Wave(rings=[(25, (4, 0, 2)), (16, (5, 1)), (6, (3,))], whole={3: [2], 4: [1, 1]}),
    "all six": Wave(
        rings=[(61, (0, 1, 2, 3, 4, 5)), (30, (5, 3, 1, 0, 2, 4)), (7, (2, 1, 0, 5, 4, 3))], whole={3: [5]}
    ),
    "five": Wave(rings=[(53, (4, 2, 0, 1, 3)), (10, (5, 0))], padding=1),
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


KINDS = [
    *(Terms(exchange=exchange) for exchange in ("ring", "gather", "auto")),
    *(Terms(exchange=exchange, causal=False) for exchange in ("ring", "gather")),
    # Smaller and larger than chunks, the row itself only, and beyond every document.
    *(Terms(window=window, exchange="gather" if window % 2 else "auto") for window in (1, 2, 5, 11, 26, 1000)),
]
DEEP = [
    (Terms(exchange="gather"), Terms(exchange="ring")),
    (Terms(window=4), Terms(exchange="ring"), Terms(exchange="gather", causal=False)),
]


def exact_cases() -> list[Case]:
    cases = [Case(wave=wave, layers=(terms,)) for wave in WAVES.values() for terms in KINDS]
    cases += [Case(wave=wave, layers=layers, repeat=True) for wave in WAVES.values() for layers in DEEP]
    cases += [Case(wave=wave, layers=(Terms(), Terms()), mixed=True) for wave in (*WAVES.values(), *random_waves(4))]
    for number, wave in enumerate(random_waves(12)):
        heads = [(4, 4), (6, 2), (3, 1)][number % 3]
        cases += [Case(wave=wave, layers=(terms,), heads=heads) for terms in KINDS[number % 2 :: 2]]
    return cases


ROUNDED = [("ring", None), ("gather", None), ("auto", 9)]


def rounded_cases() -> list[Case]:
    # The last has messages beyond what a socket buffers.
    long = Wave(rings=[(1500, (0, 1, 2, 3)), (300, (3, 1))], whole={0: [100, 5]}, padding=1)
    cases = [(wave, (8, 2), 4) for wave in (*WAVES.values(), *random_waves(4))] + [(long, (2, 2), 64)]
    kinds = [Terms(exchange=exchange, window=window, scale=0.125) for exchange, window in ROUNDED]
    return [
        Case(wave=wave, layers=(terms,), dtype=torch.float32, heads=heads, width=width, repeat=True)
        for wave, heads, width in cases
        for terms in kinds
    ]


def huge_cases() -> list[Case]:
    wave = Wave(rings=[(40, (0, 1, 2, 3)), (21, (5, 4))])
    kinds = Terms(exchange="ring", scale=5e3), Terms(exchange="gather", scale=5e3), Terms(window=7, scale=5e3)
    return [Case(wave=wave, layers=(terms,)) for terms in kinds]


def half_case(size: int, exchange: str) -> Case:
    wave = Wave(rings=[(240, tuple(range(size)))])
    return Case(wave=wave, layers=(Terms(exchange=exchange),), dtype=torch.bfloat16, width=8)


def mean_cases() -> list[Case]:
    wave = Wave(rings=[(4, (0, 1)), (3, (1, 2)), (29, (3, 0, 4))])
    return [Case(wave=wave, layers=(Terms(window=window),), means=True) for window in (1, 2, 3, 8, 30)]


@contextmanager
def chosen_by_length() -> Iterator[None]:
    """Both exchanges in one micro-batch, whatever the rule makes of its documents."""

    def choose(exchange: str, *, tokens: int, **_: object) -> str:
        return exchange if exchange != "auto" else ("ring", "gather")[tokens % 2]

    with patch.object(spread, "choose", choose):
        yield


def report(ranks: Ranks, case: Case) -> Report | None:
    """None where this rank has no micro-batch: it goes on, as in a step of unequal waves."""
    layout, rows = case.wave.on(ranks.rank)
    if len(layout.cu_seqlens) == 1:
        return None
    q, k, v, dout = (with_nan_rows(x[rows], case.wave.padding).requires_grad_() for x in case.inputs(case.dtype))
    with chosen_by_length() if case.mixed else nullcontext():
        out = case.attend(BACKEND, q, k, v, layout)
        forward = layout.traffic.sent
        values = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
        sent, gradients = layout.traffic.sent, layout.traffic.gradients
        again = run(partial(case.attend, BACKEND), (q, k, v), dout.detach(), layout) if case.repeat else []
    assert all(x.dtype == case.dtype for x in values)
    return Report(
        values=[x[: len(rows)].double().numpy() for x in values],
        forward=forward,
        sent=sent,
        gradients=gradients,
        zeros=not any(bool(x[len(rows) :].count_nonzero()) for x in values),
        repeated=all(map(torch.equal, values, again)) if again else None,
    )


def reports_on_rank(ranks: Ranks, cases: list[Case]) -> list[Report | None]:
    torch.set_num_threads(1)
    return [report(ranks, case) for case in cases]


CASES = {
    "exact": exact_cases(),
    "rounded": rounded_cases(),
    "huge": huge_cases(),
    "halves": [half_case(size, exchange) for size in (2, 4, 6) for exchange in ("ring", "gather")],
    "means": mean_cases(),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[Case, list[tuple[Tensor, Report]]]]]:
    """Of each case the reports of the ranks that have one, with the rows of the whole that they hold."""
    cases = [case for group in CASES.values() for case in group]
    reports = iter(zip(*run_ranks(reports_on_rank, COUNT, cases, seconds=150), strict=True))
    return {name: [(case, with_rows(case.wave, next(reports))) for case in group] for name, group in CASES.items()}


Found = dict[str, list[tuple[Case, list[tuple[Tensor, Report]]]]]


def with_rows(wave: Wave, reports: tuple[Report | None, ...]) -> list[tuple[Tensor, Report]]:
    rows = [wave.on(rank)[1] for rank in range(COUNT)]
    assert all(report is not None or not len(held) for held, report in zip(rows, reports, strict=True))
    return [(held, report) for held, report in zip(rows, reports, strict=True) if report is not None]


def undivided(case: Case, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Output, dq, dk and dv of all documents in one process."""
    *qkv, dout = case.inputs(dtype)
    return run(partial(case.attend, backend), qkv, dout, layout_of(case.wave.lengths))


def worst_error(case: Case, held: list[tuple[Tensor, Report]]) -> float:
    expected = undivided(case, "reference", torch.float64)
    return max(
        relative_error(torch.from_numpy(got), want[rows])
        for rows, report in held
        for got, want in zip(report.values, expected, strict=True)
    )


# Public reports of the same kind: wrong gradients under context parallelism (Megatron-LM #1465), keys dropped by
# padding at the tail (TransformerEngine #3331), 7 tokens on 2 ranks treated as 6 (TransformerEngine #1930), lengths
# that the ring does not divide (EasyContext #47).
def test_rings_equal_the_undivided_computation(found: Found) -> None:
    for case, held in found["exact"]:
        assert worst_error(case, held) <= 1e-12, case


def test_float32_rounds_as_one_process_does(found: Found) -> None:
    for case, held in found["rounded"]:
        assert worst_error(case, held) <= 3e-6, case


def test_scores_of_ten_thousand_do_not_overflow(found: Found) -> None:
    """EasyContext #14: the log-sum-exp overflowed. Scores so large are themselves only exact to 1e-11."""
    for case, held in found["huge"]:
        assert worst_error(case, held) <= 1e-8, case


def test_the_error_does_not_grow_with_the_ring(found: Found) -> None:
    """ring-flash-attention #42. In units of the mean error of one undivided call in bfloat16. Parts of a row
    are rounded one by one, where it is made up of parts: keys' gradients always, outputs and dq where blocks go round.
    """
    for case, held in found["halves"]:
        exact = undivided(case, "reference", torch.float64)
        one = undivided(case, BACKEND, case.dtype)
        for want, other, number in zip(exact, one, range(4), strict=True):
            got = torch.empty_like(want)
            for rows, report in held:
                got[rows] = torch.from_numpy(report.values[number])
            ratio = float((got - want).abs().mean() / (other - want).abs().mean())
            undisturbed = case.layers[0].exchange == "gather" and number < 2
            assert ratio <= (1.05 if undisturbed else 1.7), (case, number)


def test_a_window_is_as_many_keys_as_it_says(found: Found) -> None:
    """transformers #39408: off by one. With queries of 0 a row's output is the mean of the rows that it sees."""
    for case, held in found["means"]:
        (terms,) = case.layers
        assert terms.window is not None
        first = np.repeat(np.cumsum([0, *case.wave.lengths])[:-1], case.wave.lengths)
        row = np.arange(len(first))
        expected = (np.maximum(first, row - terms.window + 1) + row) / 2
        for rows, report in held:
            means = report.values[0]
            assert np.abs(means - expected[rows.numpy(), None, None]).max(initial=0) <= 1e-12, case


def test_rows_past_the_end_are_zero_whatever_they_hold(found: Found) -> None:
    reports = [report for group in found.values() for _, held in group for _, report in held]
    assert all(report.zeros for report in reports)


def test_results_have_the_same_bits_in_every_run(found: Found) -> None:
    repeated = [report.repeated for group in found.values() for _, held in group for _, report in held]
    assert repeated.count(True) > 100
    assert False not in repeated


def test_bytes_sent_are_those_that_the_packer_counts(found: Found) -> None:
    for case, held in [*found["exact"], *found["rounded"], *found["halves"]]:
        if len(case.layers) > 1:
            continue
        row = 2 * case.heads[1] * case.width
        rows = sum(rows_of_ring(length, len(members), case.layers[0]) for length, members in case.wave.rings)
        forward = sum(report.forward for _, report in held)
        gradients = sum(report.gradients for _, report in held)
        assert forward == rows * row * case.dtype.itemsize, case
        assert gradients == rows * row * max(case.dtype.itemsize, 4), case  # float32 on the wire, or float64
        assert sum(report.sent for _, report in held) == 2 * forward + gradients


def rows_of_ring(length: int, size: int, terms: Terms) -> int:
    """Rows of keys that all members together send: each gets every key that it sees and does not hold, once."""
    if not terms.causal:  # but a member that holds nothing gathers nothing
        pieces = [piece_tokens(length, size, index) for index in range(size)]
        return sum(length - piece for piece in pieces if piece or terms.exchange == "ring")
    if terms.exchange == "ring":
        return rows_sent(length, size)
    return sum(int(piece_rows(length, size, index, terms.window)) for index in range(size))
