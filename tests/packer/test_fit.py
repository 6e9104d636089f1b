"""Fits of timings that a known cost model made: it comes back, exactly or within the noise, and in exact integers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.cost import CostModel
from seqmesh.packer.fit import LIMIT, STEP_TOKENS, Sample, Seconds, errors, fit_cost, make_fit, predict, to_integers
from seqmesh.packer.pieces import piece_pairs, piece_rows, piece_tokens

WHOLE = ([64] * 8, [64] * 64, [4096], [512], [1024], [2048, 256], [300] * 9, [130])
RINGS = (16, 64, 256, 1024, 65_536)

terms = st.builds(
    Seconds,
    fixed=st.floats(0, 1e-2),
    linear=st.floats(1e-6, 1e-4),
    quadratic=st.floats(1e-9, 1e-7),
    window=st.sampled_from([None, 200]),
)


def timed(true: Seconds, lengths: Sequence[int], ring: int = 1, kind: str = "rows_near", noise: float = 0.0) -> Sample:
    """A micro-batch of member 0 of a ring for each document, as long as the true model says; noise: relative."""
    held = Sample(
        tokens=sum(piece_tokens(n, ring, 0) for n in lengths),
        pairs=sum(int(piece_pairs(n, ring, 0, true.window)) for n in lengths),
        seconds=1.0,
        **{kind: sum(int(piece_rows(n, ring, 0, true.window)) for n in lengths)},
    )
    return replace(held, seconds=float(predict(true, [held])[0]) * (1 + noise))


def whole(true: Seconds) -> list[Sample]:
    return [timed(true, lengths) for lengths in WHOLE]


@given(terms)
def test_the_terms_behind_exact_timings_come_back(true: Seconds) -> None:
    fit = fit_cost(whole(true), window=true.window)
    for name in ("linear", "quadratic"):
        assert getattr(fit.seconds, name) == pytest.approx(getattr(true, name), rel=1e-6)
    assert fit.seconds.fixed == pytest.approx(true.fixed, rel=1e-6, abs=1e-9)
    assert fit.cost.window == true.window
    assert fit.errors.worst < 1e-6
    assert fit.errors.r_squared == pytest.approx(1)


@given(terms, st.floats(2, 200), st.floats(2, 200))
def test_traffic_that_outlasts_attention_comes_back(true: Seconds, near: float, far: float) -> None:
    """In the smaller rings it does; how much attention hides in the larger ones follows."""
    base = true.quadratic * 64
    true = replace(true, window=None, row_near=near * base, row_far=far * base)
    rings = [timed(true, [n], 2, kind) for n in RINGS for kind in ("rows_near", "rows_far")]
    fit = fit_cost([*whole(true), *rings])
    for name in ("row_near", "row_far"):
        shares = [exposed_share(true, getattr(true, name), n) for n in RINGS]
        if max(shares) > 0.05:  # less is what the fit may rather count as no traffic at all
            assert getattr(fit.seconds, name) == pytest.approx(getattr(true, name), rel=1e-3)


def exposed_share(true: Seconds, row: float, n: int) -> float:
    """Of the time of a ring of two for a document of n tokens, what is traffic that attention does not hide."""
    attention = true.quadratic * n * n / 4
    exposed = row * n / 2 - attention
    return exposed / (true.fixed + true.linear * n / 2 + attention + max(exposed, 0.0))


def test_traffic_that_attention_hides_is_not_seen() -> None:
    true = Seconds(fixed=1e-3, linear=1e-5, quadratic=1e-8, row_near=1e-9)
    fit = fit_cost([*whole(true), *(timed(true, [n], 2) for n in RINGS)])
    assert fit.seconds.row_near == 0 == fit.cost.row_near
    assert fit.errors.worst < 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_the_terms_by_no_more_than_itself(seed: int) -> None:
    true = Seconds(fixed=2e-3, linear=2e-5, quadratic=1e-8, row_near=2e-5)
    noise = iter(np.random.default_rng(seed).uniform(-0.02, 0.02, 50))
    samples = [timed(true, lengths, noise=next(noise)) for lengths in WHOLE]
    samples += [timed(true, [n], 2, noise=next(noise)) for n in RINGS for _ in range(2)]
    fit = fit_cost(samples)
    assert fit.errors.median < 0.02
    assert fit.errors.worst < 0.1
    assert fit.errors.r_squared > 0.99
    for name in ("linear", "quadratic", "row_near"):
        assert getattr(fit.seconds, name) == pytest.approx(getattr(true, name), rel=0.15)


def test_small_and_large_micro_batches_count_alike() -> None:
    """One that is 10 % slow pulls the fit by its relative error, not by its seconds."""
    true = Seconds(fixed=1e-3, linear=1e-5, quadratic=1e-8)
    samples = whole(true)
    slow = [replace(sample, seconds=sample.seconds * 1.1) if sample.tokens == 4096 else sample for sample in samples]
    quick = [sample for sample in slow if sample.tokens < 4096]
    assert errors(fit_cost(slow).seconds, quick).worst < 0.05


def test_no_term_is_negative() -> None:
    """Timings that fall with pairs: the best that is left is none."""
    held = whole(Seconds(fixed=1, linear=1, quadratic=1))
    samples = [replace(sample, seconds=1e-3 + 1e-5 * sample.tokens - 2e-10 * sample.pairs) for sample in held]
    fit = fit_cost(samples)
    assert fit.seconds.quadratic == 0
    assert min(fit.seconds.fixed, fit.seconds.linear) > 0
    assert fit.crossover == float("inf")


@given(
    st.floats(0, 1e-1), st.floats(1e-9, 1e-3), st.floats(10, 1e6), st.floats(0, 1e4), st.sampled_from([None, 1, 4096])
)
def test_integers_are_good_to_a_part_in_a_thousand_and_their_sums_exact(
    fixed: float, linear: float, crossover: float, rows_per_pair: float, window: int | None
) -> None:
    quadratic = 2 * linear / crossover
    seconds = Seconds(
        fixed=min(fixed, 1e6 * quadratic),
        linear=linear,
        quadratic=quadratic,
        row_near=rows_per_pair * quadratic,
        window=window,
    )
    cost, unit = to_integers(seconds)
    assert cost.quadratic * unit == pytest.approx(quadratic, rel=1e-3)
    assert cost.linear * unit == pytest.approx(linear, rel=1e-3)
    assert abs(cost.row_near * unit - seconds.row_near) <= unit / 2 * (1 + 1e-9)
    assert int(cost.of(np.array([STEP_TOKENS]))[0]) + STEP_TOKENS * cost.fixed < LIMIT


def test_what_integers_change_is_reported() -> None:
    true = Seconds(fixed=0.0, linear=1e-12, quadratic=1e-8)
    fit = make_fit(true, whole(true))
    worst = max(
        abs(fit.unit * (fit.cost.linear * s.tokens + fit.cost.quadratic * s.pairs) / s.seconds - 1) for s in whole(true)
    )
    assert fit.rounding == pytest.approx(worst, rel=1e-6)
    assert 0 < fit.rounding < 1e-3


def test_predictions_of_both_kinds_of_terms() -> None:
    samples = [Sample(tokens=10, pairs=7, seconds=1), Sample(tokens=10, pairs=7, seconds=1, rows_far=100)]
    assert predict(CostModel(fixed=3, linear=2, quadratic=5, row_far=1), samples).tolist() == [58, 123]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([[10], [20, 20], [400]], "3 micro-batches without rings: a fit needs at least 6"),
        ([[64] * n for n in range(1, 9)], "32.5 to 32.5 pairs per token: the linear and the quadratic term can not be"),
        ([[100 + n, 200 - n] for n in range(0, 90, 10)], "300 to 300 tokens: the fixed and the linear term can not be"),
        ([[3], [3], [3], [600], [600], [600]], "vary tokens and the lengths of documents independently"),
    ],
)
def test_samples_that_tell_nothing_apart_are_refused(lengths: list[list[int]], message: str) -> None:
    true = Seconds(fixed=1e-3, linear=1e-5, quadratic=1e-8)
    with pytest.raises(ValueError, match=message):
        fit_cost([timed(true, each) for each in lengths])


def test_rings_do_not_count_as_the_samples_that_the_first_terms_need() -> None:
    true = Seconds(fixed=1e-3, linear=1e-5, quadratic=1e-8)
    with pytest.raises(ValueError, match="5 micro-batches without rings"):
        fit_cost([*whole(true)[:5], *(timed(true, [n], 2) for n in RINGS)])


def test_timings_that_do_not_grow_are_refused() -> None:
    flat = [replace(sample, seconds=1e-3) for sample in whole(Seconds(fixed=1, linear=1, quadratic=1))]
    with pytest.raises(ValueError, match="timings do not grow"):
        fit_cost(flat)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seconds": 0.0}, "seconds is 0.0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"tokens": 0}, "tokens is 0"),
        ({"pairs": 0}, "pairs is 0"),
        ({"rows_near": -1}, "rows_near is -1"),
        ({"rows_near": 1, "rows_far": 1}, "rows_near is 1, rows_far 1: one is 0"),
    ],
)
def test_an_impossible_sample_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample(**{"tokens": 5, "pairs": 5, "seconds": 1.0} | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("linear", [0.0, float("inf"), float("nan")])
def test_terms_that_no_unit_fits_are_refused(linear: float) -> None:
    with pytest.raises(ValueError, match="terms must be finite"):
        to_integers(Seconds(fixed=0.0, linear=linear, quadratic=0.0))
