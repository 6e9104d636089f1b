"""A micro-batch that does nothing goes through all that a stage holds, and changes nothing."""

from dataclasses import replace

import pytest
import torch

from seqmesh.trainer.models.division import layers_of
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.replicas.filler import run_filler
from tests.trainer.steps import CONFIG


@pytest.mark.parametrize("parts", [[range(4)], [range(2)], [range(2, 4)], layers_of(4, 4)[::2], layers_of(4, 4)[1::2]])
def test_every_parameter_gets_a_gradient_of_zeros(parts: list[range]) -> None:
    model = Transformer(replace(CONFIG, layers=4), seed=0, layers=parts)
    run_filler(model, torch.device("cpu"))
    gradients = [parameter.grad for parameter in model.parameters()]
    assert len(gradients) > 9
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
