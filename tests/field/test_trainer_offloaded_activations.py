"""Off-loaded activations whose memory is used again before its copy is done: wrong gradients, without an error.

Three steps use the pool's buffers again, on a device that copies as late as it may and on which memory that was let go
of holds anything. Known where a stream was asked for once and kept, or a tensor was freed without waiting for its copy.
"""

import pytest
import torch
from torch import Tensor

from seqmesh.packer.offload import KEPT_LAYERS
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.offload import Offloader, offloaded
from tests.lanes import LateLane, NeverWaiting, late_host
from tests.trainer.test_offload import CONFIG, inputs

STEPS = 3


def train(offloader_lane: type[LateLane] | None, ratio: float) -> tuple[list[Tensor], int, int]:
    """Weights after some steps, the bytes of the host's buffers, and those that were moved."""
    model, host = Transformer(CONFIG, seed=0), late_host(offloader_lane or LateLane)
    offloader = Offloader(model.blocks, host) if offloader_lane else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(STEPS):
        for lengths in ((20, 30), (41,)):
            with offloaded(offloader, ratio if offloader else 0.0):
                loss, count = model(*inputs(lengths))
                torch.autograd.backward(loss / count)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), host.pool.nbytes, offloader.moved.nbytes if offloader else 0


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_late_copies_change_nothing(ratio: float) -> None:
    expected, _, _ = train(None, 0.0)
    found, pool, moved = train(LateLane, ratio)
    assert all(map(torch.equal, found, expected))
    assert moved > 2 * STEPS * (CONFIG.layers - KEPT_LAYERS) * 1000
    assert pool < moved / 2  # buffers were used again


def test_the_test_would_find_a_copy_that_nobody_waits_for() -> None:
    found, _, _ = train(NeverWaiting, 0.25)
    assert any(bool(parameter.isnan().any()) for parameter in found)
