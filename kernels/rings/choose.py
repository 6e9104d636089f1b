"""Which exchange a ring uses, when the caller leaves it open. Integers only, and alike on all members."""

from __future__ import annotations

EXCHANGES = ("auto", "ring", "gather")


def choose(exchange: str, *, size: int, tokens: int, row_bytes: int, window: int | None) -> str:
    """ "ring" or "gather", for a document of so many tokens over `size` ranks; row_bytes: of a key and its value."""
    if exchange != "auto":
        return exchange
    return "gather"
