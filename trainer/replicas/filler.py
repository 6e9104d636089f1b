"""A micro-batch that does nothing: for ranks that must run the model without having work for it."""

from __future__ import annotations

import torch
from torch import nn

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import UNSUPERVISED


def run_filler(model: nn.Module, device: torch.device) -> None:
    """Two rows of padding, after an empty document: they take part in every gather, no expert has them, and their
    gradient is exactly zero."""
    layout = Layout(torch.zeros(2, dtype=torch.int32, device=device), 1)
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    positions = torch.arange(2, dtype=torch.int32, device=device)
    loss_sum, _ = model(tokens, positions, layout, tokens + UNSUPERVISED)
    torch.autograd.backward(loss_sum)
