"""Documents that are longer than a bin: refused, cut, split or left out, and never without saying so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.rules import Rules

Policy = Literal["error", "truncate", "split", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What is packed instead of the documents.

    lengths [P]: tokens of each piece. sources: document [P] and start [P], the document that each piece comes from and
    its first token there; None where piece i is document i from its first token. kept: the pieces that are packed; None
    for all. overlong: the documents that were too long.
    """

    lengths: Int64Array
    overlong: Int64Array
    sources: tuple[Int64Array, Int64Array] | None = None
    kept: Int64Array | None = None


def check_policy(policy: str) -> None:
    """Raises ValueError for an unknown policy."""
    if policy not in get_args(Policy):
        raise ValueError(f"overlong is {policy!r}: must be one of {', '.join(get_args(Policy))}")


def fit(lengths: Int64Array, largest: int, longest: int, policy: str, rules: Rules) -> Pieces:
    """Pieces of at most `longest` tokens; `largest` is the largest length.

    truncate: only a document's first tokens are kept. split: pieces of `longest` tokens and one of what is left, in a
    row. drop: left out. Raises ValueError for an overlong document where the policy is error, naming it; a document
    that needs more of the second resource than a bin has is overlong too.
    """
    if largest <= longest and int(rules.extra.max(initial=0)) <= rules.extra_capacity:
        return Pieces(lengths=lengths, overlong=np.zeros(0, np.int64))
    over = lengths > longest
    if len(rules.extra):
        over |= rules.extra > rules.extra_capacity
    overlong = np.flatnonzero(over)
    if policy == "error":
        raise ValueError(_refusal(lengths, longest, overlong, rules))
    if policy == "truncate":
        return Pieces(lengths=np.minimum(lengths, longest), overlong=overlong)
    if policy == "drop":
        return Pieces(lengths=lengths, overlong=overlong, kept=np.flatnonzero(~over))
    return _split(lengths, longest, overlong)


def _refusal(lengths: Int64Array, longest: int, overlong: Int64Array, rules: Rules) -> str:
    first = overlong[0]
    what = f"document {first} has {lengths[first]} tokens: more than a bin holds, {longest}"
    if lengths[first] <= longest:
        what = f"document {first} needs {rules.extra[first]} of extra: more than a bin has, {rules.extra_capacity}"
    ways = "'drop'" if len(rules.extra) else "'split', 'truncate' or 'drop'"
    return f"{what} ({len(overlong)} such documents); choose overlong={ways}, or a larger capacity"


def without_supervision(lengths: Int64Array, pieces: Pieces, supervised_start: Int64Array) -> Int64Array:
    """Documents whose first supervised token is among those that were cut off or dropped."""
    if pieces.sources is not None:  # split: everything is kept
        return np.zeros(0, np.int64)
    left = pieces.lengths
    if pieces.kept is not None:
        left = np.zeros_like(lengths)
        left[pieces.kept] = lengths[pieces.kept]
    return np.flatnonzero((supervised_start < lengths) & (supervised_start >= left))


def _split(lengths: Int64Array, longest: int, overlong: Int64Array) -> Pieces:
    parts = np.maximum(-(-lengths // longest), 1)
    document = np.repeat(np.arange(len(lengths)), parts)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)) * longest
    piece_lengths = np.minimum(lengths[document] - start, longest)
    return Pieces(lengths=piece_lengths, overlong=overlong, sources=(document, start))
