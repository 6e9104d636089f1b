"""Plain functions of tensors compiled into fused loops: norms, activations, rotary embedding.

Each of them is a chain of passes over memory in eager torch; compiled it is one pass forward and one backward. On a CPU
that needs a C++ compiler, and some seconds for each function when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The compiled twin of a function of tensors: the same arguments, the same result. One twin for each function,
    compiled when it is first called, for any sizes (a second time where sizes first differ or a dtype is new).

    It never runs the plain function instead: where torch cannot compile all of it in one piece, or there is no
    compiler, the call raises. Raises RuntimeError where compilation is switched off, since torch would then hand out
    the plain function without a word.
    """
    if torch._dynamo.config.disable:
        raise RuntimeError("compilation is switched off (TORCH_COMPILE_DISABLE): call the function itself")
    twin: Function = _compiled(function)
    return twin


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, dynamic=True, fullgraph=True)
