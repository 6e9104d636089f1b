"""Sorted documents 0 to 99,999 in 100 shards: neighbours of the order that is served are far apart everywhere."""

from pathlib import Path

import numpy as np
import pytest

from seqmesh.loader.feed import Feed
from seqmesh.loader.settings import Blocks
from seqmesh.loader.stream import draw
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.shard_writer import write_shards
from tests.support import settings_for

COUNT = 100_000
SHUFFLES: dict[str, bool | Blocks] = {"global": True, "blocks": Blocks(window=16)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sorted")
    write_shards(folder, [[n // 1000, n % 1000] for n in range(COUNT)], vocab_size=1000, shard_tokens=2000)
    return folder


def served(data: Path, shuffle: bool | Blocks, seed: int) -> list[Int64Array]:
    """Documents in the order in which they come, of two epochs."""
    feed = Feed(settings_for(data, tokens_per_step=10_000, epochs=2, shuffle=shuffle, seed=seed))
    assert len(feed.shards.part_first) == 101
    state, found = feed.start, list[Int64Array]()
    while (drawn := draw(state, feed.shards.lengths, feed.settings, feed.sources)) is not None:
        found.append(drawn[0].document)
        state = drawn[1]
    return np.split(np.concatenate(found), [COUNT])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_neighbours_are_far_apart_from_the_first_to_the_last(data: Path, shuffle: str, seed: int) -> None:
    first, second = served(data, SHUFFLES[shuffle], seed)
    for order in (first, second):
        assert (np.sort(order) == np.arange(COUNT)).all()
        percent = COUNT // 100
        for part in (order[:percent], order[COUNT // 2 : COUNT // 2 + percent], order[-percent:]):
            assert np.abs(np.diff(part)).mean() > 0.2 * COUNT
        assert (order != np.arange(COUNT)).any()
    assert (first != second).any()


def test_without_a_shuffle_they_come_as_they_are(data: Path) -> None:
    """What the figures above are worth."""
    assert all((order == np.arange(COUNT)).all() for order in served(data, False, 0))
