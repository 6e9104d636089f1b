"""What the back ends on FlashAttention libraries share: reasons to refuse, arguments as the libraries take them, and
results as `seqmesh.kernels.backends.base` has them.

None of it makes the host wait for the device: what depends on the segments' bounds is a mask computed there. Not yet
run on a GPU: written from the libraries' sources, tested over stand-ins for them.

Shapes: T rows, H heads, D head width, N segments.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from seqmesh.kernels.backends.base import Request, Rule, Segments, statistics_dtype

Unlimited = TypeVar("Unlimited", int, None)  # how a library is told that a side has no limit

DTYPES = (torch.bfloat16, torch.float16)
MOST_ELEMENTS = 1 << 31  # offsets inside a tensor are 32-bit integers in some kernels (flash-attention #767, #2611)
MOST_SEGMENTS = (1 << 16) - 1  # the segment is the second or third coordinate of a CUDA grid


# Reasons to refuse: each gives a sentence, or None. Chained with `or`, cheap ones first.


def device_refusal(request: Request) -> str | None:
    if request.device.type != "cuda":
        return f"tensors are on {request.device.type}, this back end runs on CUDA"
    return None


def library_refusal(library: str, modules: tuple[str, ...], distribution: str = "", least: str = "") -> str | None:
    """modules: dotted names that must be there, found without importing anything; distribution, least: a version."""
    missing = next((name for name in modules if _spec(name) is None), None)
    if missing is not None:
        return f"{library} is not installed (there is no module {missing})"
    try:
        found = version(distribution) if distribution else ""
    except PackageNotFoundError:
        return None  # built in place: it has no version to be asked for
    if found and TorchVersion(found) < least:
        return f"{library} is {found}: must be {least} or later"
    return None


def build_refusal() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.version.hip:
        return "this build of torch is for ROCm, on which this back end was never tried"
    return None


def capability_refusal(request: Request, majors: range) -> str | None:
    major, minor = torch.cuda.get_device_capability(request.device)
    if major in majors:
        return None
    most = f" to {majors[-1]}.x" if len(majors) > 1 else ""
    return f"the device has compute capability {major}.{minor}: must be {majors[0]}.x{most}"


def shape_refusal(request: Request, most: int = 256) -> str | None:
    if request.dtype not in DTYPES:
        return f"dtype is {request.dtype}: must be one of {', '.join(map(str, DTYPES))}"
    if request.head_dim % 8 or not 8 <= request.head_dim <= most:
        return f"head_dim is {request.head_dim}: must be a multiple of 8, from 8 to {most}"
    return None


def _spec(name: str) -> ModuleSpec | None:
    """Of a module or, without importing what it lies in, a submodule."""
    spec, parts = None, name.split(".")
    for depth in range(1, len(parts) + 1):
        part = ".".join(parts[:depth])
        inside = None if spec is None else spec.submodule_search_locations
        spec = importlib.util.find_spec(part) if depth == 1 else PathFinder.find_spec(part, inside)
        if spec is None:
            return None
    return spec


# Arguments.


def window_sides(segments: Segments, rule: Rule, *, unlimited: Unlimited) -> tuple[int | Unlimited, int | Unlimited]:
    """(left, right): how many keys beside its own a row sees on either side, as FlashAttention counts them.

    A window that reaches over any segment is none. A negative side would be read as none, hence ValueError for a window
    below 1.
    """
    window = rule.window
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: must be at least 1, or None for all keys")
    left = unlimited if window is None or window >= max(segments.max_q, segments.max_k) else window - 1
    return left, 0 if rule.causal else left


def check_segments(library: str, segments: Segments) -> None:
    """Raises NotImplementedError for more segments than a library can launch."""
    count = len(segments.cu_q) - 1
    if count > MOST_SEGMENTS:
        raise NotImplementedError(f"there are {count} segments, and {library} takes {MOST_SEGMENTS} at most")


def check_size(library: str, q: Tensor, k: Tensor, segments: Segments) -> None:
    """`check_segments`, and the same error for what a library with 32-bit offsets would compute wrongly without a word.

    Gradients of keys are as large as if every query head had its own.
    """
    check_segments(library, segments)
    elements = max(len(q), len(k)) * q.shape[1] * q.shape[2]
    if elements >= MOST_ELEMENTS:
        raise NotImplementedError(
            f"q is {list(q.shape)} and k {list(k.shape)}: rows · heads · head_dim is {elements}, and {library} "
            f"counts to {MOST_ELEMENTS - 1}; make micro-batches smaller"
        )


def is_empty(q: Tensor, k: Tensor, segments: Segments) -> bool:
    """Whether no row can see any key; libraries refuse such calls, or launch grids of size 0."""
    return min(len(q), len(k), len(segments.cu_q) - 1, segments.max_q, segments.max_k) == 0


def loadable(x: Tensor) -> Tensor:
    """x [T, H, D] as kernels load it, copied where it is not: a row's elements side by side, rows and heads starting at
    multiples of 16 bytes, and no offset beyond 32 bits (flash-attention #2611: a view into wide rows)."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    starts = (x.stride(0), x.stride(1), x.storage_offset())
    aligned = x.stride(2) == 1 and all(start * x.element_size() % 16 == 0 for start in starts)
    if aligned and min(x.stride()) > 0 and reach < MOST_ELEMENTS:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def without_tail(x: Tensor, cu: Tensor) -> Tensor:
    """A copy of x [T, H, D] with 0 in the rows from cu[-1] on.

    For libraries that load whole tiles: what is read past a segment's end is multiplied by 0, which NaN survives.
    """
    return x.masked_fill(tail(cu, len(x)).view(-1, 1, 1), 0.0)


# Results.


def empty_forward(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=statistics_dtype(q.dtype))


def empty_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def tail(cu: Tensor, rows: int) -> Tensor:
    """[rows] bool: the rows from cu[-1] on."""
    return torch.arange(rows, device=cu.device) >= cu[-1]


def clean_forward(out: Tensor, lse: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """In place, out [T, H, D] 0 and lse [H, T] −inf in the rows from cu_q[-1] on, which libraries leave as they were
    allocated, and in those that see no key, whose lse flash-attn 2 says is +inf (flash-attention #978)."""
    unseen = tail(segments.cu_q, len(out)) | lse.isinf()
    lse.masked_fill_(unseen, -torch.inf)
    out.masked_fill_(unseen.transpose(0, 1).unsqueeze(-1), 0.0)
    return out, lse


def clean_backward(dq: Tensor, dk: Tensor, dv: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """In place, 0 in the rows from cu_q[-1] and cu_k[-1] on, which libraries leave as they were allocated."""
    for gradient, cu in ((dq, segments.cu_q), (dk, segments.cu_k), (dv, segments.cu_k)):
        gradient.masked_fill_(tail(cu, len(gradient)).view(-1, 1, 1), 0.0)
    return dq, dk, dv


def deterministic() -> bool:
    """Whether gradients have to be bit-identical from run to run, as torch was told; slower, and needs more memory."""
    return torch.are_deterministic_algorithms_enabled()
