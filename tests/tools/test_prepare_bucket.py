"""`prepare` reads from an object store over HTTP: the same set as from the disk, also where the link breaks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqmesh.tools.documents import read_records
from seqmesh.tools.inputs import find_files
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.prepare_report import Progress
from seqmesh.tools.records import Document
from seqmesh.tools.units import cut
from tests.storage import BUCKET, Link, link_to, s3_server, s3_settings

PATTERN, FOLDER = "lines/*.jsonl.gz", "table"


@pytest.fixture(scope="module")
def folder(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("lines", FOLDER):
        (folder / name).mkdir()
    for name, part in (("a", texts[::2]), ("b", texts[1::2])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / "lines" / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        pq.write_table(pa.table({"text": part}), folder / FOLDER / f"{name}.parquet", row_group_size=5)
    return folder


@pytest.fixture(scope="module")
def link(folder: Path) -> Iterator[Link]:
    """To a store with the same files, at s3://."""
    with s3_server() as port, link_to(port) as link, s3_settings(link.port):
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
        filesystem.mkdir(BUCKET)
        for path in folder.rglob("*.*"):
            filesystem.pipe_file(f"{BUCKET}/{path.relative_to(folder)}", path.read_bytes())
        yield link


def options(root: str | Path, out: Path, tokenizer: Path) -> PrepareOptions:
    inputs = (f"{root}/{PATTERN}", f"{root}/{FOLDER}")
    return PrepareOptions(inputs=inputs, out=out, tokenizer=str(tokenizer), shard_tokens=2000)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("link")
def test_a_pattern_finds_what_a_pattern_on_the_disk_does(folder: Path) -> None:
    here, there = (find_files([f"{root}/**/*.jsonl.gz"]) for root in (folder, f"s3://{BUCKET}"))
    assert [file.name for file in there] == [file.name for file in here] == ["lines/a.jsonl.gz", "lines/b.jsonl.gz"]
    assert all(file.version for file in there)
    found, expected = ([r.text for r in read_records(files) if isinstance(r, Document)] for files in (there, here))
    assert found == expected


def test_the_set_is_the_same_as_from_the_disk_also_where_the_link_broke(
    folder: Path, link: Link, tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 4000)
    prepare(options(folder, tmp_path / "here", tokenizer_path))
    remote = options(f"s3://{BUCKET}", tmp_path / "there", tokenizer_path)

    def cut_the_link(progress: Progress) -> None:
        if progress.tokens > 6000:
            link.limit, link.cuts = 100, 1_000_000

    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    with pytest.raises((OSError, ValueError), match=rf"s3://{BUCKET}/\w+/[ab]\.\S+"):
        prepare(remote, progress=cut_the_link)
    assert link.was_cut
    assert not (tmp_path / "there" / "manifest.json").exists()
    link.cuts = 0
    report = prepare(remote)
    assert report.resumed_tokens > 2000
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
