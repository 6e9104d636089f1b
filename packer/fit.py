"""The cost model behind timings of micro-batches: seconds of each term, the same in integers, and how well it fits.

Takes what each micro-batch held and the seconds that it took. Least squares of relative errors, so that small and large
micro-batches count alike, without negative terms, in two stages: micro-batches without rings give the first three
terms, what rings take beyond those gives the traffic of a row. Nothing is timed here and no file is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from seqmesh.packer.cost import CostModel

Float64Array = npt.NDArray[np.float64]

SAMPLES = 6  # fewest micro-batches without rings for three terms
SPREAD = 2.0  # the largest number of tokens, and of pairs per token, over the smallest: at least this
INDEPENDENT = 1e-3  # smallest singular value of the three terms' columns, each of length 1
RESOLUTION = 1e-3  # relative: what attention leaves unexplained by less shows no traffic
SHOWN = 0.5  # traffic must explain this share of the squares that attention alone leaves
STEP_TOKENS = 100_000_000  # tokens of the step, of however many documents, whose sums are exact ...
STEP_RANKS = 1_024  # ... on at most so many ranks
LIMIT = 1 << 62
ROUNDING_ROOM = 0.99  # of the limit: coefficients are rounded up, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One micro-batch: what it held and how long it took. rows_near, rows_far: of keys and values that its rings
    brought in, of one kind at a time; 0 without rings."""

    tokens: int
    pairs: int
    seconds: float
    rows_near: int = 0
    rows_far: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}: must be positive and finite")
        if min(self.rows_near, self.rows_far) < 0 or (self.rows_near and self.rows_far):
            raise ValueError(f"rows_near is {self.rows_near}, rows_far {self.rows_far}: one is 0, none is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """The terms of `CostModel`, under the same names, in seconds."""

    fixed: float
    linear: float
    quadratic: float
    row_near: float = 0.0
    row_far: float = 0.0
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """|predicted − measured| / measured over samples, and the share of their variance that is predicted."""

    median: float
    worst: float
    r_squared: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """cost: the terms in integers of `unit` seconds. errors: over the samples that were fitted. rounding: the largest
    relative difference that integers make to one of them. A row's term is 0 where attention hid the traffic of every
    sample, and where there was none."""

    seconds: Seconds
    cost: CostModel
    unit: float
    errors: Errors
    rounding: float

    @property
    def crossover(self) -> float:
        """See `CostModel.crossover`."""
        return self.cost.crossover


def fit_cost(samples: Sequence[Sample], *, window: int | None = None) -> Fit:
    """Fit all terms. window: the model's, see `CostModel`; the samples' pairs must have been counted with it.

    Raises ValueError for fewer than SAMPLES micro-batches without rings, for those that do not tell the terms apart,
    and for timings that do not grow with what was computed.
    """
    whole = [sample for sample in samples if not sample.rows_near + sample.rows_far]
    check_samples(whole)
    columns, taken = _columns(whole), _taken(whole)
    fixed, linear, quadratic = non_negative(columns / taken[:, None], np.ones_like(taken))
    if not linear + quadratic:
        raise ValueError("timings do not grow with tokens or pairs: time larger micro-batches")
    compute = Seconds(fixed=fixed, linear=linear, quadratic=quadratic, window=window)
    near, far = (
        _row_seconds(compute, [sample for sample in samples if getattr(sample, name)], name)
        for name in ("rows_near", "rows_far")
    )
    return make_fit(replace(compute, row_near=near, row_far=far), samples)


def make_fit(seconds: Seconds, samples: Sequence[Sample]) -> Fit:
    """Terms that are known already, in integers and compared with samples."""
    cost, unit = to_integers(seconds)
    exact = predict(seconds, samples)
    rounding = float(np.max(np.abs(unit * predict(cost, samples) - exact) / exact))
    return Fit(seconds=seconds, cost=cost, unit=unit, errors=errors(seconds, samples), rounding=rounding)


def predict(terms: Seconds | CostModel, samples: Sequence[Sample]) -> Float64Array:
    """What each micro-batch takes, in the unit of the terms."""
    near, far = (np.array([getattr(sample, name) for sample in samples]) for name in ("rows_near", "rows_far"))
    compute = _columns(samples) @ [terms.fixed, terms.linear, 0.0]
    attention = terms.quadratic * _columns(samples)[:, 2]
    return np.asarray(compute + np.maximum(attention, terms.row_near * near + terms.row_far * far), np.float64)


def errors(terms: Seconds, samples: Sequence[Sample]) -> Errors:
    """How far the terms are off these samples, fitted or not."""
    predicted, taken = predict(terms, samples), _taken(samples)
    relative = np.abs(predicted - taken) / taken
    around_mean = float(np.sum((taken - taken.mean()) ** 2))
    left = float(np.sum((predicted - taken) ** 2))
    r_squared = 1 - left / around_mean if around_mean else 0.0
    return Errors(median=float(np.median(relative)), worst=float(relative.max()), r_squared=r_squared)


def to_integers(seconds: Seconds) -> tuple[CostModel, float]:
    """The terms in the finest unit for which all sums over a step stay below 2**62, and that unit in seconds.

    The step has STEP_TOKENS tokens, be they one document; each of STEP_RANKS ranks receives as many rows. There a pair
    is some hundreds of units, so that its term is good to a part in 1,000, the dearer ones to far less.
    """
    unit = _dearest_step(seconds) / (ROUNDING_ROOM * LIMIT)
    if not 0 < unit < float("inf"):
        raise ValueError(f"{seconds}: terms must be finite, and a document must cost something")
    names = ("fixed", "linear", "quadratic", "row_near", "row_far")
    cost = CostModel(**{name: round(getattr(seconds, name) / unit) for name in names}, window=seconds.window)
    assert _dearest_step(cost) < LIMIT
    return cost, unit


def _dearest_step(terms: Seconds | CostModel) -> float:
    """Most that a step can cost, without its window: exact for integers. No micro-batch has less than a token."""
    tokens, row = STEP_TOKENS, max(terms.row_near, terms.row_far)
    pairs = tokens * (tokens + 1) // 2
    return tokens * (terms.fixed + terms.linear + STEP_RANKS * row) + terms.quadratic * pairs


def check_samples(whole: Sequence[Sample]) -> None:
    """Raises ValueError for samples without rings that can not tell the fixed, linear and quadratic terms apart."""
    if len(whole) < SAMPLES:
        raise ValueError(f"{len(whole)} micro-batches without rings: a fit needs at least {SAMPLES}")
    tokens = [sample.tokens for sample in whole]
    if max(tokens) < SPREAD * min(tokens):
        raise ValueError(
            f"micro-batches have {min(tokens)} to {max(tokens)} tokens: the fixed and the linear term can not be told "
            f"apart; the largest must have {SPREAD:g} times the tokens of the smallest"
        )
    density = [sample.pairs / sample.tokens for sample in whole]
    if max(density) < SPREAD * min(density):
        raise ValueError(
            f"micro-batches have {min(density):.1f} to {max(density):.1f} pairs per token: the linear and the "
            "quadratic term can not be told apart; time documents of different lengths"
        )
    columns = _columns(whole)
    if np.linalg.svd(columns / np.linalg.norm(columns, axis=0), compute_uv=False)[-1] < INDEPENDENT:
        raise ValueError("terms can not be told apart: vary tokens and the lengths of documents independently")


def non_negative(columns: Float64Array, target: Float64Array) -> tuple[float, ...]:
    """Least squares without negative coefficients: the best of plain ones over every subset of the columns."""
    count = columns.shape[1]
    best, smallest = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            trial = np.zeros(count)
            trial[list(chosen)] = _least_squares(columns[:, chosen], target)
            left = float(np.sum((columns @ trial - target) ** 2))
            if trial.min() >= 0 and left < smallest:
                best, smallest = trial, left
    return tuple(best.tolist())


def _least_squares(columns: Float64Array, target: Float64Array) -> Float64Array:
    """numpy's, on columns of length 1: those of tokens and of pairs differ by orders of magnitude."""
    norms = np.linalg.norm(columns, axis=0)
    return np.asarray(np.linalg.lstsq(columns / norms, target, rcond=None)[0] / norms, np.float64)


def _row_seconds(compute: Seconds, ringed: Sequence[Sample], name: str) -> float:
    """Seconds of one row of traffic from samples that have such rows; 0 where attention hides it in all of them.

    Which samples' traffic outlasts their attention changes only where a row takes attention / rows, so every stretch
    between two such values has one best row, by plain least squares, and the best of all stretches is the fit.
    """
    if not ringed:
        return 0.0
    taken, columns = _taken(ringed), _columns(ringed)
    rows = np.array([getattr(sample, name) for sample in ringed], np.float64)
    left, attention = taken - columns @ [compute.fixed, compute.linear, 0.0], compute.quadratic * columns[:, 2]
    limits = attention / rows
    order = np.argsort(limits)
    weighted, share = rows[order] / taken[order], left[order] / taken[order]
    stretches = np.cumsum(weighted * share) / np.cumsum(weighted**2)
    trials = np.clip(stretches, limits[order], np.append(limits[order][1:], np.inf))
    squares = [np.mean(((left - np.maximum(attention, trial * rows)) / taken) ** 2) for trial in (0.0, *trials)]
    best = int(np.argmin(squares))
    shown = squares[0] > RESOLUTION**2 and squares[best] < (1 - SHOWN) * squares[0]
    return float(trials[best - 1]) if shown else 0.0


def _columns(samples: Sequence[Sample]) -> Float64Array:
    """1, tokens and pairs of each sample [S, 3]."""
    return np.array([(1.0, sample.tokens, sample.pairs) for sample in samples])


def _taken(samples: Sequence[Sample]) -> Float64Array:
    return np.array([sample.seconds for sample in samples])
