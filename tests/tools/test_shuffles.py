"""`seqmesh inspect --shuffle`: figures of the orders that the loader serves."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from seqmesh.loader.feed import Feed
from seqmesh.loader.manifest import read_manifest
from seqmesh.loader.settings import Blocks
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.neighbours import neighbours
from seqmesh.tools import inspect_set
from seqmesh.tools.shard_writer import write_shards
from seqmesh.tools.shuffles import ShuffleOptions, compare_shuffles
from tests.support import global_batches, make_set, settings_for


def printed(folder: Path, **options: object) -> str:
    output = io.StringIO()
    inspect_set.run(folder=folder, shuffle=True, console=Console(file=output, width=60), **options)  # type: ignore[arg-type]  # of any kind
    return output.getvalue()


def files_of(folder: Path) -> tuple[Int64Array, Int64Array]:
    shards = read_manifest(folder).shards
    return np.array([shard.rows for shard in shards]), np.array([shard.bytes for shard in shards])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), [10 + n % 3 for n in range(400)])


def test_the_orders_are_those_that_the_loader_serves(data: Path) -> None:
    options = ShuffleOptions(windows=(2, 5), seed=3, epoch=1)
    results = compare_shuffles(*files_of(data), options)
    assert [result.name for result in results] == ["as stored", "blocks, window 2", "blocks, window 5", "global"]
    for result, shuffle in zip(results, (False, Blocks(window=2), Blocks(window=5), True), strict=True):
        feed = Feed(settings_for(data, shuffle=shuffle, seed=3, epochs=2))
        served = [document for step in global_batches(feed) for document, _, _ in step]
        assert result.neighbours == neighbours(np.array(served[400:]))


def test_files_at_a_time_are_the_most_that_lie_between_first_and_last_use(data: Path) -> None:
    rows, sizes = files_of(data)
    first = np.cumsum([0, *rows.tolist()])
    results = compare_shuffles(rows, sizes, ShuffleOptions(windows=(3,)))
    for result, window in zip(results[1:], (3, 10**6), strict=True):
        feed = Feed(settings_for(data, shuffle=Blocks(window=window)))
        order = np.array([document for step in global_batches(feed) for document, _, _ in step])
        part = np.searchsorted(first, order, side="right") - 1
        uses = [np.flatnonzero(part == number)[[0, -1]].tolist() for number in range(len(rows))]
        at_a_time = [[n for n, (a, b) in enumerate(uses) if a <= at <= b] for at in range(len(order))]
        assert result.files == max(map(len, at_a_time))
        assert result.bytes == max(sum(int(sizes[n]) for n in open_files) for open_files in at_a_time)


def test_the_table_is_readable_and_whole(data: Path) -> None:
    output = printed(data, windows=(2,), seed=5)
    for expected in ("400 documents in", "seed 5, epoch 0", "as stored", "100.00%", "blocks, window 2", "global"):
        assert expected in output
    assert "blocks, window 16" in printed(data)
    assert "blocks, window 64" not in printed(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True, "windows": (0,)}, "shuffle.window is 0: must be at least 1"),
        ({"shuffle": True, "epoch": -1}, "epoch is -1: must be at least 0"),
        ({"shuffle": True, "show": 0}, "show and shuffle are both set"),
        ({"windows": (4,)}, "window, seed and epoch belong to --shuffle"),
        ({"epoch": 0}, "window, seed and epoch belong to --shuffle"),
    ],
)
def test_options_that_do_not_go_together_are_refused(data: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect_set.run(folder=data, **options)  # type: ignore[arg-type]  # of any kind


def test_one_document_can_not_be_shuffled(tmp_path: Path) -> None:
    write_shards(tmp_path, [[1, 2]])
    with pytest.raises(ValueError, match="the set has 1 documents: there is nothing to shuffle"):
        printed(tmp_path)
