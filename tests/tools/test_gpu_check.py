"""`python -m seqmesh.tools.gpu_check`, on a machine without a GPU or as if it were."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from seqmesh.kernels.backends import reference
from seqmesh.kernels.backends.base import Backend, Rule, Segments
from seqmesh.tools import gpu_check
from seqmesh.tools.gpu_check import NO_GPU, Verdict, check, clock, flops, packs
from seqmesh.tools.kernel_cases import PARTS, Case, cases

CPU = torch.device("cpu")
PACK = cases()[0]
GOOD = reference.BACKEND


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def said(code: int, monkeypatch: pytest.MonkeyPatch, json_path: Path | None = None, **backends: Backend) -> str:
    monkeypatch.setattr(gpu_check, "BACKENDS", backends)
    console = Console(width=200, record=True, file=StringIO())
    assert gpu_check.run(json_path=json_path, quick=True, console=console) == code
    return console.export_text()


def test_without_a_gpu_it_says_so_and_checks_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = replace(GOOD, refusal=lambda _: "it is not installed")
    text = said(0, monkeypatch, tmp_path / "out.json", good=GOOD, missing=refusing)
    assert NO_GPU in text
    assert "missing, cpu, float64, float32, bfloat16, float16: it is not installed" in text
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["machine"]["gpu"] is None
    assert result["machine"]["packages"]["torch"] == torch.__version__
    assert [(each["backend"], each["dtype"]) for each in result["verdicts"][:5]] == [
        ("good", "float64"), ("good", "float32"), ("good", "bfloat16"), ("good", "float16"), ("missing", "float64"),
    ]  # fmt: skip
    good, *_, missing = result["verdicts"]
    assert good["right"] == sum(missing["refused"].values()) > 0
    assert set(good["errors"]) == set(PARTS)
    assert result["timings"] == []


def test_its_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "BACKENDS", {})
    assert gpu_check.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    assert NO_GPU in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--json", str(tmp_path / "nowhere" / "out.json")])
    assert "is no folder" in capsys.readouterr().err


def test_what_is_wrong_is_said_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(1, monkeypatch, crooked=altered(window=1), broken=altered(raises=RuntimeError("no such kernel")))
    assert "crooked, cpu, float32: pack, causal, window None: " in text
    assert "broken, cpu, bfloat16: pack, causal, window None: RuntimeError: no such kernel" in text


def altered(*, raises: Exception | None = None, **options: Any) -> Backend:
    """The formula, with other options than it was asked for."""

    def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
        if raises is not None:
            raise raises
        return GOOD.forward(q, k, v, segments, rule._replace(**options))

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        return GOOD.backward(dout, q, k, v, out, lse, segments, rule._replace(**options))

    return replace(GOOD, forward=forward, backward=backward)


def spoiled(part: str, value: float, row: int = -1) -> Backend:
    """The formula, with one value of one part changed."""

    def spoil(results: tuple[Tensor, ...], names: tuple[str, ...]) -> Any:
        for name, result in zip(names, results, strict=True):
            if name == part:
                (result.T if name == "lse" else result)[row].view(-1)[0] = value
        return results

    def forward(*tensors: Any, **given: Any) -> tuple[Tensor, Tensor]:
        out, lse = GOOD.forward(*tensors, **given)
        result: tuple[Tensor, Tensor] = spoil((out, lse), PARTS[:2])
        return result

    def backward(*tensors: Any, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = spoil(GOOD.backward(*tensors, **given), PARTS[2:])
        return result

    return replace(GOOD, forward=forward, backward=backward)


def verdict(backend: Backend, case: Case = PACK, dtype: torch.dtype = torch.float32) -> Verdict:
    return check("it", backend, CPU, dtype, [case])


@pytest.mark.parametrize("part", PARTS)
def test_one_wrong_value_is_found(part: str) -> None:
    """Past the last segment, where only exactly 0 and −inf will do; and in a row that sees keys."""
    for backend in (spoiled(part, 1e-30), spoiled(part, torch.nan), spoiled(part, 0.5, row=3)):
        assert verdict(backend).failures != []
    assert verdict(GOOD).failures == []


def test_gradients_in_rings_count_only_for_back_ends_that_take_part() -> None:
    """One that forgets what a row saw elsewhere is right by itself."""

    def backward(*tensors: Any, **mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, _, _, *bounds = tensors
        return GOOD.backward(dout, q, k, v, *GOOD.forward(q, k, v, *bounds, **mask), *bounds, **mask)

    forgetful = replace(GOOD, backward=backward)
    assert verdict(forgetful).failures != []
    alone = replace(forgetful, refusal=lambda request: "no rings" if request.rings else None)
    assert verdict(alone).failures == []


def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PACKS", {"one": (64,), "two": (32, 32)})
    monkeypatch.setattr(gpu_check, "REPEATS", 2)
    forward_only = replace(GOOD, refusal=lambda request: "none" if request.gradient else None)
    for backend in (GOOD, forward_only):
        timings = list(clock({"it": backend}, verdict(backend)))
        assert [each.pack for each in timings] == ["one", "two"]
        assert all(each.forward > 0 and (each.both is None) == (backend is forward_only) for each in timings)
    assert list(clock({"it": GOOD}, verdict(altered(window=1)))) == []
    assert [flops(case) for case in packs()] == [4 * 64 * 65 // 2 * 32 * 128, 4 * 2 * (32 * 33 // 2) * 32 * 128]
