"""A back end that cannot mask documents here, asked for by name: refused with the reason, never plain causal attention.

Frameworks fell back on whatever attention was left when the library for packed documents was missing, and every
document then attended to the ones before it in its row, without a word.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqmesh.kernels.backends import flash2, flash3, flash4, flex, reference, torch_varlen
from seqmesh.kernels.backends.base import Request

FLASH = {"torch_varlen": torch_varlen, "flash2": flash2, "flash3": flash3, "flash4": flash4}
MODULES = {"flash2": "flash_attn.flash_attn_interface", "flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
PACKED = Request(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    heads=4,
    kv_heads=2,
    head_dim=64,
    causal=True,
    window=None,
    rings=False,
    gradient=True,
)


@pytest.mark.parametrize("name", FLASH)
def test_a_gpu_back_end_named_on_a_machine_without_one(name: str) -> None:
    reason = FLASH[name].BACKEND.refusal(PACKED)
    assert reason == "tensors are on cpu, this back end runs on CUDA"


def test_a_back_end_without_gradients_named_for_training() -> None:
    assert flex.BACKEND.refusal(PACKED) == "it has no gradients on the CPU"


@pytest.mark.parametrize("name", MODULES)
def test_a_library_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])  # nothing is
    reason = FLASH[name].BACKEND.refusal(replace(PACKED, device=torch.device("cuda")))
    number = name.removeprefix("flash")
    assert reason is not None
    assert reason.startswith(f"flash-attn {number} is not installed (there is no module {MODULES[name]}")


def test_a_part_of_a_library_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2 and 4 share a folder: one without the other is seen as such, and nothing is imported to see it."""
    (tmp_path / "flash_attn").mkdir()
    for module in ("__init__", "flash_attn_interface"):
        (tmp_path / "flash_attn" / f"{module}.py").write_text("raise SystemExit('was imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    request = replace(PACKED, device=torch.device("cuda"))
    assert (
        flash4.BACKEND.refusal(request)
        == "flash-attn 4 is not installed (there is no module flash_attn.cute.interface)"
    )
    assert flash2.BACKEND.refusal(request) == "flash-attn 2 is not installed (there is no module flash_attn_2_cuda)"
    assert "flash_attn" not in sys.modules


def test_the_formula_by_name_takes_anything() -> None:
    for request in (PACKED, replace(PACKED, window=3, rings=True, causal=False, dtype=torch.float64, head_dim=20)):
        assert reference.BACKEND.refusal(request) is None
