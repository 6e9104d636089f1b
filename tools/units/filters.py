"""Which documents stay: by length, by a sample of seed, and each text once.

What a document's fate is depends on the document, the options and, for duplicates, on the documents before it: never
on how the input is cut or who works on it. Exact duplicates only: no near ones, no judgement of texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

FATES = ("kept", "refused", "sampled_out", "empty", "too_short", "too_long", "duplicate")
KEPT, REFUSED, SAMPLED_OUT, EMPTY, TOO_SHORT, TOO_LONG, DUPLICATE = range(len(FATES))
FILTERED = FATES[SAMPLED_OUT : SAMPLED_OUT + 1] + FATES[TOO_SHORT:]

UInt64Array = npt.NDArray[np.uint64]
HASH_BYTES = 16  # xxh3-128 of a text: among ten thousand million texts, two share one with a chance of 1e-19


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """min_tokens, max_tokens: of a document, its marks included. dedup: of equal texts only the first is kept.
    sample: share of the documents, drawn by `seed`."""

    min_tokens: int | None = None
    max_tokens: int | None = None
    dedup: bool = False
    sample: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("min_tokens", self.min_tokens), ("max_document_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, max_document_tokens {self.max_tokens}: nothing is left")
        if self.sample is not None and not 0 < self.sample <= 1:
            raise ValueError(f"sample is {self.sample}: must be a share above 0, at most 1")


def drawn(names: Iterable[str], keys: npt.NDArray[np.int64], filters: Filters) -> npt.NDArray[np.bool_]:
    """Which records are in the sample: [R]. names: of their files. keys: their numbers in those."""
    if filters.sample is None or filters.sample == 1:
        return np.ones(len(keys), np.bool_)
    seeds: dict[str, int] = {}
    of_files = [seeds[name] if name in seeds else seeds.setdefault(name, _seed(name, filters.seed)) for name in names]
    return _mixed(keys.astype(np.uint64) ^ np.array(of_files, np.uint64)) < np.uint64(filters.sample * 2.0**64)


def text_hash(text: str) -> bytes:
    """HASH_BYTES that two texts share where they are equal."""
    return xxhash.xxh3_128_digest(text.encode())


def _seed(name: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode("utf-8", "surrogateescape"))


def _mixed(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
