"""FLOPs of a training step, and what a rank could do at most. Model FLOPs utilisation (MFU) is one over the other.

What is counted: six FLOPs per parameter of a matmul and real token, two forward and four backward (norms, rotary, the
optimizer and looking up embeddings are left out, as is usual); the head's only for supervised tokens, since no other
row is computed there; twelve per head, channel and attended pair in every layer, for the pairs that causal attention
has in truth: L · (L + 1) / 2 of a document of L tokens, fewer with a window, none between documents of one pack.
Padding and recomputed activations are work, but not the model's: they lower the MFU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import piece_pairs

# Dense matmuls, FLOP/s, from the makers' data sheets. float32 is without TF32, torch's default. The first name that the
# device's name contains counts.
PEAKS: dict[str, dict[torch.dtype, float]] = {
    "B200": {torch.bfloat16: 2250e12, torch.float32: 75e12, torch.float64: 37e12},
    "H200": {torch.bfloat16: 989e12, torch.float32: 67e12, torch.float64: 67e12},
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float32: 51e12, torch.float64: 51e12},
    "H100": {torch.bfloat16: 989e12, torch.float32: 67e12, torch.float64: 67e12},
    "A100": {torch.bfloat16: 312e12, torch.float32: 19.5e12, torch.float64: 19.5e12},
    "L40S": {torch.bfloat16: 362e12, torch.float32: 91.6e12},
}
MEASURED_WIDTH = 768
MEASURED_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs, forward and backward, of a token, of a supervised token (on top), and of an attended pair in one layer.
    windows: the most keys that a query sees, layer by layer; None for all before it."""

    per_token: int
    per_supervised: int
    per_pair: int
    windows: tuple[int | None, ...]

    def layer_pairs(self, lengths: Int64Array, ring_sizes: Int64Array, indices: Int64Array) -> int:
        """Attended pairs of pieces of documents, summed over layers: lengths [N] of the whole documents, of which piece
        `indices` of `ring_sizes` is here (0 of 1: the whole). Exact."""
        layers = Counter(self.windows)
        return sum(
            count * int(piece_pairs(lengths, ring_sizes, indices, window).sum()) for window, count in layers.items()
        )

    def of_step(self, *, tokens: int, supervised: int, layer_pairs: float) -> float:
        return self.per_token * tokens + self.per_supervised * supervised + self.per_pair * layer_pairs


def make_work(
    *, block_parameters: int, head_parameters: int, heads: int, head_dim: int, windows: Sequence[int | None]
) -> Work:
    """block_parameters: in matmuls of all layers together. head_parameters: of the output projection, tied or not."""
    return Work(
        per_token=6 * block_parameters,
        per_supervised=6 * head_parameters,
        per_pair=12 * heads * head_dim,
        windows=tuple(windows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """flops: per second, of one rank. source: where the figure comes from, in words."""

    flops: float
    source: str


def find_peak(device: torch.device, dtype: torch.dtype, setting: float | None) -> Peak:
    """The setting `peak_flops`, or else the data sheet of a known GPU, or else what a matmul reaches here and now."""
    if setting is not None:
        return Peak(flops=setting, source="as set by peak_flops")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if (listed := listed_peak(name, dtype)) is not None:
        return Peak(flops=listed, source=f"of the data sheet of {name}")
    return Peak(flops=measured_peak(device, dtype), source="measured by matmuls")


def listed_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU by its name; None for one that is not listed."""
    return next((peaks.get(dtype) for known, peaks in PEAKS.items() if known in name), None)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of square matmuls done for MEASURED_SECONDS."""
    a, b = (torch.ones(MEASURED_WIDTH, MEASURED_WIDTH, device=device, dtype=dtype) for _ in range(2))
    out, fastest = torch.empty_like(a), float("inf")
    torch.mm(a, b, out=out)
    end = time.perf_counter() + MEASURED_SECONDS
    while (begin := time.perf_counter()) < end or fastest == float("inf"):  # once, however busy the machine is
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - begin)
    return float(2 * MEASURED_WIDTH**3 / fastest)
