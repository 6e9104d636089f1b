"""Document lengths that benchmarks draw: a web-like distribution and a real one. Tokens, int64, by a fixed seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from seqmesh.packer.lengths import Int64Array

SEED = 20240229
WEB_MEDIAN, WEB_P99 = 601, 20_000  # tokens; of a log-normal distribution
P99_DEVIATIONS = 2.3263  # standard deviations from the median to the 99th percentile of a normal distribution
PYTHON_FILES = Path(__file__).with_name("data") / "lengths_python_env.csv"


def web_lengths(documents: int, longest: int, *, seed: int = SEED) -> Int64Array:
    """Log-normal lengths like those of web pages, from 1 token, clipped at `longest`."""
    sigma = np.log(WEB_P99 / WEB_MEDIAN) / P99_DEVIATIONS
    drawn = np.random.default_rng(seed).lognormal(np.log(WEB_MEDIAN), sigma, documents)
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
