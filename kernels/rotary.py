"""Rotary position embedding (Su et al. 2021, RoFormer) on packed rows.

Positions are those inside the document and come with the batch: a piece of a document keeps the positions it has in
the whole. Pairs are (i, i + D/2), as in GPT-NeoX and Llama, not the neighbours (2i, 2i + 1).

Shapes: T packed rows, H heads, D head width (even).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(position_ids: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, D/2] each, of position · base^(−2i/D). position_ids [T], any integers.

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
    angles = torch.outer(position_ids.to(torch.float64), base**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of x by its row's angles. x [T, H, D], cos and sin [T, D/2] -> [T, H, D] in x's dtype.

    Computed in the wider of the dtypes of x and of the tables, so bfloat16 rows with float32 tables are rounded once.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
