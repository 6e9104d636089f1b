"""Back ends on FlashAttention libraries, over stand-ins that read arguments as the libraries do."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from seqmesh.kernels.backends import flash2, flash3, flash4, torch_varlen
from seqmesh.kernels.backends.base import Backend
from seqmesh.tools.kernel_cases import TOLERANCES, Case, cases, compare
from tests.kernels.signatures import standins

SOURCE = "SEQMESH_FLASH_ATTN_SOURCE"  # a folder that holds flash_attn/, of the release to be checked
LIBRARIES = {
    "flash2": (flash2, "flash_attn.flash_attn_interface"),
    "flash3": (flash3, "flash_attn_interface"),
    "flash4": (flash4, "flash_attn.cute.interface"),
}
CPU = torch.device("cpu")


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


def assert_right(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    errors = compare(backend, case, CPU, dtype)
    assert len(errors) == 5
    assert max(errors.values()) <= TOLERANCES[dtype], (case, errors)


@pytest.mark.parametrize("name", ["torch_varlen", *LIBRARIES])
def test_every_case_by_the_library_s_own_semantics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = stand_in(monkeypatch, name)
    for case in cases():
        assert_right(backend, case, torch.bfloat16)
