"""Loss curves: the plain model computes what the trainer's does, and curves of other batches are no curves to compare.
No job is run here."""

from pathlib import Path

import pytest
import torch

from seqmesh.benchmarks.baselines.plain import PlainModel, packed, padded, rows_of
from seqmesh.benchmarks.curves import PADDED, WARM_UP_STEPS, Curve, compare, draw
from seqmesh.benchmarks.hybrid import FREE
from seqmesh.kernels.layout import Layout
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=50, width=16, layers=2, heads=4, kv_heads=2, init_std=0.2)


@pytest.mark.parametrize("batch_of", [padded, packed])
def test_the_plain_model_is_the_trainers(batch_of: object) -> None:
    ours, plain = Transformer(CONFIG, seed=0).double(), PlainModel(CONFIG).double()
    plain.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(50, (n,), generator=generator) for n in (7, 1, 12, 3)]
    expected = 0.0
    for ids in documents:
        labels = torch.cat([ids[1:], torch.tensor([-100])])
        layout = Layout(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        loss, _ = ours(ids, torch.arange(len(ids)), layout, labels)
        expected += float(loss.detach())
    found = plain(*(padded if batch_of is padded else packed)(documents))
    assert float(found.detach()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("pad", [True, False])
def test_rows_hold_every_document_once_and_no_more_than_asked_unless_one_is_longer(pad: bool) -> None:
    documents = [torch.full((n,), n) for n in (3, 9, 1, 4, 20, 2, 2, 6)]
    rows = rows_of(documents, 10, pad=pad)
    assert sorted(len(document) for row in rows for document in row) == [1, 2, 2, 3, 4, 6, 9, 20]
    for row in rows:
        assert len(row) == 1 or (len(row) * max(map(len, row)) if pad else sum(map(len, row))) <= 10


def curve(shift: float = 0.0, tokens: int = 100) -> Curve:
    steps = range(WARM_UP_STEPS + 4)
    return Curve(
        losses=[5.0 - 0.1 * n + shift for n in steps], seconds=[0.5] * len(steps), tokens=[tokens] * len(steps)
    )


def test_curves_are_compared_step_by_step(tmp_path: Path) -> None:
    curves = {FREE: curve(), PADDED: curve(0.01)}
    results = compare(curves)
    losses = {each.candidate: each for each in results.rows if each.unit == "nats"}
    assert losses[FREE].counts["furthest_from_free"] == 0
    assert losses[PADDED].counts["furthest_from_free"] == pytest.approx(0.01 / 4.4)
    assert {each.figure: each.value for each in results.ratios} == {"rate_free_vs_padded": 1.0}
    draw(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RuntimeError, match="padded: trained on other global batches"):
        compare({FREE: curve(), PADDED: curve(tokens=99)})
