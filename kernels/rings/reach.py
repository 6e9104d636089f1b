"""Which keys a member of a ring sees, who holds them, and where they stand when they are gathered. Integers only.

With causal attention every chunk sees the keys from `window` − 1 before its first token (from the document's beginning
without a window) to its last. What a member fetches of another's chunk is therefore a suffix of that chunk. Gathered
keys stand in the document's order, so whatever one chunk sees is a contiguous range of them, its last key beside its
last query: one call of a back end, and nothing to merge. Keys that no chunk sees are not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from seqmesh.kernels.layout import Ring

Span = tuple[int, int]  # tokens [start, stop) of a document


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one member of a ring of D gathers.

    keys: how many rows, its own included. own: of the gathered rows, those that it holds itself. received [D]: those
    that each other member holds. sent [D]: of the member's own rows, those that each other sees. calls: (own query
    rows, gathered rows) of each call; together they cover every query row once.
    """

    keys: int
    own: tuple[slice, ...]
    received: tuple[tuple[slice, ...], ...]
    sent: tuple[tuple[slice, ...], ...]
    calls: tuple[tuple[slice, slice], ...]


def reach_of(ring: Ring, *, causal: bool, window: int | None) -> Reach:
    """See `Reach`. Without causal there is no window."""
    starts, me = list(accumulate(ring.chunks, initial=0)), ring.index
    members = range(ring.size)
    views = [_views(starts, member, causal, window) for member in members]
    held = [_spans(starts, owner) if owner == me else _fetched(starts, views[me], owner) for owner in members]
    parts = sorted((*span, owner) for owner in members for span in held[owner])
    places = list(accumulate((stop - start for start, stop, _ in parts), initial=0))
    gathered: list[list[slice]] = [[] for _ in members]
    for (_, _, owner), rows in zip(parts, pairwise(places), strict=True):
        gathered[owner].append(slice(*rows))
    return Reach(
        keys=places[-1],
        own=tuple(gathered[me]),
        received=tuple(() if owner == me else tuple(gathered[owner]) for owner in members),
        sent=tuple(
            () if member == me else _rows(starts, me, _fetched(starts, views[member], me)) for member in members
        ),
        calls=tuple((queries, slice(_before(parts, lo), _before(parts, hi))) for queries, (lo, hi) in views[me]),
    )


def _spans(starts: Sequence[int], member: int) -> list[Span]:
    """A member's early and late chunk."""
    late = len(starts) - 2 - member
    return [(starts[member], starts[member + 1]), (starts[late], starts[late + 1])]


def _views(starts: Sequence[int], member: int, causal: bool, window: int | None) -> list[tuple[slice, Span]]:
    """(own rows, keys that they see) of each chunk; chunks that touch are one, and so are all without causal."""
    (a, b), (c, d) = _spans(starts, member)
    early, rows = b - a, b - a + d - c
    if not causal:
        return [(slice(0, rows), (0, starts[-1]))] if rows else []
    chunks = [(slice(0, rows), a, d)] if b == c else [(slice(0, early), a, b), (slice(early, rows), c, d)]
    reach = starts[-1] if window is None else window - 1
    return [(queries, (max(start - reach, 0), stop)) for queries, start, stop in chunks if start < stop]


def _fetched(starts: Sequence[int], views: Sequence[tuple[slice, Span]], owner: int) -> list[Span]:
    """What a member with these views sees of another's chunks: suffixes, since no chunk ends inside another."""
    spans = []
    for start, stop in _spans(starts, owner):
        first = min((max(lo, start) for _, (lo, hi) in views if hi >= stop), default=stop)
        if first < stop:
            spans.append((first, stop))
    return spans


def _rows(starts: Sequence[int], owner: int, spans: Sequence[Span]) -> tuple[slice, ...]:
    """Where tokens of an owner's chunks stand in its piece; two ranges that touch there are one."""
    (a, b), (c, _) = _spans(starts, owner)
    rows = [(lo - a, hi - a) if lo < b else (lo - c + b - a, hi - c + b - a) for lo, hi in spans]
    if len(rows) == 2 and rows[0][1] == rows[1][0]:
        rows = [(rows[0][0], rows[1][1])]
    return tuple(slice(*span) for span in rows)


def _before(parts: Sequence[tuple[int, int, int]], token: int) -> int:
    """Gathered rows before a token."""
    return sum(max(min(stop, token) - start, 0) for start, stop, _ in parts)
