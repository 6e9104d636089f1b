"""Field case: a line of a gigabyte, which stalls a job without a word, or takes its memory: it is refused by its place,
and no more of it is held than a record may have."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from seqmesh.loader.manifest import MANIFEST_NAME, read_manifest
from seqmesh.tools.documents import read_records
from seqmesh.tools.inputs import find_files
from seqmesh.tools.prepare import PrepareOptions, run
from seqmesh.tools.records import BadRecord
from seqmesh.tools.units.cut import units
from seqmesh.tools.units.page import page_of


def test_a_long_line_stops_the_run_by_its_place_or_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "b" * 5000 + '"}\n{"text": "c"}\n')
    with pytest.raises(ValueError, match=r"line 2 \(byte offset 14\): longer than the 1,000 bytes that a record may"):
        run(PrepareOptions(inputs=(str(path),), out=tmp_path / "stop", tokenizer="train:300", longest_record=1000))
    assert not (tmp_path / "stop" / MANIFEST_NAME).exists()
    run(
        PrepareOptions(
            inputs=(str(path),), out=tmp_path / "skip", tokenizer="train:300", longest_record=1000, on_error="skip"
        )
    )
    counts = read_manifest(tmp_path / "skip").counts
    assert (counts["documents_in"], counts["documents_out"], counts["refused"]) == (3, 2, 1)
    (entry,) = map(json.loads, (tmp_path / "skip" / "quarantine.jsonl").read_text().splitlines())
    assert (entry["line"], entry["offset"]) == (2, 14)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_memory_does_not_grow_with_the_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    data = b'{"text": "a"}\n{"text": "' + b"b" * 60_000_000 + b'"}\n{"text": "c"}\n'
    path.write_bytes(gzip.compress(data, 1) if suffix else data)
    del data
    files = find_files([str(path)])
    tracemalloc.start()
    try:
        _, bad, last = read_records(files, longest=1_000_000)
        pages = [page_of(unit) for unit in units(files, longest=1_000_000)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(bad, BadRecord)
    assert (last.place.record, last.place.offset) == (2, 14 + 60_000_013)
    assert [text for page in pages for text in page.texts] == ["a", None, "c"]
    assert [offset for page in pages for offset in page.offsets] == [0, 14, 14 + 60_000_013]
    assert peak < 20_000_000
