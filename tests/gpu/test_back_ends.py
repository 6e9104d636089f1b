"""Back ends on a real GPU: the cases of `python -m seqmesh.tools.gpu_check`, one test for each back end and dtype."""

import pytest
import torch

from seqmesh.tools.gpu_check import BACKENDS, DTYPES, check, tried_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_case(name: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    verdict = check(name, BACKENDS[name], device, dtype, tried_on(device))
    assert verdict.failures == []
    if not verdict.right:
        pytest.skip("; ".join(verdict.refused))
