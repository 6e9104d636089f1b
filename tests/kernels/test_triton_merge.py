"""The merging kernel, in Triton's interpreter, which has to be asked for before Triton is imported."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from seqmesh.kernels.merge import merge, merge_


def parts(rows: int, heads: int, width: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """(out, lse, part, part_lse): views into larger tensors, rows that saw nothing in one or both, either mark."""
    generator = torch.Generator().manual_seed(seed)
    out, part = torch.randn(2, rows + 3, heads, width * 2, generator=generator)[:, 2 : rows + 2, :, ::2]
    lse, part_lse = torch.randn(2, heads, rows + 3, generator=generator)[:, :, 1 : rows + 1] * 40
    for mark in (-torch.inf, torch.inf):
        for each in (lse, part_lse):
            each.masked_fill_(torch.rand(each.shape, generator=generator) < 0.2, mark)
    return out, lse, part.to(dtype), part_lse


def compare_with_torch() -> None:
    """Called in a process of its own, where TRITON_INTERPRET is set."""
    from seqmesh.kernels import triton_merge

    for seed, (rows, heads, width, dtype) in enumerate(
        [(37, 3, 24, torch.float32), (1, 1, 128, torch.float16), (0, 2, 8, torch.float32), (33, 2, 1, torch.bfloat16)]
    ):
        out, lse, part, part_lse = parts(rows, heads, width, dtype, seed)
        expected, expected_lse = merge(out, lse, part, part_lse)
        triton_merge.merge_(out, lse, part, part_lse)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    print("equal")


def test_the_kernel_is_the_formula() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    code = "from tests.kernels.test_triton_merge import compare_with_torch as run; run()"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


def test_in_place_is_the_same() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        out, lse, part, part_lse = parts(9, 2, 8, dtype, 7)
        expected, expected_lse = merge(out, lse, part, part_lse)
        merge_(out, lse, part, part_lse)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
