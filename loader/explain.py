"""A validation error as one sentence for people: each field and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError


def explain(error: ValidationError, settings: type | None = None) -> str:
    """`field: reason; field: reason`, without the library's links and type names. settings: the dataclass that was to
    be made, so that an unknown field can be answered with one that is like it."""
    return "; ".join(_sentence(".".join(map(str, e["loc"])), _reason(e, settings)) for e in error.errors())


def _sentence(place: str, reason: str) -> str:
    return f"{place}: {reason}" if place else reason


def _reason(error: Any, settings: type | None) -> str:
    match error["type"]:
        case "unexpected_keyword_argument":
            meant = _likely(error["loc"], list(_names(settings))) if settings else []
            return f"is not a setting{'; did you mean ' * bool(meant)}{' or '.join(meant)}{'?' * bool(meant)}"
        case "dataclass_type":
            return f"must be a group of settings, not {json.dumps(error['input'], default=str)}"
        case _:
            return str(error["msg"]).removeprefix("Value error, ")


def _names(settings: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings."""
    for name, hint in get_type_hints(settings).items():
        if not name.startswith("_"):
            yield prefix + name
            for inner in _dataclasses(hint):
                yield from _names(inner, f"{prefix}{name}.")


def _dataclasses(hint: Any) -> Iterator[type]:
    """Those that a value of this type may be."""
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for argument in get_args(hint):
        yield from _dataclasses(argument)


def _likely(place: Sequence[str | int], names: Sequence[str]) -> list[str]:
    """Settings beside an unknown one that are spelled like it, or else those of its name, or one like it, elsewhere."""
    *parents, leaf = map(str, place)
    prefix = "".join(f"{parent}." for parent in parents)
    beside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    close = get_close_matches(leaf, [name for name in beside if "." not in name], 1, 0.7)
    elsewhere = [name for name in names if name.rpartition(".")[2] == leaf]
    leaves = [name.rpartition(".")[2] for name in names]
    return [prefix + name for name in close] or elsewhere[:3] or get_close_matches(leaf, leaves, 1, 0.8)
