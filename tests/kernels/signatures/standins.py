"""Stand-ins for FlashAttention libraries: what their functions do, as their sources say, slowly and on the CPU.

Arguments are bound to the recorded signature and read as the library reads them; what it leaves unwritten holds NaN
here; what it reads past a segment's end is read here too; what it refuses is refused. Masks are made from (left, right)
alone, so that a back end's idea of a window is compared with the library's, not with itself.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.kernels.signatures.recorded import recorded

HALVES = (torch.float16, torch.bfloat16)
Sides = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """overhang: rows past a segment's end that are loaded with its last, the weights of which are 0. unseen: the lse of
    a row that sees no key."""

    overhang: int
    unseen: float

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, sides: Sides, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
        for rows, keys in segments(cu_q, cu_k):
            scores = _scores(q[rows], k[keys], sides, scale)
            total = scores.logsumexp(dim=-1)
            weights = torch.exp(scores - total.nan_to_num(neginf=0.0).unsqueeze(-1))
            more = _longer(keys, self.overhang, len(v))
            weights = torch.nn.functional.pad(weights, (0, more.stop - keys.stop))
            out[rows] = (weights @ _heads(v[more], q.shape[1])).transpose(0, 1).to(out.dtype)
            lse[:, rows] = total.masked_fill(total == -torch.inf, self.unseen).float()
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: tuple[Tensor, Tensor],
        sides: Sides, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """An lse of +inf makes every weight of its row 0; of −inf, which a row that sees nothing has, none is left."""
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
        for rows, keys in segments(*bounds):
            shift = lse[:, rows].double().nan_to_num(neginf=0.0, posinf=torch.inf).unsqueeze(-1)
            weights = torch.exp(_scores(q[rows], k[keys], sides, scale) - shift)
            longer, more = _longer(rows, self.overhang, len(q)), _longer(keys, self.overhang, len(k))
            size = (0, more.stop - keys.stop, 0, longer.stop - rows.stop)
            weights = torch.nn.functional.pad(weights, size)
            grad, output = _heads(dout[longer], q.shape[1]), _heads(out[longer], q.shape[1])
            dscores = (
                weights * (grad @ _heads(v[more], q.shape[1]).mT - (grad * output).sum(dim=-1, keepdim=True)) * scale
            )
            dq[rows] = (dscores @ _heads(k[more], q.shape[1]))[:, : _size(rows)].transpose(0, 1).to(dq.dtype)
            for target, gradient in ((dk, dscores.mT @ _heads(q[longer], q.shape[1])), (dv, weights.mT @ grad)):
                own = gradient[:, : _size(keys)]
                target[keys] = (
                    own.reshape(k.shape[1], q.shape[1] // k.shape[1], *own.shape[1:])
                    .sum(dim=1)
                    .transpose(0, 1)
                    .to(target.dtype)
                )
        return dq, dk, dv


TIGHT = Kernel(overhang=0, unseen=torch.inf)  # flash-attn 2 and torch's copy: loads stop at the segment's end
TILED = Kernel(overhang=64, unseen=-torch.inf)  # flash-attn 3 and 4: whole tiles are loaded


def segments(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    pairs = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    return ((slice(*rows), slice(*keys)) for rows, keys in pairs)


def _scores(q: Tensor, k: Tensor, sides: Sides, scale: float) -> Tensor:
    """[Hq, Lq, Lk]; a side of None has no limit. The last row stands beside the last key."""
    distance = torch.arange(len(q)).unsqueeze(1) + len(k) - len(q) - torch.arange(len(k))
    left, right = sides
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= torch.tensor(False) if left is None else distance > left
    hidden |= torch.tensor(False) if right is None else -distance > right
    scores: Tensor = (_heads(q, q.shape[1]) @ _heads(k, q.shape[1]).mT) * scale
    return scores.masked_fill(hidden, -torch.inf)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.double().transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0)


def _longer(rows: slice, by: int, most: int) -> slice:
    return slice(rows.start, min(rows.stop + by, most)) if by else rows


def _size(rows: slice) -> int:
    return int(rows.stop - rows.start)


def check_tensors(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype in HALVES, "fp16 and bf16 only"
        assert x.stride(-1) == 1, "the last dimension must be contiguous"
        assert x.shape[-1] % 8 == 0
        assert x.shape[-1] <= 256
        assert all(stride * x.element_size() % 16 == 0 for stride in (*x.stride()[:-1], x.storage_offset()))


def check_bounds(cu: Tensor, longest: int, rows: int) -> None:
    assert cu.dtype == torch.int32
    assert cu.is_contiguous()
    assert len(cu) > 1, "the number of segments must be positive"
    assert longest >= int(cu.diff().max())
    assert int(cu[-1]) <= rows


def number(value: Any) -> int:
    """What a C function would take as an int: 32 bits, nothing else."""
    assert type(value) is int
    assert -(1 << 31) <= value < 1 << 31
    return value


# flash-attn 2: the functions of its compiled module `flash_attn_2_cuda`.


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: None, cu_q: Tensor, cu_k: Tensor, seqused_k: None, leftpad_k: None,
    block_table: None, alibi: None, max_q: int, max_k: int, dropout: float, scale: float, zero_tensors: bool,
    causal: bool, left: int, right: int, softcap: float, return_softmax: bool, generator: None, num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert {out, seqused_k, leftpad_k, block_table, alibi, generator} == {None}
    assert dropout == softcap == 0
    assert not zero_tensors
    assert not return_softmax
    assert not num_splits
    check_tensors(q, k, v)
    if max_q == 1 and q.shape[1] > k.shape[1] and left < 0 and right < 0:
        q.reshape(len(cu_q) - 1, k.shape[1], -1, q.shape[2])  # flash-attention #1537
        raise AssertionError("no back end should come here")
    sides = _flash2_sides(cu_q, cu_k, q, k, max_q, max_k, causal and max_q > 1, left, right)
    return *TIGHT.forward(q, k, v, cu_q, cu_k, sides, scale), torch.empty(0), torch.zeros(2)


def varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_q: Tensor, cu_k: Tensor, alibi: None, max_q: int, max_k: int, dropout: float, scale: float, zero_tensors: bool,
    causal: bool, left: int, right: int, softcap: float, deterministic: bool, generator: None, rng_state: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert {alibi, generator, rng_state} == {None}
    assert dropout == softcap == 0
    assert not zero_tensors
    assert max_k > 0, "a grid of no blocks"
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    check_tensors(dout, q, k, v, out, dq, dk, dv)
    check_lse(lse, q)
    sides = _flash2_sides(cu_q, cu_k, q, k, max_q, max_k, causal, left, right)
    results = TIGHT.backward(dout, q, k, v, out, lse, (cu_q, cu_k), sides, scale)
    for target, result in zip((dq, dk, dv), results, strict=True):
        target.copy_(result)
    return dq, dk, dv, torch.empty(0)


def check_lse(lse: Tensor, q: Tensor) -> None:
    assert lse.dtype == torch.float32
    assert lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()


def _flash2_sides(
    cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor, max_q: int, max_k: int, causal: bool, left: int, right: int
) -> Sides:
    """As flash-attn 2 understands them: a side that reaches max_k is taken for one without limit."""
    check_bounds(cu_q, number(max_q), len(q))
    check_bounds(cu_k, number(max_k), len(k))
    right = 0 if causal else right
    left, right = (-1 if number(side) >= max_k else side for side in (left, right))
    return None if left < 0 else left, None if right < 0 else right


def _flash2_forward(arguments: Mapping[str, Any]) -> Any:
    a = arguments
    options = (a["seqused_k"], a["leftpad_k"], a["block_table"], a["alibi_slopes"])
    return varlen_fwd(
        a["q"], a["k"], a["v"], None, a["cu_seqlens_q"], a["cu_seqlens_k"], *options, a["max_seqlen_q"],
        a["max_seqlen_k"], a["dropout_p"], a["softmax_scale"], a["zero_tensors"], a["causal"], a["window_size_left"],
        a["window_size_right"], a["softcap"], a["return_softmax"], None,
    )  # fmt: skip


def _flash2_backward(arguments: Mapping[str, Any]) -> Any:
    a = arguments
    rows = (a["dout"], a["q"], a["k"], a["v"], a["out"], a["softmax_lse"], a["dq"], a["dk"], a["dv"])
    *_, softmax_d = varlen_bwd(
        *rows, a["cu_seqlens_q"], a["cu_seqlens_k"], a["alibi_slopes"], a["max_seqlen_q"], a["max_seqlen_k"],
        a["dropout_p"], a["softmax_scale"], a["zero_tensors"], a["causal"], a["window_size_left"],
        a["window_size_right"], a["softcap"], a["deterministic"], None, a["rng_state"],
    )  # fmt: skip
    return softmax_d


# torch's copy: no scratch for gradients is handed in, and right defaults to 0 with causal.


def _torch_forward(arguments: Mapping[str, Any]) -> Any:
    a = arguments
    assert {a["seqused_k"], a["alibi_slopes"], a["block_table"], a["num_splits"]} == {None}
    out, lse, *_ = varlen_fwd(
        a["query"], a["key"], a["value"], None, a["cum_seq_q"], a["cum_seq_k"], None, None, None, None, a["max_q"],
        a["max_k"], a["dropout_p"], a["scale"], False, a["is_causal"], a["window_size_left"], a["window_size_right"],
        0.0, a["return_debug_mask"], None,
    )  # fmt: skip
    return out, lse, torch.zeros(2), torch.empty(0), torch.empty(0)


def _torch_backward(arguments: Mapping[str, Any]) -> Any:
    a = arguments
    assert a["rng_state"].dtype == torch.uint64
    dq, dk, dv = (torch.full(a[name].shape, torch.nan, dtype=a[name].dtype) for name in ("query", "key", "value"))
    varlen_bwd(
        a["grad_out"], a["query"], a["key"], a["value"], a["out"], a["logsumexp"], dq, dk, dv, a["cum_seq_q"],
        a["cum_seq_k"], None, a["max_q"], a["max_k"], a["dropout_p"], a["scale"], False, a["is_causal"],
        a["window_size_left"], a["window_size_right"], 0.0, torch.are_deterministic_algorithms_enabled(), None, None,
    )  # fmt: skip
    return dq, dk, dv


# flash-attn 3.


def _flash3_sides(a: Mapping[str, Any], causal: bool) -> Sides:
    """A side that reaches the end of the longest segment, of keys to the left and of queries to the right, is none."""
    check_bounds(a["cu_seqlens_q"], number(a["max_seqlen_q"]), len(a["q"]))
    check_bounds(a["cu_seqlens_k"], number(a["max_seqlen_k"]), len(a["k"]))
    left, right = number(a["window_size_left"]), number(a["window_size_right"])
    left = -1 if left >= a["max_seqlen_k"] - 1 else left
    right = 0 if causal else -1 if right >= a["max_seqlen_q"] - 1 else right
    return None if left < 0 else left, None if right < 0 else right


def _flash3_forward(arguments: Mapping[str, Any]) -> Any:
    a = arguments
    check_tensors(a["q"], a["k"], a["v"])
    assert (a["softcap"], a["num_splits"], a["attention_chunk"], a["qv"], a["out_"]) == (0.0, 1, 0, None, None)
    assert {a["seqused_q"], a["seqused_k"], a["k_new"], a["page_table"], a["leftpad_k"]} == {None}
    bounds = a["cu_seqlens_q"], a["cu_seqlens_k"]
    out, lse = TILED.forward(a["q"], a["k"], a["v"], *bounds, _flash3_sides(a, a["causal"]), a["softmax_scale"])
    return out, lse, torch.empty(0), torch.empty(0)


def _flash3_backward(arguments: Mapping[str, Any]) -> Any:
    a = arguments
    rows = a["dout"], a["q"], a["k"], a["v"], a["out"]
    check_tensors(*rows, a["dq"], a["dk"], a["dv"])
    check_lse(a["softmax_lse"], a["q"])
    assert (a["softcap"], a["sequed_q"], a["sequed_k"]) == (0.0, None, None)
    bounds = a["cu_seqlens_q"], a["cu_seqlens_k"]
    sides = _flash3_sides(a, a["is_causal"])
    results = TILED.backward(*rows, a["softmax_lse"], bounds, sides, a["softmax_scale"])
    for name, result in zip(("dq", "dk", "dv"), results, strict=True):
        a[name].copy_(result)
    return torch.empty(0)


# flash-attn 4.


def _flash4_sides(a: Mapping[str, Any], left: int | None, right: int | None) -> Sides:
    check_bounds(a["cu_seqlens_q"], number(a["max_seqlen_q"]), len(a["q"]))
    check_bounds(a["cu_seqlens_k"], number(a["max_seqlen_k"]), len(a["k"]))
    right = 0 if a["causal"] else right
    if left is not None and right is not None and left + right < 0:
        return None, None
    return left, right


def _flash4_forward(arguments: Mapping[str, Any]) -> Any:
    a = arguments
    check_tensors(a["q"], a["k"], a["v"])
    assert a["return_lse"]
    assert (a["softcap"], a["num_splits"], a["qv"], a["page_table"], a["learnable_sink"]) == (0.0, 1, None, None, None)
    bounds = a["cu_seqlens_q"], a["cu_seqlens_k"]
    sides = _flash4_sides(a, *a["window_size"])
    return TILED.forward(a["q"], a["k"], a["v"], *bounds, sides, a["softmax_scale"])


def _flash4_backward(arguments: Mapping[str, Any]) -> Any:
    a = arguments
    rows = a["dout"], a["q"], a["k"], a["v"], a["out"]
    check_tensors(*rows)
    check_lse(a["lse"], a["q"])
    assert (a["softcap"], a["dlse"], a["score_mod"], a["learnable_sink"], a["dq"]) == (0.0, None, None, None, None)
    bounds = a["cu_seqlens_q"], a["cu_seqlens_k"]
    sides = _flash4_sides(a, a["window_size_left"], a["window_size_right"])
    return TILED.backward(*rows, a["lse"], bounds, sides, a["softmax_scale"])


Implementation = Callable[[Mapping[str, Any]], Any]

FUNCTIONS: dict[str, Implementation] = {
    "torch.ops.aten._flash_attention_forward": _torch_forward,
    "torch.ops.aten._flash_attention_backward": _torch_backward,
    "flash_attn.flash_attn_interface._flash_attn_varlen_forward": _flash2_forward,
    "flash_attn.flash_attn_interface._flash_attn_varlen_backward": _flash2_backward,
    "flash_attn_interface._flash_attn_forward": _flash3_forward,
    "flash_attn_interface._flash_attn_backward": _flash3_backward,
    "flash_attn.cute.interface.flash_attn_varlen_func": _flash4_forward,
    "flash_attn.cute.interface._flash_attn_bwd": _flash4_backward,
}


def module(name: str) -> ModuleType:
    """One with the functions above that the library has in the module of that name, by their recorded signatures."""
    made, entries = ModuleType(name), recorded()
    for function, implementation in FUNCTIONS.items():
        inside, _, short = function.rpartition(".")
        if inside == name:
            setattr(made, short, _bound(entries[function].parameters, implementation))
    return made


def _bound(signature: inspect.Signature, implementation: Implementation) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        return implementation(bound.arguments)

    return call
