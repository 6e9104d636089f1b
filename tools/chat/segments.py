"""What a conversation is rendered to: segments of ordinary text and special tokens, each learned or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class ChatError(ValueError):
    """Why a conversation cannot be used."""


@dataclass(frozen=True, slots=True)
class Segment:
    """text: ordinary text, whatever it spells, or the name of a special token. learned: the model is to say it."""

    text: str
    is_token: bool = False
    learned: bool = False


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same with neighbouring texts in one, where both or neither are learned, and empty ones left out."""
    last: Segment | None = None
    for segment in segments:
        if not segment.text:
            continue
        if last and not last.is_token and not segment.is_token and last.learned == segment.learned:
            last = Segment(last.text + segment.text, learned=last.learned)
            continue
        if last:
            yield last
        last = segment
    if last:
        yield last
