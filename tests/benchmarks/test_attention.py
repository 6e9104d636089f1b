"""The attention benchmark: baselines agree, figures follow from their rows, ranks send what the formula says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from seqmesh.benchmarks import attention_ranks
from seqmesh.benchmarks.attention import DENSE, FLEX, FULL, LOOP, ROOF, SEQMESH, Size, measure_pack, measure_window
from seqmesh.benchmarks.attention_cases import (
    Pack,
    forward_backward,
    ours,
    packs,
    random_rows,
    short_documents,
    tail_documents,
)
from seqmesh.benchmarks.attention_errors import NAMES, errors, relative_error
from seqmesh.benchmarks.attention_rank import measure
from seqmesh.benchmarks.attention_ranks import HALO, QUICK, RING, Answer, Job, comparisons, timings, turns
from seqmesh.benchmarks.baselines.attention import BLOCK, _blocks, _documents, dense, loop
from seqmesh.benchmarks.harness import Results
from seqmesh.trainer.parallel import Ranks
from tests.ranks import run_ranks

LENGTHS = [5, 0, 1, 40, 18]
SMALL = Size(repeats=1, window=8, windowed=64, masked=128, flex=0, compared=0, steps=0)


def figures(results: Results) -> dict[str, list[float | None]]:
    names = {each.figure for each in results.ratios}
    return {name: [each.value for each in results.ratios if each.figure == name] for name in names}


@pytest.mark.parametrize("window", [None, 7])
def test_baselines_compute_the_same(window: int | None) -> None:
    rows = random_rows(sum(LENGTHS), torch.float64, heads=2, width=4)
    expected = forward_backward(dense(LENGTHS, window), rows)
    for attend in (ours(LENGTHS, window), *((loop(LENGTHS),) if window is None else ())):
        for got, right in zip(forward_backward(attend, rows), expected, strict=True):
            assert relative_error(got, right, right) < 1e-13


def test_blocks_that_nothing_falls_into_are_left_out_and_no_other() -> None:
    """The mask of FlexAttention, which is not compiled here, beside the one that is filled in."""
    lengths = [100, 28, 300, 500, 1, 95]
    document = _documents(lengths)
    rows = torch.arange(len(document))
    seen = (document.unsqueeze(1) == document) & (rows.unsqueeze(1) >= rows)
    tiles = seen.view(len(rows) // BLOCK, BLOCK, len(rows) // BLOCK, BLOCK).transpose(1, 2)
    partly, whole = _blocks(document)
    assert torch.equal(whole, tiles.all(dim=3).all(dim=2))
    assert torch.equal(partly | whole, tiles.any(dim=3).any(dim=2))


def test_packs_are_what_their_names_say() -> None:
    assert short_documents(8_192, 272).sum() == 8_192
    assert len(short_documents(8_192, 272)) == 272
    assert tail_documents(4_096, seed=1).sum() == 4_096
    for pack in (*packs(quick=True), *packs(quick=False)):
        assert pack.tokens % BLOCK == 0
        assert min(pack.lengths) >= 1
    assert Pack(name="", lengths=(3, 2)).flops(backward=False) == 4 * 8 * 64 * (6 + 3)
    assert Pack(name="", lengths=(3, 2)).flops(2, backward=True) == 3.5 * 4 * 8 * 64 * (5 + 3)


def test_a_pack_is_measured_beside_every_candidate() -> None:
    results = measure_pack(Pack(name="small", lengths=(100, 28)), SMALL, flex=False)
    rows = {row.name: row for row in results.rows}
    assert {row.candidate for row in results.rows} == {SEQMESH, LOOP, DENSE, FLEX, ROOF}
    assert rows[f"small, float32, forward/{FLEX}"].note == "not compiled for this pack"
    found = figures(results)
    assert found["attention_vs_flex"] == [None, None]
    for name, other in {"attention_vs_loop": LOOP, "attention_vs_dense": DENSE, "attention_of_roof": ROOF}.items():
        mine, beside = (rows[f"small, float32, forward+backward/{each}"].value for each in (SEQMESH, other))
        assert mine is not None
        assert beside is not None
        assert found[name][1] == mine / beside


def test_masks_of_large_packs_are_left_out() -> None:
    size = replace(SMALL, masked=127)
    rows = {row.candidate: row for row in measure_pack(Pack(name="", lengths=(128,)), size, flex=False).rows}
    assert rows[DENSE].value is None
    assert rows[DENSE].note == "a mask of so many tokens takes too long"


def test_a_window_is_measured_beside_full_attention() -> None:
    results = measure_window(SMALL)
    assert {row.candidate for row in results.rows} == {SEQMESH, FULL, LOOP, DENSE}
    assert len(figures(results)["window_vs_full"]) == 2


def test_errors_are_those_of_the_dtype() -> None:
    by_case = {row.case: row for row in errors(256).rows if row.candidate == SEQMESH}
    assert len(by_case) == 2
    for case, row in by_case.items():
        assert row.value == max(row.counts[name] for name in NAMES)
        assert 0 < row.value < (3e-6 if "float32" in case else 2e-2)


def asked(ranks: Ranks, job: Job) -> Answer:
    return measure(job, ranks)


def test_ranks_send_what_the_formula_says_and_compute_the_same() -> None:
    size = replace(QUICK, capacity=96, long=400)
    job = Job(turns=turns(2, size), repeats=1, compared=61)
    assert any(wave.rings for turn in job.turns if turn.name == RING for wave in turn.waves)
    answers = run_ranks(asked, 2, job)
    assert answers[0] == answers[1]
    found = figures(timings("case", job, answers[0]))  # raises where bytes differ
    assert found["halo_vs_ring"] == [126 / 300]
    for row in comparisons(job, answers[0]).rows:
        assert row.value is not None
        assert row.value < (1e-12 if "float64" in row.case else 3e-6)
    wrong = replace(answers[0], sent={**answers[0].sent, HALO: 1})
    with pytest.raises(RuntimeError, match="case, long, window 64: 1 bytes were sent"):
        timings("case", job, wrong)


def test_every_document_of_the_step_is_held_once() -> None:
    lengths = np.array([700, 90, 1_500, 30, 12])
    waves = attention_ranks.planned(lengths, 3, 800)
    held = [n for wave in waves for n, _ in wave.rings] + [n for wave in waves for each in wave.whole for n in each]
    assert sorted(held) == sorted(lengths.tolist())
