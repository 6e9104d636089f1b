"""Back ends on FlashAttention libraries, over stand-ins that read arguments as the libraries do."""

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from seqmesh.kernels.backends import flash, flash2, flash3, flash4, torch_varlen
from seqmesh.kernels.backends.base import Backend, Rule, Segments
from seqmesh.tools.kernel_cases import TOLERANCES, Case, cases, compare, make_inputs
from tests.kernels.signatures import standins
from tests.kernels.signatures.recorded import Recorded, recorded

SOURCE = "SEQMESH_FLASH_ATTN_SOURCE"  # a folder that holds flash_attn/ of flash-attn 2, to be tested over
LIBRARIES = {
    "flash2": (flash2, "flash_attn.flash_attn_interface"),
    "flash3": (flash3, "flash_attn_interface"),
    "flash4": (flash4, "flash_attn.cute.interface"),
}
CPU = torch.device("cpu")
PACK = cases()[0]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Backend:
    """The back end without its refusals, calling the stand-in."""
    if name == "torch_varlen":
        monkeypatch.setattr(torch_varlen, "_operators", lambda: standins.module("torch.ops.aten"))
        return willing(torch_varlen.BACKEND)
    backend, library = LIBRARIES[name]
    install(monkeypatch, standins.module(library))
    return willing(backend.BACKEND)


def willing(backend: Backend) -> Backend:
    return replace(backend, refusal=lambda _: None)


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """With empty packages above it."""
    names = module.__name__.split(".")
    for depth in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:depth]), ModuleType(".".join(names[:depth])))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def assert_right(backend: Backend, case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    errors = compare(backend, case, CPU, dtype)
    assert len(errors) == 5
    assert max(errors.values()) <= TOLERANCES[dtype], (case, errors)


@pytest.mark.parametrize("name", ["torch_varlen", *LIBRARIES])
def test_every_case_by_the_library_s_own_semantics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = stand_in(monkeypatch, name)
    for case in cases():
        assert_right(backend, case)
    assert_right(backend, PACK, torch.float16)


@pytest.mark.parametrize("name", ["torch_varlen", *LIBRARIES])
def test_a_window_below_one_never_reaches_a_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = stand_in(monkeypatch, name)
    for window in (0, -3):
        with pytest.raises(ValueError, match=f"window is {window}"):
            compare(backend, replace(PACK, window=window), CPU, torch.bfloat16)


def test_gradients_are_deterministic_where_torch_was_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = stand_in(monkeypatch, "flash2")  # which checks
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_right(backend, PACK)


def test_signatures_of_installed_libraries_are_the_recorded_ones() -> None:
    """torch is always there; of a library that is not, nothing is known here."""
    looked_at = [entry for entry in recorded().values() if has(entry)]
    assert {entry.library for entry in looked_at} >= {"torch"}
    for entry in looked_at:
        assert_agrees(installed_signature(entry), entry)


def assert_agrees(found: inspect.Signature, entry: Recorded) -> None:
    """A later release may have more parameters, with defaults; calls are by name."""
    names = entry.parameters.parameters
    for name, parameter in found.parameters.items():
        default = names[name].default if name in names else parameter.default
        assert parameter.default == default, (entry.function, name)
        assert name in names or default is not inspect.Parameter.empty, (entry.function, name)
    assert names.keys() <= found.parameters.keys(), entry.function


def has(entry: Recorded) -> bool:
    return entry.library == "torch" or flash.library_refusal("", (entry.module,)) is None


def installed_signature(entry: Recorded) -> inspect.Signature:
    if entry.module == "torch.ops.aten":
        operator = getattr(torch.ops.aten, entry.function).default
        return replace(entry, signature=str(operator._schema)).parameters
    function = getattr(importlib.import_module(entry.module), entry.function)
    return inspect.signature(getattr(function, "_init_fn", function))


def test_torch_s_operators_take_the_calls() -> None:
    """The operators themselves, on tensors that there are only on paper."""
    q, k, cu = (
        rows(128, 32, 1, shape=(50, 4, 32)),
        rows(64, 32, 1, shape=(40, 2, 32)),
        torch.zeros(4, dtype=torch.int32),
    )
    segments = Segments.of_themselves(cu.to("meta"), 20)
    for rule in (Rule(True, None, 0.1), Rule(False, 3, 0.1)):
        out, lse = torch_varlen.forward(q, k, k, segments, rule)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (4, 50), torch.float32)
        gradients = torch_varlen.backward(out, q, k, k, out, lse, segments, rule)
        assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """flash-attn 2's Python layer over a stand-in for its compiled module, called as on CUDA."""
    if SOURCE in os.environ:
        monkeypatch.syspath_prepend(os.environ[SOURCE])
    if flash.library_refusal("", ("flash_attn.flash_attn_interface",)) is not None:
        pytest.skip(f"flash-attn 2 is not installed, and {SOURCE} names no folder that holds its source")
    compiled = ModuleType("flash_attn_2_cuda")
    compiled.varlen_fwd, compiled.varlen_bwd = standins.varlen_fwd, standins.varlen_bwd  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", compiled)
    before = set(sys.modules)
    layer = importlib.import_module("flash_attn.flash_attn_interface")
    monkeypatch.setattr(layer, "flash_attn_gpu", compiled)  # where the installed one was there first
    for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        function = getattr(layer, name)
        monkeypatch.setattr(layer, name, getattr(function, "_init_fn", function))  # an operator for CUDA only
    yield layer
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_flash_attn_2_s_own_python_layer(flash_attn: ModuleType) -> None:
    for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        entry = recorded()[f"flash_attn.flash_attn_interface.{name}"]
        assert_agrees(inspect.signature(getattr(flash_attn, name)), entry)
    for case in cases():
        assert_right(willing(flash2.BACKEND), case)


def rows(*strides: int, offset: int = 0, shape: tuple[int, int, int] = (1 << 20, 4, 64)) -> torch.Tensor:
    """A tensor that there is only on paper."""
    return torch.empty(1, device="meta", dtype=torch.bfloat16).as_strided(shape, strides, offset)


def test_rows_that_kernels_cannot_load_are_copied() -> None:
    for view in (rows(256, 64, 1), rows(2040, 72, 1), rows(64, 1 << 12, 1), rows(256, 64, 1, offset=8)):
        assert flash.loadable(view) is view
    wide = 9728  # of flash-attention #2611
    for view in (rows(256, 1, 4), rows(0, 0, 0), rows(256, 64, 1, offset=4), rows(260, 64, 1), rows(wide, 64, 1)):
        copy = flash.loadable(view)
        assert copy.stride() == (256, 64, 1)
        assert copy.storage_offset() == 0


def test_what_overflows_inside_a_library_is_refused() -> None:
    q = rows(256, 64, 1, shape=(1 << 22, 8, 64))
    few, many = (Segments.of_themselves(torch.zeros(count + 1, dtype=torch.int32), 1) for count in (2, 65536))
    with pytest.raises(
        NotImplementedError, match=r"rows · heads · head_dim is 2147483648, and it counts to 2147483647"
    ):
        flash.check_size("it", q, q[:5], few)
    with pytest.raises(NotImplementedError, match="2147483648"):
        flash.check_size("it", q[:5], q[:, :1], few)  # gradients of keys, one for each query head
    with pytest.raises(NotImplementedError, match=r"there are 65536 segments, and it takes 65535 at most"):
        flash.check_size("it", q[:5], q[:5], many)
    flash.check_size("it", q[:-1], q[:-1], few)
    with pytest.raises(NotImplementedError, match="segments"):
        flash3.forward(q[:5], q[:5], q[:5], many, Rule(True, None, 1.0))


def test_inputs_are_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_varlen", *LIBRARIES):
        backend, inputs = stand_in(monkeypatch, name), make_inputs(PACK, CPU, torch.bfloat16)
        tensors = (inputs.dout, inputs.q, inputs.k, inputs.v)
        copies = [x.clone() for x in tensors]
        rule = Rule(causal=True, window=None, scale=1.0)
        out, lse = backend.forward(inputs.q, inputs.k, inputs.v, inputs.segments, rule)
        copies += [out.clone(), lse.clone()]
        backend.backward(*tensors, out, lse, inputs.segments, rule)
        for x, copy in zip((*tensors, out, lse), copies, strict=True):
            assert torch.equal(x.nan_to_num(), copy.nan_to_num()), name
