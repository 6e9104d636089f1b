import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqmesh.loader.manifest import MAX_VOCABULARY, read_manifest, token_dtype
from tests.support import make_set


def edit(folder: Path, **changes: Any) -> None:
    fields = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(fields | changes))


def test_a_written_manifest_reads_back(tmp_path: Path) -> None:
    manifest = read_manifest(make_set(tmp_path, [3, 1, 2]))
    assert (manifest.documents, manifest.tokens, manifest.token_dtype) == (3, 6, "uint16")


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(1, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**31, "uint32")]
)
def test_the_token_width_follows_the_vocabulary(vocabulary: int, dtype: str) -> None:
    assert token_dtype(vocabulary) == np.dtype(dtype)


@pytest.mark.parametrize("vocabulary", [0, -5, MAX_VOCABULARY + 1])
def test_an_impossible_vocabulary_is_refused(vocabulary: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size is {vocabulary}"):
        token_dtype(vocabulary)


def test_a_folder_without_a_manifest_is_not_a_set(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a finished shard set"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "format is 99: this version of seqmesh reads format 1"),
        ({"token_dtype": "uint8"}, "token_dtype: Input should be 'uint16' or 'uint32'"),
        ({"token_dtype": "uint32"}, "does not fit a vocabulary of 1000"),
        ({"shards": []}, "lengths index has 3 rows, the shards have 0"),
        ({"surprise": 1}, "surprise: is not a setting"),
        ({"vocab_size": "many"}, "vocab_size: "),
    ],
)
def test_an_unfit_manifest_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    edit(make_set(tmp_path, [3, 1, 2]), **changes)
    with pytest.raises(ValueError, match=message):
        read_manifest(tmp_path)


def test_a_manifest_can_not_name_files_elsewhere(tmp_path: Path) -> None:
    shards = json.loads((make_set(tmp_path, [3]) / "manifest.json").read_text())["shards"]
    edit(tmp_path, shards=[shards[0] | {"file": "../shard-00000.arrow"}])
    with pytest.raises(ValueError, match="must be a plain name"):
        read_manifest(tmp_path)


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1')
    with pytest.raises(ValueError, match="not a valid manifest"):
        read_manifest(tmp_path)
