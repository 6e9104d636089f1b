"""The model: documents of one pack do not see each other, packing changes nothing, and the costs are counted right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqmesh.kernels.loss import UNSUPERVISED, cross_entropy_sum
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer, init_weights
from tests.kernels.reference import layout_of, positions_of, relative_error

CONFIG = ModelConfig(vocab_size=37, width=24, layers=2, heads=4, kv_heads=2, ffn_width=40, init_std=0.2)
LAYOUTS = [[5, 3], [1, 1, 1, 6], [0, 4, 0, 9, 2], [300, 7]]


def random_ids(rows: int, seed: int = 0) -> Tensor:
    ids = torch.randint(CONFIG.vocab_size, (rows,), generator=torch.Generator().manual_seed(seed))
    return ids.to(torch.int32)


def model_in_float64(config: ModelConfig = CONFIG) -> Transformer:
    return Transformer(config, seed=0).double()


def logits_of(model: Transformer, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    logits: Tensor = model(ids, positions_of(lengths, len(ids) - sum(lengths)), layout_of(lengths))
    return logits


def gradients_of(model: Transformer, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LAYOUTS, ids=str)
def test_a_token_changes_nothing_in_other_documents(lengths: list[int], dtype: torch.dtype) -> None:
    model = Transformer(CONFIG, seed=0).to(dtype)
    ids = random_ids(sum(lengths) + 2)
    before = logits_of(model, ids, lengths)
    start = 0
    for length in lengths:
        if length:
            changed = ids.clone()
            changed[start] = (changed[start] + 1) % CONFIG.vocab_size
            after = logits_of(model, changed, lengths)
            assert torch.equal(after[:start], before[:start])
            assert torch.equal(after[start + length :], before[start + length :])
            assert all(not torch.equal(a, b) for a, b in zip(after[start:][:length], before[start:], strict=False))
        start += length


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lengths", LAYOUTS, ids=str)
def test_packed_equals_document_by_document(lengths: list[int], tied: bool) -> None:
    model = model_in_float64(replace(CONFIG, tied_embeddings=tied))
    padding = 3
    ids = random_ids(sum(lengths) + padding)
    labels = random_ids(len(ids), seed=1)
    labels[:1] = labels[sum(lengths) :] = UNSUPERVISED
    packed = logits_of(model, ids, lengths)
    gradients = gradients_of(model, cross_entropy_sum(packed, labels)[0])

    documents = slice(0, sum(lengths))
    pairs = zip(torch.split(ids[documents], lengths), torch.split(labels[documents], lengths), strict=True)
    separate, total = [], packed.new_zeros(())
    for document, document_labels in pairs:
        if len(document):
            separate.append(logits_of(model, document, [len(document)]))
            total = total + cross_entropy_sum(separate[-1], document_labels)[0]
    assert relative_error(packed[documents], torch.cat(separate)) <= 1e-12
    for got, expected in zip(gradients, gradients_of(model, total), strict=True):
        assert relative_error(got, expected) <= 1e-12


def test_ids_of_either_width_give_the_same_bits() -> None:
    model, ids = Transformer(CONFIG, seed=0), random_ids(8)
    assert torch.equal(logits_of(model, ids, [8]), logits_of(model, ids.long(), [8]))


def test_weights_follow_from_the_seed_alone() -> None:
    state = torch.random.get_rng_state()
    one, two, other = (Transformer(CONFIG, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    wide = Transformer(CONFIG, seed=4).double()
    init_weights(wide, 3)
    assert all(torch.equal(one[name].double(), weight) for name, weight in wide.state_dict().items())


def test_tied_embeddings_share_one_matrix() -> None:
    model = Transformer(replace(CONFIG, tied_embeddings=True), seed=0)
    assert not [name for name in model.state_dict() if name.startswith("head")]
    assert logits_of(model, random_ids(4), [4]).shape == (4, CONFIG.vocab_size)


def test_pair_flops_are_what_torch_counts_for_dense_attention() -> None:
    rows = 6
    q, k, v = (torch.ones(CONFIG.heads, rows, CONFIG.head_dim, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(((q @ k.mT).softmax(dim=-1) @ v).sum(), (q, k, v))
    assert CONFIG.layers * counter.get_total_flops() == rows**2 * CONFIG.shape.flops_per_pair


def test_linear_flops_are_six_per_weight_of_a_matrix() -> None:
    model = Transformer(CONFIG, seed=0)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("embedding")]
    assert CONFIG.shape.flops_per_token == 6 * sum(p.numel() for p in matrices)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0: must be at least 1"),
        ({"layers": -1}, "layers is -1: must be at least 1"),
        ({"ffn_width": 0}, "ffn_width is 0: must be at least 1"),
        ({"width": 26}, "width is 26: must be an even multiple of heads, 4"),
        ({"width": 28}, "width is 28: must be an even multiple of heads, 4"),
        ({"kv_heads": 3}, "kv_heads is 3: must divide heads, 4"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0: must be positive and finite"),
        ({"rope_base": float("nan")}, "rope_base is nan: must be positive and finite"),
        ({"init_std": float("inf")}, "init_std is inf: must be positive and finite"),
    ],
    ids=str,
)
def test_an_impossible_shape_is_refused_with_field_and_value(change: dict[str, float], message: str) -> None:
    shape = {"vocab_size": 37, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2} | change
    with pytest.raises(ValueError, match=message):
        ModelConfig(**shape)  # type: ignore[arg-type]


def test_a_config_from_a_file_refuses_unknown_fields() -> None:
    shape = {"vocab_size": 37, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_width": 40, "init_std": 0.2}
    adapter = TypeAdapter(ModelConfig)
    assert adapter.validate_python(shape) == CONFIG
    with pytest.raises(ValidationError, match="n_heads"):
        adapter.validate_python(shape | {"n_heads": 4})


def test_default_mlp_width_is_eight_thirds_rounded_up() -> None:
    widths = [replace(CONFIG, width=width, ffn_width=None).mlp_width for width in (24, 192, 512, 4096)]
    assert widths == [64, 512, 1408, 10944]


def test_a_call_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="T at least 1"):
        logits_of(Transformer(CONFIG, seed=0), random_ids(0), [])
