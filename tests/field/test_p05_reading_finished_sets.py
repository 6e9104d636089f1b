"""The reading side of restarts: half a set is never taken as one, other data never as the same."""

import shutil
from pathlib import Path

import pytest

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError, ShardError
from seqmesh.loader.feed import Feed
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.shards import ShardSet
from seqmesh.tools.shard_writer import write_shards
from tests.support import documents_of, make_set, settings_for

LENGTHS = [30, 20, 10, 40, 5, 60] * 4


def test_a_folder_without_a_manifest_is_no_set_whatever_is_in_it(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", LENGTHS)
    (folder / "manifest.json").rename(folder / "manifest.json.tmp")
    with pytest.raises(FileNotFoundError, match="is not a finished shard set"):
        ShardSet(folder)
    with pytest.raises(LoaderError, match="is not a finished shard set"):
        LoaderProcess(settings_for(folder))


def test_a_shard_in_the_making_is_not_read(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", LENGTHS)
    (folder / "shard-00001.arrow").rename(folder / "shard-00001.arrow.tmp")
    with pytest.raises(ShardError, match=r"shard-00001.arrow: is missing; the manifest lists it"):
        ShardSet(folder)


def test_a_shard_of_another_run_is_found_by_its_checksum(tmp_path: Path) -> None:
    folder, other = make_set(tmp_path / "set", LENGTHS), tmp_path / "other"
    write_shards(other, documents_of(LENGTHS, seed=1), vocab_size=1000, shard_tokens=200)
    shutil.copy(other / "shard-00001.arrow", folder / "shard-00001.arrow")
    Feed(settings_for(folder))  # same size, lengths and types: only its bytes differ
    with pytest.raises(ShardError, match=r"shard-00001.arrow: is damaged: its checksum differs"):
        Feed(settings_for(folder, verify=True))
    left_out = Feed(settings_for(folder, verify=True, bad_shards="quarantine")).shards
    assert list(left_out.bad_shards) == ["shard-00001.arrow"]


def test_a_state_is_refused_where_the_data_was_prepared_anew(tmp_path: Path) -> None:
    with Loader(settings_for(make_set(tmp_path / "set", LENGTHS)), rank=0, mode="inline") as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        following = batch_digest(next(batches))
    other = tmp_path / "other"
    write_shards(other, documents_of(LENGTHS, seed=1), vocab_size=1000, shard_tokens=200)
    refused = pytest.raises(ValueError, match="the state is of another sequence of batches: data was")
    with Loader(settings_for(other), rank=0, mode="inline") as loader, refused:
        loader.load_state_dict(state)
    moved = Path(shutil.copytree(tmp_path / "set", tmp_path / "elsewhere"))
    with Loader(settings_for(moved), rank=0, mode="inline") as loader:
        loader.load_state_dict(state)  # a copy is the same data
        assert batch_digest(next(iter(loader))) == following
