"""`StreamState`: a position in the order of documents, as a handful of integers for each source.

It goes into checkpoints and over the wire as plain JSON; what it means is in `stream`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from seqmesh.loader.mixture import MAX_SOURCES

STATE_VERSION = 2
MAX_INTEGER = 1 << 62
MAX_PLACES = 1 << 10  # integers that say what waits

_ONE = ("seed", "step", "window_step", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """epoch, position: the next document is at `position` in the order of `epoch`; offset: tokens of it that earlier
    pieces took. tokens: served so far; since: of these, since the weights last changed. share: this source's part of
    the tokens when it was last drawn from, 0 where it was not to be. truncated: tokens cut off; dropped: documents left
    out."""

    position: int = 0
    offset: int = 0
    epoch: int = 0
    tokens: int = 0
    since: int = 0
    share: int = 0
    truncated: int = 0
    dropped: int = 0

    @property
    def cursor(self) -> tuple[int, ...]:
        """As `cursor` has it."""
        return self.position, self.offset, self.tokens, self.truncated, self.dropped, self.since, self.share

    @classmethod
    def after(cls, cursor: list[int], *, epoch: int, ended: bool) -> SourceState:
        """Where a cursor stands, at the start of the next epoch if this one has ended."""
        position, offset, tokens, truncated, dropped, since, share = cursor
        return cls(
            position=0 if ended else position,
            offset=offset,
            epoch=epoch + ended,
            tokens=tokens,
            since=since,
            share=share,
            truncated=truncated,
            dropped=dropped,
        )


PER_SOURCE = tuple(f.name for f in fields(SourceState))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A position at a step boundary.

    step: global batches so far. sources: of each source of the set, or of all documents as one. waiting: position and
    offset of each piece of this epoch that is held back, one after the other; while there are any, the position may be
    the end of the epoch. window_step: in batching `rows`, number of the next step in its window; everything but `step`
    is as it was at the window's start then, with the shares that are in effect in the window.
    """

    seed: int
    step: int = 0
    sources: tuple[SourceState, ...] = (SourceState(),)
    window_step: int = 0
    waiting: tuple[int, ...] = ()
    version: int = STATE_VERSION

    @property
    def epoch(self) -> int:
        """Of several sources, the least among those that were drawn from."""
        return min((s.epoch for s in self.sources if s.tokens), default=min(s.epoch for s in self.sources))

    @property
    def tokens(self) -> int:
        """Served so far, of all sources."""
        return sum(source.tokens for source in self.sources)

    @property
    def truncated(self) -> int:
        """Tokens cut off, of all sources."""
        return sum(source.truncated for source in self.sources)

    @property
    def dropped(self) -> int:
        """Documents left out, of all sources: by the overlong policy or the tail's."""
        return sum(source.dropped for source in self.sources)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: integers, and a list of them for everything that each source has."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in _ONE}
        lists = {name: [getattr(source, name) for source in self.sources] for name in PER_SOURCE}
        return plain | lists | {"waiting": list(self.waiting)}

    @classmethod
    def from_dict(cls, state: Any) -> StreamState:
        """Raises ValueError for a state that is not one of ours or of another version."""
        names = {*_ONE, *PER_SOURCE, "waiting"}
        if not isinstance(state, dict):
            raise ValueError(f"not a stream state: must be a mapping, not a {type(state).__name__}")
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"stream state has version {state.get('version')!r}: this seqmesh reads {STATE_VERSION}")
        if differing := sorted(map(str, state.keys() ^ names)):
            raise ValueError(f"not a stream state: needs {sorted(names)}; it lacks, or has besides, {differing}")
        if bad := [name for name in _ONE if not _is_count(state[name])]:
            raise ValueError(f"not a stream state: {bad} must be integers from 0 to 2**62 - 1")
        if state["window_step"] > state["step"]:
            raise ValueError(f"not a stream state: window_step is {state['window_step']}, step only {state['step']}")
        lists = {name: _counts(name, state[name]) for name in (*PER_SOURCE, "waiting")}
        waiting = lists.pop("waiting")
        if len({len(each) for each in lists.values()}) > 1 or not 1 <= len(lists["position"]) <= MAX_SOURCES:
            raise ValueError(f"not a stream state: must have the same number of each of {sorted(lists)}")
        if len(waiting) % 2 or len(waiting) > MAX_PLACES:
            raise ValueError(f"not a stream state: {len(waiting)} integers say what waits")
        columns = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        return cls(
            **{name: state[name] for name in _ONE},
            sources=tuple(SourceState(**column) for column in columns),
            waiting=waiting,
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_INTEGER


def _counts(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_count, value)):
        raise ValueError(f"not a stream state: {name} must be a list of integers from 0 to 2**62 - 1")
    return tuple(value)
