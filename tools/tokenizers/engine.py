"""What an engine is, and the one that defines what a tokenizer.json means."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Ids = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]


class Engine(Protocol):
    """Turns texts into ids, without any mark that is not in the text."""

    @property
    def name(self) -> str: ...

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """The ids of all texts one behind the other, and how many belong to each."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """One array per text."""
        return split_flat(*self.encode_flat(texts))


class TokenizersEngine(Engine):
    """The library that defines what a tokenizer.json means: the reference for all others.

    The number of threads is one setting of the library for the whole process, and counts from its first use on.
    """

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer, *, threads: int | None = None) -> None:
        self._tokenizer = tokenizer
        if threads is not None:
            os.environ["RAYON_NUM_THREADS"] = str(threads)
            os.environ["TOKENIZERS_PARALLELISM"] = str(threads > 1).lower()

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        lists = [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return np.fromiter(itertools.chain.from_iterable(lists), np.uint32, int(lengths.sum())), lengths


def usable_threads(threads: int | None) -> int:
    """`threads`, or as many as this process may run at once. Raises ValueError for less than one."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}: must be at least 1")
    return len(os.sched_getaffinity(0)) if threads is None else threads


def flat(arrays: Sequence[Ids]) -> tuple[Ids, Lengths]:
    """One array per text, joined as `encode_flat` gives them."""
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    return (np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)), lengths


def split_flat(ids: Ids, lengths: Lengths) -> list[Ids]:
    """The arrays of the single texts, as views."""
    ends = np.cumsum(lengths).tolist()
    return [ids[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
