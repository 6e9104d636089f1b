"""How the CPU back end cuts a segment of Lq queries and Lk keys into blocks that torch's flash operators do well.

Those operators know no window, have the causal diagonal start at the top left, and compute whole every tile of 512 keys
that it crosses. So are cut

- a causal square of middle length, and whatever a window binds, into strips: forward 64 queries with the keys that they
  see, backward 64 keys with the queries that see them. Forward no query is in two strips, so nothing has to be merged;
  backward no key is, so that only the gradient of the queries is summed over strips, and causal squares need no mask;
- a causal rectangle into the keys before the diagonal, which all queries see, and the square behind them.

Pure geometry: it touches no tensor of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Queries or keys of a strip. A row meets half as many pairs for nothing; fewer make the products slow.
STRIP = 64
# Longer causal squares are not cut: few of their tiles touch the diagonal, and the operators take larger ones.
LONGEST_CUT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One native call. causal: query i of the block sees its keys up to i. mask [queries, keys]: 0, or −inf where
    unseen. again: its queries have been in an earlier block."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """A part of a segment: row r of its queries stands at key r + shift, and sees its keys from `behind` before to
    `ahead` after that one. square: it is a plain causal square."""

    queries: range
    keys: range
    shift: int
    behind: int
    ahead: int
    square: bool


Cut = Callable[[_Band, torch.dtype, bool], Iterator[Block]]


def is_one_call(rows: int, keys: int, *, causal: bool, window: int | None) -> bool:
    """Whether one call without a mask does the segment right, and well."""
    if not rows or not keys or _binds(rows, keys, causal, window):
        return False
    return not causal or (rows == keys and not STRIP < rows <= LONGEST_CUT)


def blocks(rows: int, keys: int, *, causal: bool, window: int | None, cut: Cut, dtype: torch.dtype) -> Iterator[Block]:
    """Blocks with every visible pair once, and no row that sees nothing. dtype: of masks."""
    if not rows or not keys:
        return
    band = _band(rows, keys, causal, window if _binds(rows, keys, causal, window) else None)
    early = band.keys.start
    if early:
        yield Block(queries=slice(0, rows), keys=slice(0, early))
    if band.square and not STRIP < len(band.queries) <= LONGEST_CUT:
        yield Block(queries=_slice(band.queries), keys=_slice(band.keys), causal=True, again=early > 0)
    else:
        yield from cut(band, dtype, early > 0)


def query_strips(band: _Band, dtype: torch.dtype, again: bool) -> Iterator[Block]:
    """Strips for the forward pass: no query is in two."""
    mask = _template(band.behind, band.ahead, dtype)
    for queries, keys, column in _strips(band.queries, band.keys, band.shift, band.behind, band.ahead):
        columns = slice(column, column + keys.stop - keys.start)
        yield Block(queries=queries, keys=keys, mask=mask[: queries.stop - queries.start, columns], again=again)


def key_strips(band: _Band, dtype: torch.dtype, again: bool) -> Iterator[Block]:  # noqa: ARG001 -- gradients just add up
    """Strips for the backward pass: no key is in two."""
    # Seen from a key, a query as far behind as a query sees ahead. The operators want the mask's keys side by side.
    mask = None if band.square else _template(band.ahead, band.behind, dtype).T.contiguous()
    for keys, queries, row in _strips(band.keys, band.queries, -band.shift, band.ahead, band.behind):
        part = None if mask is None else mask[row : row + queries.stop - queries.start, : keys.stop - keys.start]
        yield Block(queries=queries, keys=keys, causal=band.square, mask=part)


def _binds(rows: int, keys: int, causal: bool, window: int | None) -> bool:
    """Whether a window leaves out anything that would be seen without it."""
    return window is not None and window < (keys if causal else max(rows, keys))


def _band(rows: int, keys: int, causal: bool, window: int | None) -> _Band:
    """What is left to cut: all that a window binds, or else the causal square at the end of rows and keys."""
    reach = (min(rows, keys) if window is None else window) - 1
    ahead = 0 if causal else reach
    return _Band(
        queries=range(max(0, rows - keys - ahead), rows),  # the rows before see nothing
        keys=range(max(0, keys - rows) if window is None else 0, keys),
        shift=keys - rows,
        behind=reach,
        ahead=ahead,
        square=window is None,
    )


def _strips(own: range, other: range, shift: int, behind: int, ahead: int) -> Iterator[tuple[slice, slice, int]]:
    """Cut `own` into strips: (strip, what it reaches of `other`, the first column of its mask in the template)."""
    for start in own[::STRIP]:
        stop = min(start + STRIP, own.stop)
        first = start + shift - behind
        low, high = max(other.start, first), min(other.stop, stop + shift + ahead)
        if low < high:
            yield slice(start, stop), slice(low, high), low - first


def _template(behind: int, ahead: int, dtype: torch.dtype) -> Tensor:
    """The mask of a strip with all that it reaches: [STRIP, behind + STRIP + ahead], row i sees columns i to i + behind
    + ahead."""
    columns = torch.arange(behind + STRIP + ahead)
    distance = columns - torch.arange(STRIP).unsqueeze(1)
    seen = (distance >= 0) & (distance <= behind + ahead)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
