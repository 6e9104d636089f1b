"""A micro-batch that does nothing: for ranks that must run the model without having work for it."""

from __future__ import annotations

import torch
from torch import Tensor

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import UNSUPERVISED
from seqmesh.trainer.models.transformer import Transformer


def run_filler(model: Transformer, device: torch.device) -> None:
    """Two rows of padding, through all parts of the model that are here as if there was nothing between them: they take
    part in every gather, no expert counts them, and their gradient is exactly zero."""
    layout = Layout(torch.zeros(2, dtype=torch.int32, device=device), 1)
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    positions = torch.arange(2, dtype=torch.int32, device=device)
    x = tokens if model.parts[0].start == 0 else _rows(model, device)
    for part in range(len(model.parts)):
        out = model(x, positions, layout, tokens + UNSUPERVISED, part=part)
        x = out[0] if isinstance(out, tuple) else out
    torch.autograd.backward(x, torch.zeros_like(x))


def _rows(model: Transformer, device: torch.device) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.zeros(model.rows(2), model.config.width, dtype=dtype, device=device, requires_grad=True)
