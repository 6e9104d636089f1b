"""Is attention over rings of ranks right between the devices of this machine? Run on every rank:

    torchrun --standalone --nproc-per-node 2 -m seqmesh.tools.ring_check

Documents are spread over all ranks, forwards and backwards, and over pairs of neighbours that talk at the same time, by
every exchange; each rank compares its rows with the formula in float64. GPUs talk by NCCL; without any, processes by
gloo. `seqmesh.tools.gpu_check` runs it where there are two GPUs or more.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.backends import reference
from seqmesh.kernels.backends.base import Rule, Segments
from seqmesh.kernels.layout import Layout, Ring
from seqmesh.packer.pieces import chunk_sizes, piece_ranges
from seqmesh.tools.kernel_cases import TOLERANCES, difference
from seqmesh.trainer.parallel import Ranks, join_ranks

MODULE = "seqmesh.tools.ring_check"
SECONDS = 120.0  # that an exchange may take
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SCALE = HEAD_DIM**-0.5
WAYS = (("ring", None), ("gather", None), ("gather", 100))  # exchange and window
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    length: int
    ranks: tuple[int, ...]

    def held(self, rank: int) -> Tensor:
        """Its tokens on the rank, in the order of its segment there."""
        early, late = piece_ranges(self.length, len(self.ranks), self.ranks.index(rank))
        return torch.cat((torch.arange(*early), torch.arange(*late)))


def documents(count: int, longest: int = 1900) -> list[Document]:
    """In the order in which all ranks meet them."""
    everyone = tuple(range(count))
    pairs = [Document(length=longest // 3 + 5 * low, ranks=(low, low + 1)) for low in range(0, count - 1, 2)]
    return [Document(length=longest, ranks=everyone), *pairs, Document(length=longest // 6, ranks=everyone[::-1])]


def layout_on(rank: int, everything: list[Document], device: torch.device) -> Layout:
    """Of the rank's pieces, in the order of documents."""
    own = [document for document in everything if rank in document.ranks]
    starts = list(accumulate((len(document.held(rank)) for document in own), initial=0))
    rings = tuple(
        Ring(
            segment=segment,
            start=starts[segment],
            ranks=document.ranks,
            index=document.ranks.index(rank),
            chunks=chunk_sizes(document.length, len(document.ranks)),
        )
        for segment, document in enumerate(own)
    )
    longest = max(len(document.held(rank)) for document in own)
    return Layout(torch.tensor(starts, dtype=torch.int32, device=device), longest, rings)


def check(ranks: Ranks, everything: list[Document], dtype: torch.dtype) -> dict[str, float]:
    """For each exchange and window, the largest difference of this rank's rows, see `kernel_cases.compare`."""
    whole = [_make(document, ranks.device, dtype) for document in everything]
    mine = [
        (tensors, document.held(ranks.rank).to(ranks.device))
        for document, tensors in zip(everything, whole, strict=True)
        if ranks.rank in document.ranks
    ]
    layout = layout_on(ranks.rank, everything, ranks.device)
    dout, *qkv = (torch.cat([tensors[name][rows] for tensors, rows in mine]) for name in range(4))
    errors = {}
    for exchange, window in WAYS:
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        out = varlen_attention(q, k, v, layout, window=window, scale=SCALE, exchange=exchange)
        got = out.detach(), *torch.autograd.grad(out, (q, k, v), dout)
        true = [_undivided(tensors, rows, window) for tensors, rows in mine]
        for name, each, parts in zip(NAMES, got, zip(*true, strict=True), strict=True):
            errors[f"{exchange}, window {window}, {name}"] = difference(each, torch.cat(parts), dtype)
    return errors


def _make(document: Document, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """dout, q, k and v of all its tokens, alike on all ranks."""
    generator = torch.Generator().manual_seed(document.length)
    heads = (HEADS, HEADS, KV_HEADS, KV_HEADS)
    return tuple(
        torch.randn(document.length, count, HEAD_DIM, generator=generator).to(device, dtype) for count in heads
    )


def _undivided(tensors: tuple[Tensor, ...], rows: Tensor, window: int | None) -> Iterator[Tensor]:
    """Output and gradients of those rows, in float64."""
    dout, q, k, v = (x.double() for x in tensors)
    cu = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    segments, rule = Segments.of_themselves(cu, len(q)), Rule(causal=True, window=window, scale=SCALE)
    out, lse = reference.forward(q, k, v, segments, rule)
    gradients = reference.backward(dout, q, k, v, out, lse, segments, rule)
    return (x[rows] for x in (out, *gradients))


def failures(ranks: Ranks, everything: list[Document], dtype: torch.dtype) -> list[str]:
    """A sentence for each thing that is off on any rank; the same on all."""
    ranks.wait_for_all()  # NCCL wants all members of a group in its first exchange
    own = [
        f"rank {ranks.rank}, {dtype}: {what} is off by {error:.1e}"
        for what, error in check(ranks, everything, dtype).items()
        if not error <= TOLERANCES[dtype]
    ]
    found: list[list[str]] = [[]] * ranks.count
    dist.all_gather_object(found, own)
    return [sentence for each in found for sentence in each]


def run_apart(count: int) -> str:
    """Run it on so many ranks of this machine, in processes of their own. Returns what is wrong, or nothing."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", MODULE]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()


def main() -> int:
    """On every rank. The exit code."""
    with join_ranks(SECONDS) as ranks:
        if ranks.count == 1:
            raise ValueError("there is one rank: start two or more with torchrun")
        dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        wrong = failures(ranks, documents(ranks.count), dtype)
        if ranks.rank == 0:
            sys.stdout.write("".join(f"{sentence}\n" for sentence in wrong) or "rings are right\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
