"""Compiled twins: the plain functions' results at any size, in one graph, and never the plain function in secret.

One compilation of all of them together, since each takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.activation import geglu, swiglu
from seqmesh.kernels.fuse import compiled
from seqmesh.kernels.norm import add_rms_norm, layer_norm
from seqmesh.kernels.rotary import apply_rotary
from tests.kernels.reference import relative_error

WIDTH = 16


def chain(x: Tensor, residual: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Norms, activations and rotary embedding, each fed by the one before."""
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    gated = geglu(swiglu(normed, total), layer_norm(total, weight, None, 1e-5), tanh=True)
    return apply_rotary(gated.view(len(x), 2, WIDTH // 2), cos, sin)


def unbroken(x: Tensor) -> Tensor:
    print("a graph cannot hold this")
    return x + 1


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the compiler writes is in a temporary folder, it starts no processes, and does not look for vector units."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    quick = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(quick):
        yield
    torch.compiler.reset()


@pytest.mark.usefixtures("scratch")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in importing its compiler
def test_it_equals_the_plain_function_at_two_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    twin = compiled(chain)
    assert compiled(chain) is twin
    before = graphs_made()
    for rows in (5, 12):
        shapes = [(rows, WIDTH), (rows, WIDTH), (WIDTH,), (rows, WIDTH // 4), (rows, WIDTH // 4)]
        given = [torch.randn(shape, generator=generator) for shape in shapes]
        found = []
        for function in (chain, twin):
            inputs = [x.clone().requires_grad_() for x in given[:3]]
            out = function(*inputs, *given[3:])
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
        assert all(relative_error(got, want) <= 1e-5 for want, got in zip(*found, strict=True))
    assert graphs_made() == before + 1


def graphs_made() -> int:
    made: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return made


@pytest.mark.usefixtures("scratch")
def test_it_never_runs_the_plain_function_instead() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(unbroken)(torch.ones(2))
    with torch._dynamo.config.patch(disable=True), pytest.raises(RuntimeError, match="compilation is switched off"):
        compiled(chain)
