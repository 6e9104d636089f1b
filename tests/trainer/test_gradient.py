"""The gradient of a step is that of one process running document by document, whatever the plan and the ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.distributed.tensor import DTensor

from seqmesh.kernels.layout import Layout, Traffic
from seqmesh.kernels.loss import cross_entropy_sum
from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.packer.pieces import rows_sent
from seqmesh.trainer.model import ModelConfig, Transformer
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.replica import make_replica
from seqmesh.trainer.step import EXTRA, accumulate
from tests.ranks import run_ranks
from tests.support import documents_of, make_set, settings_for

CONFIG = ModelConfig(vocab_size=50, width=16, layers=2, heads=4, kv_heads=2, init_std=0.2)
STEPS = 2


def model_in_float64(config: ModelConfig = CONFIG) -> Transformer:
    torch.set_num_threads(1)
    return Transformer(config, seed=0).double()


def gradient_on_rank(ranks: Ranks, settings: LoaderSettings) -> tuple[list[npt.NDArray[np.float64]], list[int], int]:
    """Reduced gradients of the first steps, without updates, this rank's number of micro-batches in each, and the bytes
    it sent for rings."""
    traffic = Traffic()
    model = model_in_float64()
    replica = make_replica(model, ranks, settings.mode, extra=EXTRA)
    gradients: list[npt.NDArray[np.float64]] = []
    counts = [0]
    with Loader(settings, rank=ranks.rank, mode="inline") as loader:
        for batch in loader:
            accumulate(model, batch, replica, settings.capacity, traffic)
            counts[-1] += batch.tokens > 0
            if batch.last_in_step:
                replica.reduce_()
                gradients.append(whole_gradient(model))
                assert abs(replica.norm() - np.linalg.norm(gradients[-1])) < 1e-12
                replica.zero_()
                if len(gradients) == STEPS:
                    break
                counts.append(0)
    return gradients, counts, traffic.sent


def whole_gradient(model: Transformer) -> npt.NDArray[np.float64]:
    parts = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        parts.append(gradient.numpy().ravel().copy())
    return np.concatenate(parts)


def reference_gradients(
    lengths: list[int], settings: LoaderSettings, config: ModelConfig = CONFIG, *, steps: int = STEPS
) -> list[npt.NDArray[np.float64]]:
    """One process, one document at a time, mean over the step's labelled tokens."""
    documents = documents_of(lengths, vocab=config.vocab_size)
    feed, model = Feed(settings), model_in_float64(config)
    gradients, state = [], feed.start
    for _ in range(steps):
        step = feed.step(state)
        assert step is not None
        state = step.after
        model.zero_grad()
        taken = [documents[d] for d in step.documents.document.tolist()]
        labelled = sum(len(document) - 1 for document in taken)
        for document in taken:
            ids = torch.from_numpy(document)
            labels = torch.cat([ids[1:], torch.tensor([-100])])
            layout = Layout(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
            loss, _ = cross_entropy_sum(model(ids, torch.arange(len(ids)), layout), labels)
            torch.autograd.backward(loss / labelled)
        gradients.append(np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None]))
    return gradients


def relative_error(found: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    # One long document outweighs all others: its rank runs one micro-batch, the others several.
    "uneven": ([60, *[7] * 80, 3, 1, 2], {"capacity": 60, "tokens_per_step": 260, "cost": CostModel(quadratic=8)}),
    # Fewer documents than ranks: somebody has none.
    "empty_rank": ([20, 9], {"capacity": 20, "tokens_per_step": 20}),
}
# Lengths that nothing divides, rings of 2 to 4, several in one wave and one after the other, short documents between.
RINGS = [53, 31, 23, 5, 37, 1, 2, 19, 41, 3, 7, 13, 29, 11, 17, 43]


def check_gradients(lengths: list[int], settings: LoaderSettings) -> tuple[list[list[int]], int]:
    """Every rank's gradient is the reference's; returns each rank's numbers of micro-batches, and all bytes sent."""
    expected = reference_gradients(lengths, settings)
    results = run_ranks(gradient_on_rank, settings.ranks, settings)
    for gradients, _, _ in results:
        for found, wanted in zip(gradients, expected, strict=True):
            assert relative_error(found, wanted) <= 1e-9
    return [counts for _, counts, _ in results], sum(sent for _, _, sent in results)


@pytest.mark.parametrize("mode", ["free", "waves"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("case", sorted(CASES))
def test_gradient_equals_one_process_document_by_document(tmp_path: Path, case: str, count: int, mode: str) -> None:
    lengths, changes = CASES[case]
    data = make_set(tmp_path, lengths, vocab=CONFIG.vocab_size)
    settings = settings_for(data, ranks=count, shuffle=False, epochs=None, mode=mode, **changes)
    counts, sent = check_gradients(lengths, settings)
    assert sent == 0
    if count > 1 and (mode == "free" or case == "empty_rank"):
        assert len({tuple(c) for c in counts}) > 1  # the ranks do differ
        assert (0 in [c[0] for c in counts]) == (case == "empty_rank")


@pytest.mark.parametrize("pad_to", [7, 28])
def test_padding_leaves_the_gradient_alone(tmp_path: Path, pad_to: int) -> None:
    """Rings, documents that are whole, and ranks without any, in batches filled up with rows of no document."""
    data = make_set(tmp_path, RINGS, vocab=CONFIG.vocab_size)
    settings = settings_for(data, ranks=2, capacity=28, max_document=53, mode="waves", shuffle=False, pad_to=pad_to)
    check_gradients(RINGS, settings)


@pytest.mark.parametrize("mode", ["free", "waves"])
@pytest.mark.parametrize(("count", "capacity", "widest"), [(2, 28, 2), (3, 20, 3), (4, 15, 4), (4, 31, 2)])
def test_gradient_with_rings_equals_one_process(
    tmp_path: Path, count: int, capacity: int, widest: int, mode: str
) -> None:
    data = make_set(tmp_path, RINGS, vocab=CONFIG.vocab_size)
    cost = CostModel(linear=20, quadratic=2)
    settings = settings_for(
        data, ranks=count, capacity=capacity, max_document=53, tokens_per_step=160, shuffle=False, mode=mode, cost=cost
    )
    feed = Feed(settings)
    state, rows, rings = feed.start, 0, []
    for _ in range(STEPS):
        step = feed.step(state)
        assert step is not None
        state, sizes = step.after, np.diff(step.plan.ring_offsets)
        rings += [size for size in sizes.tolist() if size > 1]
        rows += int(rows_sent(step.plan.lengths, sizes).sum())
    assert max(rings) == widest
    assert len(rings) >= 2
    _, sent = check_gradients(RINGS, settings)
    # Forward keys and values, backward the same again and their gradients, all in float64.
    assert sent == rows * CONFIG.layers * 2 * CONFIG.kv_heads * CONFIG.head_dim * 8 * 3


def test_all_ranks_have_the_same_bits(tmp_path: Path) -> None:
    settings = settings_for(make_set(tmp_path, [30, *[7] * 20], vocab=50), ranks=3, epochs=None)
    results = run_ranks(gradient_on_rank, 3, settings)
    for step in range(STEPS):
        assert len({result[0][step].tobytes() for result in results}) == 1
