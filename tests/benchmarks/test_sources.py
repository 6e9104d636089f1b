"""The benchmark of formats reads the same documents in all of them, and fetches what it says."""

from pathlib import Path

import pytest

from seqmesh.benchmarks import sources
from seqmesh.benchmarks.shards import random_shards
from seqmesh.loader.catalog import Reading
from seqmesh.loader.shards import ShardSet
from seqmesh.packer.lengths import as_lengths
from tests.support import long_tail

LENGTHS = long_tail(400, 120)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    random_shards(folder / "set", as_lengths(LENGTHS), vocab_size=sources.VOCABULARY, shard_tokens=500)
    return {sources.SHARDS: folder / "set"} | sources.written(folder, ShardSet(folder / "set"))


def test_all_formats_hold_the_same_documents(places: dict[str, Path]) -> None:
    sets = [ShardSet(place, reading=Reading(vocab_size=sources.VOCABULARY)) for place in places.values()]
    for document in range(0, len(LENGTHS), 7):
        assert len({shards.tokens(document).tobytes() for shards in sets}) == 1
    assert all(shards.lengths.tolist() == LENGTHS for shards in sets)


def test_rates_and_starts(places: dict[str, Path], tmp_path: Path) -> None:
    results = sources.rates(places, tmp_path, 1)
    assert [row.candidate for row in results.rows] == [sources.SHARDS, "parquet", "huggingface", "megatron"]
    assert all(ratio.value and ratio.value > 0 for ratio in results.ratios) and len(results.ratios) == 3
    found = sources.starts(places, places[sources.SHARDS].parent, 1)
    fetched = {row.candidate: row.counts["fetched"] for row in found.rows}
    assert fetched[sources.LOCAL] == 0
    whole = fetched[f"{sources.SHARDS}, URL, shuffled globally"]
    assert 0 < fetched[f"{sources.SHARDS}, URL"] <= whole
    assert fetched[f"{sources.SHARDS}, URL, from the cache"] > 0
