"""Rings over all GPUs of this machine."""

import pytest
import torch

from seqmesh.tools.ring_check import run_apart


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than two CUDA devices")
def test_every_exchange() -> None:
    assert run_apart(torch.cuda.device_count()) == ""
