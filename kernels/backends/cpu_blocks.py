"""How the CPU back end cuts a segment into blocks that torch's flash operators do well.

Those operators know no window, have the causal diagonal start at the top left, and compute whole every tile of 512 keys
that it crosses. A segment is at most two bands: all that a window binds; or else the keys that all queries see, and the
causal square behind them. Bands are cut into strips:

- forward, by queries, with the keys that they see. No query is in two strips of a band, so nothing has to be merged
  but the two bands of a causal rectangle. Full bands and long squares are better whole;
- backward, by keys, with the queries that see them. No key is in two strips, so that only the gradient of the queries
  is summed over them, and squares need no mask: such a strip is causal from its top left.

Pure geometry: it touches no tensor of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# A row meets half a strip of pairs for nothing, so that is kept a sixteenth of what it sees; small ones make the
# products slow, and the tiles of larger ones leave the cache.
SMALLEST_STRIP, LARGEST_STRIP = 64, 384
# Causal squares of more rows are not cut forward: few tiles touch the diagonal, and the operators take larger ones.
LONGEST_CUT = 1024
# Masks that are kept: one forward and one backward for each of two windows. A mask is the same for all segments, layers
# and steps, and made for each it would take a tenth of the time of short documents; those of wide windows, which take
# much memory, are made in a hundredth of the time of their segment.
KEPT_MASKS, LARGEST_KEPT = 4, 1 << 21  # elements
# Products over numbers of keys that divide by this are faster.
ALIGNMENT = 16


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
    """A part of a segment: row r of its queries stands at key r + shift, and sees its keys from `behind` before that
    one to `ahead` after. masked: a window binds; causal: a square without one; neither: full."""

    queries: range
    keys: range
    shift: int
    behind: int
    ahead: int
    masked: bool = False
    causal: bool = False


Cut = Callable[[_Band, torch.dtype, bool], Iterator[Block]]


def is_short(rows: int, keys: int, *, causal: bool, window: int | None) -> bool:
    """Whether the segment is one native call as it stands: most documents of a pack are."""
    square = rows == keys or not causal
    return rows > 0 and 0 < keys <= SMALLEST_STRIP and square and not _binds(rows, keys, causal, window)


def blocks(rows: int, keys: int, *, causal: bool, window: int | None, cut: Cut, dtype: torch.dtype) -> Iterator[Block]:
    """Blocks with every visible pair once, and no row that sees nothing. dtype: of masks."""
    for number, band in enumerate(_bands(rows, keys, causal, window) if rows and keys else ()):
        yield from cut(band, dtype, number > 0)


def query_strips(band: _Band, dtype: torch.dtype, again: bool) -> Iterator[Block]:
    """Strips for the forward pass. again: the band's queries have been in another."""
    if not (band.masked or (band.causal and SMALLEST_STRIP < len(band.queries) <= LONGEST_CUT)):
        yield Block(queries=_slice(band.queries), keys=_slice(band.keys), causal=band.causal, again=again)
        return
    size, spare = _strip_size(band), -(band.behind + band.ahead) % ALIGNMENT
    mask = _mask(size, band.behind, band.ahead, spare, False, dtype)
    for queries, keys, column in _strips(size, band.queries, band.keys, band.shift, band.behind + spare, band.ahead):
        part = mask[: queries.stop - queries.start, column : column + keys.stop - keys.start]
        yield Block(queries=queries, keys=keys, mask=part, again=again)


def key_strips(band: _Band, dtype: torch.dtype, again: bool) -> Iterator[Block]:  # noqa: ARG001 -- gradients add up
    """Strips for the backward pass."""
    size, mask = _strip_size(band), None
    if band.masked:  # a key sees queries the other way round; the operators take its columns for contiguous
        mask = _mask(size, band.ahead, band.behind, 0, True, dtype)
    for keys, queries, row in _strips(size, band.keys, band.queries, -band.shift, band.ahead, band.behind):
        part = None if mask is None else mask[row : row + queries.stop - queries.start, : keys.stop - keys.start]
        yield Block(queries=queries, keys=keys, causal=band.causal, mask=part)


def _binds(rows: int, keys: int, causal: bool, window: int | None) -> bool:
    """Whether a window leaves out anything that would be seen without it."""
    return window is not None and window < (keys if causal else max(rows, keys))


def _bands(rows: int, keys: int, causal: bool, window: int | None) -> Iterator[_Band]:
    """The bands of a segment that has rows and keys."""
    shift, everything = keys - rows, rows + keys
    if window is not None and _binds(rows, keys, causal, window):
        behind, ahead = window - 1, 0 if causal else window - 1
        queries = range(max(0, -shift - ahead), rows)  # those before see nothing
        yield _Band(queries=queries, keys=range(keys), shift=shift, behind=behind, ahead=ahead, masked=True)
        return
    early = keys if not causal else max(0, shift)
    if early:
        yield _Band(queries=range(rows), keys=range(early), shift=shift, behind=everything, ahead=everything)
    if causal:
        queries, late = range(max(0, -shift), rows), range(early, keys)
        yield _Band(queries=queries, keys=late, shift=shift, behind=len(late) - 1, ahead=0, causal=True)


def _strip_size(band: _Band) -> int:
    if not (band.masked or band.causal):
        return LARGEST_STRIP
    eighth = (band.behind + band.ahead + 1) // 8
    return min(LARGEST_STRIP, max(SMALLEST_STRIP, eighth // SMALLEST_STRIP * SMALLEST_STRIP))


def _strips(
    size: int, own: range, other: range, shift: int, behind: int, ahead: int
) -> Iterator[tuple[slice, slice, int]]:
    """Cut `own` into strips: (strip, what it reaches of `other`, the first column of its mask in the template)."""
    for start in own[::size]:
        stop = min(start + size, own.stop)
        first = start + shift - behind
        low, high = max(other.start, first), min(other.stop, stop + shift + ahead)
        if low < high:
            yield slice(start, stop), slice(low, high), low - first


def _mask(size: int, behind: int, ahead: int, spare: int, turned: bool, dtype: torch.dtype) -> Tensor:
    kept = size * (spare + behind + size + ahead) <= LARGEST_KEPT
    return (_kept_mask if kept else _template)(size, behind, ahead, spare, turned, dtype)


def _template(size: int, behind: int, ahead: int, spare: int, turned: bool, dtype: torch.dtype) -> Tensor:
    """The mask of a strip with all that it reaches: [size, spare + behind + size + ahead], or turned round. Row i sees
    behind + 1 + ahead columns, from column spare + i on."""
    columns = torch.arange(spare + behind + size + ahead, device="cpu")
    distance = columns - spare - torch.arange(size, device="cpu").unsqueeze(1)
    seen = (distance >= 0) & (distance <= behind + ahead)
    mask = torch.zeros(seen.shape, dtype=dtype, device="cpu").masked_fill_(~seen, -torch.inf)
    return mask.T.contiguous() if turned else mask


_kept_mask = lru_cache(maxsize=KEPT_MASKS)(_template)


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
