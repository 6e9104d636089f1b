"""`seqmesh bench loss` on cases small enough to follow; its compiler is replaced, since it takes seconds a function."""

from __future__ import annotations

import pytest
import torch

from seqmesh.benchmarks import loss
from seqmesh.benchmarks.linear_losses import CANDIDATES, LOGITS, SEQMESH, TORCH, Case, available, extra_bytes, truth
from seqmesh.benchmarks.processes import measurable

SMALL = Case(300, 16, 500, "float32")


def test_all_candidates_compute_the_same_loss() -> None:
    inputs = SMALL.inputs()
    exact = truth(inputs)
    for name in filter(available, CANDIDATES):
        assert float(CANDIDATES[name](*inputs).detach()) == pytest.approx(exact, rel=1e-5)
    assert available(TORCH) == hasattr(torch.nn.functional, "linear_cross_entropy")


def test_ratios_are_of_ours_over_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "extra_bytes", lambda name, case: {SEQMESH: 2, LOGITS: 10}.get(name, 3) * 10**6)  # noqa: ARG005
    results = loss.compare_losses(SMALL, tuple(CANDIDATES), repeats=1)
    time, memory = results.ratios
    assert (time.figure, memory.figure) == ("loss_time", "loss_memory")
    assert memory.value == (0.2 if measurable() else None)
    ours, theirs = results.rows[:2]
    assert ours.value is not None
    assert theirs.value is not None
    assert time.value == ours.value / theirs.value
    assert ours.counts["off_ppm"] < 10


def test_compiled_functions_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "compiled", lambda function: function)
    results = loss.compare_fused(8, 64, repeats=1)
    assert [ratio.figure for ratio in results.ratios] == ["fused_rms_norm", "fused_swiglu", "fused_rotary"]
    assert [row.candidate for row in results.rows] == ["eager", "compiled"] * 3
    monkeypatch.setattr(loss, "compiled", lambda function: lambda *arguments: 2 * function(*arguments))
    with pytest.raises(AssertionError, match="rms_norm: compiled gradients differ"):
        loss.compare_fused(8, 64, repeats=1)


@pytest.mark.skipif(not measurable(), reason="needs Linux's account of a process's memory")
def test_memory_is_that_of_one_step_in_a_fresh_process() -> None:
    """1,024 × 8,192 logits are 34 MB, of which the plain formula holds three; ours one of 256 rows, and gradients."""
    case = Case(1_024, 32, 8_192, "float32")
    ours, plain = extra_bytes(SEQMESH, case), extra_bytes(LOGITS, case)
    assert plain > 2 * 34e6
    assert 8e6 < ours < 20e6
