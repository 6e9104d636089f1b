import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.permute import permutation, shuffle_key


@given(st.integers(0, 300), st.integers(0, 2**62))
def test_every_item_comes_exactly_once(n: int, key: int) -> None:
    assert sorted(permutation(n, key).tolist()) == list(range(n))


@given(st.integers(1, 10**12), st.data())
def test_any_position_alone_equals_the_walk(n: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1))
    stop = min(n, start + 5)
    walk = permutation(n, 7, start, stop)
    assert [permutation(n, 7, i, i + 1)[0] for i in range(start, stop)] == walk.tolist()
    assert ((walk >= 0) & (walk < n)).all()


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(permutation(64, shuffle_key(seed, epoch))) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("n", [100_000, 99_991, 65_536])
def test_the_shuffle_is_global_everywhere(n: int) -> None:
    """Neighbours are n/3 apart in the mean for a uniform shuffle; in the first and last percent too."""
    order = permutation(n, shuffle_key(3, 0))
    for part in (order, order[: n // 100], order[-n // 100 :]):
        assert 0.3 < np.abs(np.diff(part)).mean() / n < 0.37
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.02


def test_positions_are_uniform_over_keys() -> None:
    """Where item lands over many keys: a chi-square of 16 cells over 4,000 keys stays below its 1e-6 quantile."""
    firsts = [permutation(16, shuffle_key(seed, 0), 0, 1)[0] for seed in range(4000)]
    counts = np.bincount(firsts, minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 57


def test_positions_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="positions 3 to 9 are not inside 0 to 5"):
        permutation(5, 0, 3, 9)
