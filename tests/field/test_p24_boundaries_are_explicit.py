"""Boundaries are a field of their own: nothing guesses them from positions, and documents do not leak."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout
from seqmesh.loader.embedded import Loader
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from tests.kernels.reference import reference_attention, relative_error
from tests.support import documents_of, make_set, settings_for

CONFIG = ModelConfig(vocab_size=50, width=16, layers=2, heads=2, kv_heads=1, init_std=0.3)


def layout(*bounds: int) -> Layout:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return Layout(cu_seqlens, int(cu_seqlens.diff().max()))


def run(model: Transformer, ids: Tensor, positions: list[int], packed: Layout) -> Tensor:
    logits: Tensor = model(ids, torch.tensor(positions, dtype=torch.int32), packed)
    return logits.detach()


@pytest.fixture
def model() -> Transformer:
    return Transformer(CONFIG, seed=0).double()


def test_padding_is_not_a_run_of_one_token_documents(model: Transformer) -> None:
    """Counting zeros reads five documents here; there are two, and three rows of padding."""
    positions, packed = [0, 1, 2, 0, 1, 0, 0, 0], layout(0, 3, 5)
    ids = torch.arange(8)
    got = run(model, ids, positions, packed)
    assert relative_error(got[:3], run(model, ids[:3], [0, 1, 2], layout(0, 3))) <= 1e-12
    assert relative_error(got[3:5], run(model, ids[3:5], [0, 1], layout(0, 2))) <= 1e-12
    rows = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not varlen_attention(rows, rows, rows, packed)[5:].any()  # a document of one token would return its row


def test_positions_that_start_at_two_keep_their_documents(model: Transformer) -> None:
    """Looking for zeros finds no document here; rotary embedding is relative, so the outputs are those from zero."""
    ids, packed = torch.arange(6), layout(0, 3, 5, 6)
    got = run(model, ids, [2, 3, 4, 2, 3, 2], packed)
    assert relative_error(got, run(model, ids, [0, 1, 2, 0, 1, 0], packed)) <= 1e-12
    assert relative_error(got[3:5], run(model, ids[3:5], [0, 1], layout(0, 2))) <= 1e-12


def test_each_pack_keeps_its_own_boundaries(model: Transformer) -> None:
    ids, positions = torch.arange(6), [0, 1, 2, 3, 4, 5]
    one, two = run(model, ids, positions, layout(0, 2, 6)), run(model, ids, positions, layout(0, 4, 6))
    assert relative_error(one[:2], two[:2]) <= 1e-12  # these rows see the same tokens in both
    for row in range(2, 6):
        assert relative_error(one[row], two[row]) > 1e-3
    again = run(model, ids, positions, layout(0, 2, 6))
    assert torch.equal(one, again)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_token_of_document_one_touches_document_two(model: Transformer, dtype: torch.dtype) -> None:
    model.to(dtype)
    ids, positions, packed = torch.arange(8), [0, 1, 2, 0, 1, 0, 0, 0], layout(0, 3, 5)
    before = run(model, ids, positions, packed)
    for token in range(3):
        changed = ids.clone()
        changed[token] = 40
        after = run(model, changed, positions, packed)
        assert torch.equal(after[3:], before[3:])
        assert not torch.equal(after[token:3], before[token:3])


def test_packed_attention_is_separate_attention_and_not_plain_causal() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 5, 2, 4, generator=generator, dtype=torch.float64)
    packed = varlen_attention(q, k, v, layout(0, 3, 5))
    first = varlen_attention(q[:3], k[:3], v[:3], layout(0, 3))
    second = varlen_attention(q[3:], k[3:], v[3:], layout(0, 2))
    assert torch.equal(packed, torch.cat((first, second)))
    plain = reference_attention((q, k, v), [5], causal=True, scale=0.5)
    assert relative_error(packed, plain) > 0.1


def test_boundaries_come_from_the_packer(model: Transformer, tmp_path: Path) -> None:
    """Two packs from the loader, each with its own boundaries; outputs are those of the documents alone."""
    data = make_set(tmp_path, [3, 2, 4], vocab=CONFIG.vocab_size)
    documents = documents_of([3, 2, 4], vocab=CONFIG.vocab_size)
    with Loader(settings_for(data, capacity=5, shuffle=False), rank=0, mode="inline") as loader:
        batches = list(loader)
    assert sorted(batch.cu_seqlens.tolist() for batch in batches) == [[0, 3, 5], [0, 4]]
    assert all(batch.pad == 0 for batch in batches)
    for batch in batches:
        logits = run(model, batch.input_ids, batch.position_ids.tolist(), Layout(batch.cu_seqlens, batch.max_seqlen))
        for i, document in enumerate(batch.document_ids.tolist()):
            ids = torch.from_numpy(documents[document])
            alone = run(model, ids, list(range(len(ids))), layout(0, len(ids)))
            assert relative_error(logits[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]], alone) <= 1e-12
