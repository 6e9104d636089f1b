"""A validation error as one sentence for people: each field and what is wrong with it."""

from __future__ import annotations

from pydantic import ValidationError


def explain(error: ValidationError) -> str:
    """`field: reason; field: reason`, without the library's links and type names."""
    return "; ".join(_sentence(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors())


def _sentence(place: str, message: str) -> str:
    reason = message.removeprefix("Value error, ").replace("Unexpected keyword argument", "is not a setting")
    return f"{place}: {reason}" if place else reason
