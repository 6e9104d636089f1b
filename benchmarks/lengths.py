"""Document lengths that benchmarks pack: drawn from distributions by a fixed seed, or real ones. Tokens, int64.

`SETS` names them, each with the capacity that it is packed into. Real lists are in `data/`, whose README says where
they come from; they keep the order in which they were published, but for the one of which only a histogram is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seqmesh.packer.lengths import Int64Array

SEED = 20240229
WEB_MEDIAN, WEB_P99 = 601, 20_000  # tokens; of a log-normal distribution
WIDE_P99 = 60_000
P99_DEVIATIONS = 2.3263  # standard deviations from the median to the 99th percentile of a normal distribution
TUNING_SHORT, TUNING_LONG, TUNING_SHARE = (400, 0.7), (6_500, 900), 0.3  # median and sigma, mean and deviation, of long
DATA = Path(__file__).with_name("data")
PYTHON_FILES = DATA / "lengths_python_env.csv"


@dataclass(frozen=True, slots=True)
class LengthSet:
    """capacity: tokens of a bin. draw(documents): lengths of at most the capacity; fewer than asked for where a real
    list has no more."""

    capacity: int
    draw: Callable[[int], Int64Array]


def web_lengths(documents: int, longest: int, *, p99: int = WEB_P99, seed: int = SEED) -> Int64Array:
    """Log-normal lengths like those of web pages, from 1 token, clipped at `longest`."""
    sigma = np.log(p99 / WEB_MEDIAN) / P99_DEVIATIONS
    drawn = np.random.default_rng(seed).lognormal(np.log(WEB_MEDIAN), sigma, documents)
    return np.clip(drawn, 1, longest).astype(np.int64)


def uniform_lengths(documents: int, shortest: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """All lengths from `shortest` to `longest` equally likely."""
    return np.random.default_rng(seed).integers(shortest, longest, documents, endpoint=True)


def tuning_lengths(documents: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """Two kinds, as in sets for fine-tuning: most are short (log-normal, median 400), three in ten are long (normal,
    6,500 ± 900). Clipped to 1 to `longest`."""
    generator = np.random.default_rng(seed)
    short = generator.lognormal(np.log(TUNING_SHORT[0]), TUNING_SHORT[1], documents)
    long = generator.normal(*TUNING_LONG, documents)
    drawn = np.where(generator.random(documents) < TUNING_SHARE, long, short)
    return np.clip(drawn, 1, longest).astype(np.int64)


def python_lengths(documents: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """Lengths of real Python source files, drawn with replacement, clipped at `longest`."""
    lengths, counts = np.loadtxt(PYTHON_FILES, dtype=np.int64, delimiter=",", skiprows=1, unpack=True)
    drawn = np.random.default_rng(seed).choice(lengths, documents, p=counts / counts.sum())
    return np.minimum(drawn, longest).astype(np.int64)


def python_documents(tokens: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """Lengths of real Python source files that add up to exactly `tokens`; the last document is cut to fit."""
    lengths = python_lengths(max(16, tokens // 256), longest, seed=seed)
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    taken = lengths[: last + 1].copy()
    taken[-1] -= int(ends[last]) - tokens
    return taken


def published_lengths(name: str, documents: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """The first documents of a published list, clipped at `longest`; in a drawn order where the file is a histogram."""
    with np.load(DATA / f"documents_{name}.npz") as held:
        lengths = held["lengths"].astype(np.int64)
        if "counts" in held:
            lengths = np.random.default_rng(seed).permutation(np.repeat(lengths, held["counts"]))
    clipped: Int64Array = np.minimum(lengths[:documents], longest)
    return clipped


SETS = {
    "web32k": LengthSet(32_768, lambda documents: web_lengths(documents, 32_768)),
    "web128k": LengthSet(131_072, lambda documents: web_lengths(documents, 131_072, p99=WIDE_P99)),
    "uniform32k": LengthSet(32_768, lambda documents: uniform_lengths(documents, 1, 32_768)),
    "sft8k": LengthSet(8_192, lambda documents: tuning_lengths(documents, 8_192)),
    "half32k": LengthSet(32_768, lambda documents: uniform_lengths(documents, 16_385, 17_408)),
    "python_env": LengthSet(32_768, lambda documents: python_lengths(documents, 32_768)),
    "wlbllm": LengthSet(131_072, lambda documents: published_lengths("wlbllm", documents, 131_072)),
    "prolong": LengthSet(131_072, lambda documents: published_lengths("prolong", documents, 131_072)),
    "wikipedia": LengthSet(32_768, lambda documents: published_lengths("wikipedia", documents, 32_768)),
}
