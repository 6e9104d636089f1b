"""What other trainers get, against the documents themselves and against those trainers where they are installed."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from seqmesh.loader.adapters import megatron_batch, packed_seq_params, padding_free, torchtitan_batch
from seqmesh.loader.embedded import Loader
from seqmesh.loader.tensors import TorchBatch
from tests.support import documents_of, make_set, settings_for

LENGTHS = [1, 7, 2, 30, 3, 1, 12, 5, 26, 9, 4, 1]
ADAPTERS: list[Callable[[TorchBatch], Any]] = [padding_free, packed_seq_params, megatron_batch, torchtitan_batch]

# Of megatron.core.packed_seq_params.PackedSeqParams, release 0.16; the others, local_cp_size and cp_group, are of
# context parallelism.
MEGATRON_FIELDS = {
    "qkv_format",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "max_seqlen_q",
    "max_seqlen_kv",
}


def batches_of(folder: Path, **changes: Any) -> list[TorchBatch]:
    """All batches of one rank; the last step has an empty row."""
    rows = {"batching": "rows", "tokens_per_step": None, "rows_per_step": 4, "window": 5, "capacity": 32}
    with Loader(settings_for(make_set(folder, LENGTHS), **rows | changes), mode="inline") as loader:
        batches = list(loader)
    assert any(batch.tokens == 0 for batch in batches)
    return batches


def documents_in(ids: torch.Tensor, bounds: torch.Tensor) -> list[list[int]]:
    return [ids[a:b].tolist() for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


@pytest.mark.parametrize("pad_to", [None, 8])
def test_every_row_belongs_to_a_document_and_predicts_the_next(tmp_path: Path, pad_to: int | None) -> None:
    texts = [document.tolist() for document in documents_of(LENGTHS)]
    for batch in batches_of(tmp_path, pad_to=pad_to):
        given, fields = padding_free(batch), packed_seq_params(batch)
        megatron, (titan, titan_labels) = megatron_batch(batch), torchtitan_batch(batch)
        rows = max(len(batch.input_ids), 1)
        bounds = given["cu_seq_lens_q"]
        assert bounds.dtype == torch.int32 and bounds[-1] == rows
        assert fields["cu_seqlens_q"].tolist() == fields["cu_seqlens_kv"].tolist() == bounds.tolist()
        held = documents_in(given["input_ids"][0], bounds)
        count = len(batch.document_ids)
        assert held[:count] == [texts[number] for number in batch.document_ids.tolist()]
        assert len(held) == count + (rows > batch.tokens)
        expected = [[*text[1:], -100] for text in held[:count]] + [[-100] * (rows - batch.tokens)]
        shifted = [*given["labels"][0, 1:].tolist(), -100]
        assert shifted == titan_labels[0].tolist() == list(chain.from_iterable(expected))
        assert given["labels"][0, 0] == -100
        mask = megatron["loss_mask"][0]
        assert torch.where(mask == 1, megatron["labels"][0], -100).tolist() == shifted
        assert (megatron["labels"] >= 0).all()
        positions = given["position_ids"][0]
        assert positions.tolist() == list(chain.from_iterable(range(len(text)) for text in held))
        for other in (titan["positions"], megatron["position_ids"]):
            assert torch.equal(other[0], positions)
        for ids in (titan["input"], megatron["tokens"]):
            assert torch.equal(ids, given["input_ids"])
            assert ids.dtype == torch.int64
        longest = max(len(text) for text in held)
        assert [given["max_length_q"], given["max_length_k"], fields["max_seqlen_q"]] == [longest] * 3


def test_views_are_widened(tmp_path: Path) -> None:
    settings = settings_for(make_set(tmp_path, LENGTHS), capacity=64)
    with Loader(settings, mode="inline", views=True) as loader:
        (titan, labels) = torchtitan_batch(next(iter(loader)))
    assert {titan["input"].dtype, titan["positions"].dtype, labels.dtype} == {torch.int64}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_these_trainers_can_not_do_is_refused(tmp_path: Path, adapter: Callable[[TorchBatch], Any]) -> None:
    data = make_set(tmp_path, [100, 5, 6])
    spread = settings_for(data, ranks=2, capacity=64, max_document=100)
    with (
        Loader(spread, rank=1, mode="inline") as loader,
        pytest.raises(ValueError, match=r"step 0, wave 0: document 0 is spread over 2 ranks.*use batching 'rows'"),
    ):
        adapter(next(iter(loader)))
    bare = settings_for(data, capacity=128, fields=("position_ids",))
    with (
        Loader(bare, mode="inline") as loader,
        pytest.raises(ValueError, match="has no labels: the setting fields leaves them out"),
    ):
        adapter(next(iter(loader)))


def test_the_fields_are_megatrons(tmp_path: Path) -> None:
    (batch, *_) = batches_of(tmp_path)
    assert packed_seq_params(batch).keys() == MEGATRON_FIELDS
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed: compared with the recorded fields alone")
    script = "from megatron.core.packed_seq_params import PackedSeqParams as P; print(*P.__dataclass_fields__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert set(done.stdout.split()) >= MEGATRON_FIELDS, done.stderr


# A tiny Llama in float64: the loss of every batch is that of its documents one by one.
HUGGING_FACE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from seqmesh.loader import Loader, LoaderSettings
from seqmesh.loader.adapters import padding_free
torch.manual_seed(0)
config = LlamaConfig(vocab_size=1000, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=1)
model = LlamaForCausalLM(config).double()
names = set(FlashAttentionKwargs.__annotations__) | {"input_ids", "position_ids", "labels", "use_cache"}
for text in sys.argv[1:]:
    with Loader(LoaderSettings.from_json(text), mode="inline") as loader:
        for batch in loader:
            given = padding_free(batch)
            assert given.keys() == names, given.keys() ^ names
            packed = model(**given, num_items_in_batch=torch.tensor(7)).loss * 7
            apart = torch.zeros((), dtype=torch.float64)
            for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
                if b - a > 1:
                    ids = batch.input_ids[None, a:b]
                    apart += model(input_ids=ids, labels=ids).loss * (b - a - 1)
            torch.testing.assert_close(packed.double(), apart, rtol=1e-5, atol=1e-5)  # logits are made float32
print("same")
"""


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_hugging_face_model_has_the_loss_of_its_documents(tmp_path: Path) -> None:
    data = make_set(tmp_path, LENGTHS)
    rows: dict[str, Any] = {"batching": "rows", "tokens_per_step": None, "rows_per_step": 4, "window": 5}
    texts = [settings_for(data, capacity=32, pad_to=pad, **rows).to_json().decode() for pad in (None, 8)]
    done = subprocess.run([sys.executable, "-c", HUGGING_FACE, *texts], capture_output=True, text=True, timeout=100)
    assert done.stdout == "same\n", done.stderr
