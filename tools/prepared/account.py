"""What a prepared set holds and what was left out of it, gathered from its files once they are written.

Lengths and sources come from the lengths index, refusals from the quarantine: so an account does not depend on how many
runs and processes made the set. Memory: one record batch of the index, which is all of it, 18 bytes a document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.manifest import LENGTHS_NAME, Manifest
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.claim import QUARANTINE_NAME
from seqmesh.tools.columns import array_of

SHOWN_PLACES = 3  # of each reason
MOST_REASONS = 50  # that are told apart; the others are counted together
OTHER_REASONS = "other reasons"
SHARES = (0.5, 0.9, 0.99)

_NUMBER = re.compile(r"(?<![\w-])\d[\d,]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAccount:
    """Documents of one source that were kept, their tokens, and how many of these are learned."""

    name: str
    documents: int
    tokens: int
    supervised: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """Documents of at least `low` and fewer than `high` tokens."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why records were refused, numbers in it written as N, how many, and where the first of them are."""

    reason: str
    count: int
    first: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """lengths: in bins of doubling size, from the first to the last that is not empty. quantiles: share of documents,
    and the length that so many of them do not exceed; the last is the longest. reasons: the most frequent first."""

    sources: tuple[SourceAccount, ...]
    lengths: tuple[LengthBin, ...]
    quantiles: tuple[tuple[float, int], ...]
    supervised: int
    reasons: tuple[Reason, ...]


def account_of(folder: Path, manifest: Manifest) -> Account:
    """The account of a finished set on this machine. Raises OSError or ArrowInvalid where its files are not whole."""
    index = pa.ipc.open_file(pa.memory_map(str(folder / LENGTHS_NAME))).get_batch(0)
    lengths, supervised, codes = (array_of(index.column(name)) for name in ("length", "supervised", "source"))
    sources = _sources(manifest.sources, codes, lengths, supervised)
    return Account(
        sources=sources,
        lengths=length_bins(lengths),
        quantiles=_quantiles(lengths),
        supervised=int(supervised.sum()),
        reasons=tuple(_reasons(folder / QUARANTINE_NAME)),
    )


def length_bins(lengths: Int64Array) -> tuple[LengthBin, ...]:
    """Documents and tokens by length, which is at least 1, in bins [2^k, 2^(k+1))."""
    if not len(lengths):
        return ()
    classes = np.frexp(lengths)[1].astype(np.int64) - 1  # exact: lengths are far below 2^53
    documents = np.bincount(classes)
    tokens = np.zeros(len(documents), np.int64)
    np.add.at(tokens, classes, lengths)
    first = int(classes.min())
    return tuple(
        LengthBin(low=1 << k, high=2 << k, documents=int(documents[k]), tokens=int(tokens[k]))
        for k in range(first, len(documents))
    )


def _sources(
    names: tuple[str, ...], codes: npt.NDArray[np.uint16], lengths: Int64Array, supervised: Int64Array
) -> tuple[SourceAccount, ...]:
    """The sources, the one with the most tokens first."""
    documents = np.bincount(codes, minlength=len(names))
    tokens, learned = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    np.add.at(tokens, codes, lengths)
    np.add.at(learned, codes, supervised)
    found = [
        SourceAccount(name=name, documents=int(count), tokens=int(total), supervised=int(part))
        for name, count, total, part in zip(names, documents, tokens, learned, strict=True)
    ]
    return tuple(sorted(found, key=lambda source: (-source.tokens, source.name)))


def _quantiles(lengths: Int64Array) -> tuple[tuple[float, int], ...]:
    if not len(lengths):
        return ()
    ordered = np.sort(lengths)
    return tuple((share, int(ordered[int(np.ceil(share * len(ordered))) - 1])) for share in (*SHARES, 1.0))


def _reasons(quarantine: Path) -> list[Reason]:
    counts: dict[str, int] = {}
    places: dict[str, list[str]] = {}
    for reason, place in _refusals(quarantine):
        if reason not in counts and len(counts) >= MOST_REASONS:
            reason = OTHER_REASONS
        counts[reason] = counts.get(reason, 0) + 1
        if len(first := places.setdefault(reason, [])) < SHOWN_PLACES:
            first.append(place)
    found = [Reason(reason=reason, count=count, first=tuple(places[reason])) for reason, count in counts.items()]
    return sorted(found, key=lambda reason: (-reason.count, reason.reason))


def _refusals(quarantine: Path) -> Iterator[tuple[str, str]]:
    """Of every record in quarantine the reason and the place. What others wrote into the file does not count."""
    if not quarantine.is_file():
        return
    with quarantine.open("rb") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
                number = f"line {entry['line']}" if "line" in entry else f"row {entry['row']}"
                yield _NUMBER.sub("N", entry["reason"]), f"{entry['file']}, {number}"
            except (ValueError, KeyError, TypeError):
                continue
