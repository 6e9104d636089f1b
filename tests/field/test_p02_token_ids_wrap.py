"""Field case: ids above 65,535 stored in 16 bits wrap silently. The width must follow from the vocabulary."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest

from seqmesh.loader.manifest import MANIFEST_NAME
from seqmesh.tools.shard_writer import write_shards

VOCABULARY = 128_256
IDS = [65_535, 65_536, 70_000, 128_255]


def test_large_ids_come_back_whole(tmp_path: Path) -> None:
    write_shards(tmp_path, [IDS], vocab_size=VOCABULARY)
    column = pa.ipc.open_file(str(tmp_path / "shard-00000.arrow")).read_all().column("input_ids")
    assert column.type == pa.large_list(pa.uint32())
    assert column.to_pylist() == [IDS]


def test_an_id_past_the_vocabulary_is_refused_by_document_and_position(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"document 'bad'.*position 2: token id 128256 is outside the vocabulary"):
        write_shards(tmp_path, [IDS, [0, 1, VOCABULARY]], vocab_size=VOCABULARY, doc_ids=["good", "bad"])
    assert not (tmp_path / MANIFEST_NAME).exists()


def test_sixteen_bits_for_this_vocabulary_are_refused(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, [IDS], vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="uint16: does not fit a vocabulary of 128256"):
        dataclasses.replace(manifest, token_dtype="uint16")
