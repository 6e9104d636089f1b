import numpy as np
import pytest

from seqmesh.packer.totals import total


def test_total_is_exact_and_refuses_what_could_wrap() -> None:
    assert total(np.full(4, 2**59, np.int64), "costs") == 2**61
    with pytest.raises(ValueError, match="sum of costs is over"):
        total(np.full(4, 2**62, np.int64), "costs")
