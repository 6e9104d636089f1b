"""Rotary position embedding (Su et al. 2021, RoFormer) on packed rows.

Positions are those inside the document and come with the batch: a piece of a document keeps the positions it has in
the whole. Pairs are (i, i + D/2), as in GPT-NeoX and Llama, not the neighbours (2i, 2i + 1).

Shapes: T packed rows, H heads, D head width (even).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How Llama 3.1 stretches positions for documents longer than those of its first training, of original_length
    tokens: pairs that turn fewer than low_freq_factor times in it turn `factor` times slower, those that turn more
    than high_freq_factor times as before, those between something between."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "original_length"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: must be positive and finite")
        if not self.low_freq_factor < self.high_freq_factor < math.inf:
            given = f"high_freq_factor is {self.high_freq_factor}"
            raise ValueError(f"{given}: must be over low_freq_factor, {self.low_freq_factor}, and finite")


def rotary_tables(
    position_ids: Tensor, head_dim: int, base: float, dtype: torch.dtype, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, D/2] each, of position · base^(−2i/D), or of what `scaling` makes of that. position_ids [T], any
    integers.

    Angles are float64 until the cast: in float32 the cosine is off by 0.005 at position 256K and 0.04 at 1M. Raises
    ValueError for an odd head_dim, a base that is not positive, or positions that are not integers.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: must be even and positive")
    if not base > 0:
        raise ValueError(f"base is {base}: must be positive")
    if position_ids.ndim != 1 or position_ids.is_floating_point():
        raise ValueError(f"position_ids is {position_ids.dtype} {list(position_ids.shape)}: must be integers [T]")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=position_ids.device) / head_dim
    angles = torch.outer(position_ids.to(torch.float64), _scaled(base**-exponents, scaling))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scaled(frequencies: Tensor, scaling: RotaryScaling | None) -> Tensor:
    if scaling is None:
        return frequencies
    turns = frequencies * (scaling.original_length / (2 * math.pi))
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of x by its row's angles. x [T, H, D], cos and sin [T, D/2] -> [T, H, D] in x's dtype.

    Computed in the wider of the dtypes of x and of the tables, so bfloat16 rows with float32 tables are rounded once.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
