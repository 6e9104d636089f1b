"""The signatures of library functions that back ends call, as they are in the libraries' sources, from recorded.json.

Plain data, so that a library that is not installed still checks the calls: names, order and defaults.
"""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One function. signature: as Python writes it, or a torch operator's schema."""

    library: str
    version: str
    module: str
    function: str
    signature: str

    @property
    def parameters(self) -> inspect.Signature:
        return of_schema(self.signature) if self.signature.startswith("aten::") else of_text(self.signature)


def recorded() -> dict[str, Recorded]:
    """By "module.function"."""
    entries = [Recorded(**entry) for entry in json.loads(Path(__file__).with_name("recorded.json").read_text())]
    return {f"{entry.module}.{entry.function}": entry for entry in entries}


def of_text(text: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(f"def function{text}: ...", namespace)
    return inspect.signature(namespace["function"])


def of_schema(text: str) -> inspect.Signature:
    return inspect.Signature([_parameter(argument) for argument in torch._C.parse_schema(text).arguments])


def _parameter(argument: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter(argument.name, kind, default=default)
