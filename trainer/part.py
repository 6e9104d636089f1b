"""A rank's rows of a tensor that lies on several ranks, where torch's DTensor cannot say it: any rows, also none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows [start, start + len(local)) of a tensor of `shape`. `local` is the storage itself: what is copied into it is
    what the owner sees. A tensor of no dimensions has one row."""

    local: Tensor
    shape: torch.Size
    start: int


Saved = dict[str, Tensor | DTensor | Part]
"""What a checkpoint holds, by name: `model/<parameter>`, `optimizer/<parameter>/<slot>`, `optimizer/step`. A plain
tensor is whole and the same on every rank. Names and whole shapes do not depend on how the model is spread."""
