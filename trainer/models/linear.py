"""Modules without values: `transformer.init_weights` sets them, and what torch would set is not computed."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def make_linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    return unset(nn.Linear(inputs, outputs, bias=bias, device="meta"))


def unset(module: ModuleT) -> ModuleT:
    """A module made on the meta device, moved to the default one with no values."""
    return module.to_empty(device=torch.get_default_device())
