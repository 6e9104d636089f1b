"""What Liger is called with, against its recorded signature and, where it is installed, its own; on a stand-in that
makes gradients in forward as it does. The numbers need CUDA."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from seqmesh.kernels import liger, loss
from seqmesh.kernels.loss import UNSUPERVISED, linear_cross_entropy_sum
from tests.kernels.reference import relative_error
from tests.kernels.signatures.liger import SIGNATURES

NAME = "liger_fused_linear_cross_entropy"


def declared(parameters: tuple[str, ...]) -> inspect.Signature:
    """The signature that a table's row describes."""
    space: dict[str, Any] = {}
    exec(f"def function({', '.join(parameters)}): ...", space)
    return inspect.signature(space["function"])


class StandIn(torch.autograd.Function):
    """The sum, with Liger's ways: no gradient unless rows want one, and what is wanted is made in forward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in (rows, weight)]
            total = functional.cross_entropy(given[0] @ given[1].T, targets, reduction="sum")
        drows, dweight = torch.autograd.grad(total, given)
        ctx.made = (drows if rows.requires_grad else None, dweight if rows.requires_grad else None)
        return total.detach()

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if x is None else x * dtotal for x in ctx.made), None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[inspect.BoundArguments]:
    """What a stand-in for the library was called with; on the CPU, where it is otherwise refused."""
    made: list[inspect.BoundArguments] = []

    def function(**arguments: Any) -> Tensor:
        made.append(declared(SIGNATURES[NAME]).bind(**arguments))
        given = arguments["input"], arguments["weight"], arguments["target"]
        total: Tensor = StandIn.apply(*given)  # type: ignore[no-untyped-call]
        return total

    names = ["liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    setattr(sys.modules[names[-1]], NAME, function)
    monkeypatch.setitem(loss.BACKENDS, "liger", (liger.linear_sum, lambda rows: None))  # noqa: ARG005
    return made


def test_the_call_asks_for_a_sum_of_supervised_rows(calls: list[inspect.BoundArguments]) -> None:
    hidden = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    hidden[1] = torch.nan  # its label is ignored: 0 · NaN in a product must not reach the weight's gradient
    weight = torch.ones(4, 3)
    labels = torch.tensor([0, UNSUPERVISED, 3, 2, UNSUPERVISED], dtype=torch.int32)
    for of_hidden, of_weight in ((True, True), (False, True), (True, False)):
        given = hidden.clone().requires_grad_(of_hidden), weight.clone().requires_grad_(of_weight)
        wanted = [x for x in given if x.requires_grad]
        found: list[list[Tensor]] = []
        for backend in ("auto", "chunked"):
            total, _ = linear_cross_entropy_sum(given[0], given[1], labels, backend=backend)
            found.append([total.detach(), *torch.autograd.grad(total * 0.3, wanted)])
        assert all(relative_error(a, b) <= 1e-6 for a, b in zip(*found, strict=True))
    for call in calls:
        call.apply_defaults()
        passed = call.arguments
        assert torch.equal(passed["target"], torch.tensor([0, 3, 2]))
        assert torch.isfinite(passed["input"]).all()
        assert (passed["reduction"], passed["accum_dtype"], passed["label_smoothing"]) == ("sum", torch.float32, 0.0)
        assert not passed["return_z_loss"]  # the result is then the loss alone
    assert len(calls) == 3
    with torch.no_grad():
        linear_cross_entropy_sum(hidden, weight.requires_grad_(), labels)
    assert not any(calls[-1].arguments[name].requires_grad for name in ("input", "weight"))


def test_nothing_supervised_does_not_call_it(calls: list[inspect.BoundArguments]) -> None:
    """It divides by the number of rows."""
    hidden, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    total, count = linear_cross_entropy_sum(hidden, weight, torch.full((2,), UNSUPERVISED))
    assert (float(total.detach()), int(count), calls) == (0.0, 0, [])
    assert not any(gradient.any() for gradient in torch.autograd.grad(total, (hidden, weight)))


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "find_spec", lambda name: None)  # noqa: ARG005
    on_cuda = torch.empty(0, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert liger.refusal(on_cuda) == "liger_kernel is not installed"
    assert liger.refusal(on_cuda.double()) == "dtype is torch.float64, liger computes in float32"


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger_kernel is not installed")
def test_the_recorded_signature_is_that_of_the_installed_library() -> None:
    from liger_kernel.transformers import functional as library

    function: Callable[..., Any] = getattr(library, NAME)
    installed = inspect.signature(function)
    installed.bind(input=None, weight=None, target=None, **liger.ARGUMENTS)
    assert list(installed.parameters)[: len(SIGNATURES[NAME])] == list(declared(SIGNATURES[NAME]).parameters)
