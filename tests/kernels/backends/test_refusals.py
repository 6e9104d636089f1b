"""What back ends for GPUs say they cannot do, on machines that are made up."""

from dataclasses import replace
from importlib import metadata

import pytest
import torch

from seqmesh.kernels.backends import flash, flash2, flash3, flash4, flex, torch_varlen
from seqmesh.kernels.backends.base import Request

BACKENDS = {
    "torch_varlen": torch_varlen.BACKEND,
    "flash2": flash2.BACKEND,
    "flash3": flash3.BACKEND,
    "flash4": flash4.BACKEND,
    "flex": flex.BACKEND,
}
FLASH = ("torch_varlen", "flash2", "flash3", "flash4")
REQUEST = Request(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    heads=8,
    kv_heads=2,
    head_dim=128,
    causal=True,
    window=None,
    rings=False,
    gradient=True,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One H100, every library installed."""
    monkeypatch.setattr(flash, "_spec", lambda _: object())
    monkeypatch.setattr(flash, "version", {"flash-attn": "2.8.3.post1", "flash-attn-4": "4.0.0b27"}.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    use(monkeypatch, 9, 0)
    return monkeypatch


def use(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def refusals(request: Request) -> dict[str, str]:
    reasons = {name: backend.refusal(request) for name, backend in BACKENDS.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


@pytest.mark.usefixtures("machine")
def test_what_a_hopper_machine_can_do() -> None:
    assert refusals(REQUEST) == {}
    assert refusals(replace(REQUEST, window=5, causal=False, dtype=torch.float16, head_dim=256)) == {}
    assert refusals(replace(REQUEST, rings=True)) == {"flex": "its gradients cannot take the log-sum-exp of a ring"}


@pytest.mark.parametrize(
    ("capability", "refusing"),
    [
        ((7, 5), {*FLASH, "flex"}),
        ((8, 0), {"flash3", "flash4"}),
        ((9, 0), set()),
        ((10, 0), {"flash3"}),
        ((11, 0), {"flash3"}),
        ((12, 0), {"flash3", "flash4"}),
        ((13, 0), {*FLASH, "flex"}),  # nobody has seen one
    ],
)
def test_compute_capability(machine: pytest.MonkeyPatch, capability: tuple[int, int], refusing: set[str]) -> None:
    use(machine, *capability)
    reasons = refusals(REQUEST)
    assert reasons.keys() == refusing
    said = ".".join(map(str, capability))
    assert all(reason.startswith(f"the device has compute capability {said}: must be ") for reason in reasons.values())


@pytest.mark.usefixtures("machine")
def test_dtypes_and_head_widths() -> None:
    assert refusals(replace(REQUEST, dtype=torch.float32)).keys() == set(FLASH)
    assert refusals(replace(REQUEST, dtype=torch.float64)).keys() == BACKENDS.keys()
    for width in (4, 20, 264):
        assert refusals(replace(REQUEST, head_dim=width)).keys() >= set(FLASH)
    assert refusals(replace(REQUEST, head_dim=8)).keys() == {"flex"}
    assert "head_dim is 20: must be a multiple of 8, from 8 to 256" in refusals(replace(REQUEST, head_dim=20))["flash2"]


def test_head_widths_of_flash4_on_blackwell(machine: pytest.MonkeyPatch) -> None:
    assert "flash4" not in refusals(replace(REQUEST, head_dim=192))
    use(machine, 10, 0)
    assert refusals(replace(REQUEST, head_dim=192))["flash4"] == (
        "head_dim is 192: must be at most 128, or 256, on this device"
    )
    assert "flash4" not in refusals(replace(REQUEST, head_dim=256))
    assert refusals(replace(REQUEST, head_dim=256, window=5))["flash4"].startswith("window is 5: there is none")


def test_deterministic_gradients_of_flash3(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    wide = replace(REQUEST, head_dim=256)
    assert refusals(wide) == {"flash3": "head_dim is 256: flash-attn 3 has deterministic gradients up to 192 only"}
    assert refusals(replace(wide, gradient=False)) == {}


def test_versions(machine: pytest.MonkeyPatch) -> None:
    old = {"flash-attn": "2.6.3", "flash-attn-4": "4.0.0b13"}
    machine.setattr(flash, "version", old.__getitem__)
    assert refusals(REQUEST) == {
        "flash2": "flash-attn 2 is 2.6.3: must be 2.7 or later",
        "flash4": "flash-attn 4 is 4.0.0b13: must be 4.0.0b14 or later",
    }
    for new in ("4.0.0b14", "4.0.0", "4.1+cu13"):
        machine.setattr(flash, "version", {"flash-attn": "2.7.4", "flash-attn-4": new}.__getitem__)
        assert refusals(REQUEST) == {}

    def nobody_knows(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    machine.setattr(flash, "version", nobody_knows)
    assert refusals(REQUEST) == {}


def test_builds_of_torch(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert refusals(REQUEST) == {"torch_varlen": "this build of torch has no flash attention"}
    machine.setattr(torch.version, "hip", "6.4")
    assert set(refusals(REQUEST).values()) == {
        "this build of torch is for ROCm, on which this back end was never tried"
    }
    machine.setattr(torch.cuda, "is_available", lambda: False)
    assert set(refusals(REQUEST).values()) == {"torch finds no CUDA device"}
