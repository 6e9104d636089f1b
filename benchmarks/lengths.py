"""Document lengths that benchmarks pack: drawn from distributions by a fixed seed, or real ones. Tokens, int64.

`SETS` names them, each with the capacity that it is packed into. Real lists are in `data/`, whose README says where
they come from; they keep the order in which they were published, but for the one of which only a histogram is kept.
`STEPS` names what steps are drawn from: documents, a fixed sum of tokens. `BYTED` and `GITHUB` are made to the
statistics that the ByteScale paper gives of its two sets (arXiv 2502.21231); what it does not give is filled in so that
they hold.
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
LONGEST_CLASS = 1 << 21
MANY = 1 << 20  # documents, more than a list has
# Shares of tokens by class of length, which reaches from the length named up to the next; the last is exactly that
# long. From 128K on as published (for GitHub the last three are published as one, 5.3 %).
BYTED = {
    64: 0.016, 1 << 10: 0.037, 1 << 11: 0.058, 1 << 12: 0.06, 1 << 13: 0.08, 1 << 14: 0.1, 1 << 15: 0.106,
    1 << 16: 0.1, 1 << 17: 0.076, 1 << 18: 0.076, 1 << 19: 0.073, 1 << 20: 0.097, LONGEST_CLASS: 0.121,
}  # fmt: skip
GITHUB = {
    64: 0.05, 1 << 10: 0.08, 1 << 11: 0.11, 1 << 12: 0.13, 1 << 13: 0.14, 1 << 14: 0.13, 1 << 15: 0.11,
    1 << 16: 0.088, 1 << 17: 0.064, 1 << 18: 0.045, 1 << 19: 0.023, 1 << 20: 0.016, LONGEST_CLASS: 0.014,
}  # fmt: skip


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
    return first_tokens(python_lengths(max(16, tokens // 256), longest, seed=seed), tokens)


def first_tokens(lengths: Int64Array, tokens: int) -> Int64Array:
    """The first documents that add up to exactly `tokens`, of a list that has as many; the last is cut to fit."""
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    taken: Int64Array = lengths[: last + 1].copy()
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


def class_lengths(shares: dict[int, float], documents: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """Drawn so that classes of length hold these shares of the tokens; log-uniform in each. Clipped at `longest`."""
    lowest = np.array(list(shares), float)
    highest = np.append(lowest[1:], lowest[-1])
    spread = np.log(highest / lowest)
    mean = np.append((highest - lowest)[:-1] / spread[:-1], lowest[-1])
    chance = np.array(list(shares.values())) / mean
    generator = np.random.default_rng(seed)
    drawn = generator.choice(len(lowest), documents, p=chance / chance.sum())
    lengths = lowest[drawn] * np.exp(spread[drawn] * generator.random(documents))
    clipped: Int64Array = np.minimum(lengths, longest).astype(np.int64)
    return clipped


def class_documents(shares: dict[int, float], tokens: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """The same, of exactly `tokens` in all."""
    return first_tokens(class_lengths(shares, 1_024 + tokens // 512, longest, seed=seed), tokens)


def published_documents(name: str, tokens: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """Documents of a published list in a drawn order, clipped at `longest`, of exactly `tokens` in all."""
    lengths = published_lengths(name, MANY, longest)
    return first_tokens(np.random.default_rng(seed).permutation(lengths), tokens)


STEPS: dict[str, Callable[[int, int, int], Int64Array]] = {
    "wlbllm": lambda tokens, longest, seed: published_documents("wlbllm", tokens, longest, seed=seed),
    "prolong": lambda tokens, longest, seed: published_documents("prolong", tokens, longest, seed=seed),
    "python_env": lambda tokens, longest, seed: python_documents(tokens, longest, seed=seed),
    "byted": lambda tokens, longest, seed: class_documents(BYTED, tokens, longest, seed=seed),
    "github": lambda tokens, longest, seed: class_documents(GITHUB, tokens, longest, seed=seed),
}
"""Lengths of a step, by tokens, longest document and seed."""

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
