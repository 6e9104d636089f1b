"""The fast parser of lines says what the slow one says, of good lines and bad."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seqmesh.tools.documents import read_records
from seqmesh.tools.inputs import find_files
from seqmesh.tools.records import BadRecord
from seqmesh.tools.units import cut
from seqmesh.tools.units.cut import units
from seqmesh.tools.units.page import page_of

VALUES = st.one_of(
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.none(),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.just("\ud800"),
    st.just(10**400),
)
OBJECTS = st.dictionaries(st.sampled_from(["text", "id", "source", "other"]), VALUES, max_size=4)
HARD = [
    b'{"text": "a", "text": "b"}',
    b'{"text": "a", "other": NaN}',
    b'{"text": "a", "other": -Infinity}',
    b'{"text": "a", "other": 1e999}',
    b'{"text": "a", "other": 0123}',
    b'{"text": "a", "other": "\xff"}',
    b'{"text": "a", "other": "\\ud800"}',
    b'{"text": "\\ud83d\\ude00 \\u0000"}',
    b'{"text": "a", "other": ' + b"9" * 5000 + b"}",
    b'{"text": "a", "other": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    b'{"text": "a", "other": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"text": "a", "id": null}',
    b'{"text": "a", "id": 12345678901234567890123}',
    b'{"text": "a", "id": -0}',
    b'{"text": "a", "id": ""}',
    b'{"text": "a", "source": ""}',
    b'{"text": "a",}',
    b'{"text": "a"} x',
    b'\t {"text": "a"}\r',
    b'"text"',
    b"[]",
    b"7",
    b"null",
    b'{"text": "a"}\x00',
    b'{"te\\u0078t": "a"}',
    b'{"text": "a\tb"}',
    b"\x0c",
    b"\xc2\xa0",
]


def said_fast(path: Path) -> list[tuple[Any, ...]]:
    (unit,) = units(find_files([str(path)]))
    page = page_of(unit)
    bad = iter(page.bad)
    return [
        (record, offset, text, doc_id, source) if text is not None else (record, offset, next(bad).as_json())
        for record, offset, text, doc_id, source in zip(
            page.records, page.offsets, page.texts, page.doc_ids, page.sources, strict=True
        )
    ]


def said_slowly(path: Path) -> list[tuple[Any, ...]]:
    return [
        (record.place.record, record.place.offset, record.as_json())
        if isinstance(record, BadRecord)
        else (record.place.record, record.place.offset, record.text, record.doc_id, record.source)
        for record in read_records(find_files([str(path)]))
    ]


def test_hard_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(HARD))
    said = said_slowly(path)
    assert said_fast(path) == said
    assert len(said) == len(HARD) - 1  # one is blank
    assert 8 < sum(len(record) == 5 for record in said) < len(HARD) - 8


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(objects=st.lists(OBJECTS, min_size=1, max_size=8), ascii=st.booleans(), seed=st.integers(0, 99))
def test_any_lines(tmp_path: Path, objects: list[dict[str, Any]], ascii: bool, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "in.jsonl"
    data = b"\n".join(json.dumps(fields, ensure_ascii=ascii).encode("utf-8", "surrogatepass") for fields in objects)
    mutated = bytearray(data)
    if rng.random() < 0.3:
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
    path.write_bytes(mutated)
    assert said_fast(path) == said_slowly(path)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_byte_order_mark_belongs_to_the_beginning_of_a_file_only(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf{"text": "b"}' + end)
    assert said_fast(path) == said_slowly(path)
    assert [len(record) for record in said_fast(path)] == [5, 3]


@pytest.mark.parametrize("size", [40, 100, 1 << 20])
def test_lines_that_are_too_long_are_left_behind_wherever_units_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", size)
    path = tmp_path / "in.jsonl"
    texts = ["a", "b" * 90, "c", "d" * 200, "e" * 300, "f", "g" * 99]
    path.write_text("\n".join(json.dumps({"id": str(n), "text": text}) for n, text in enumerate(texts)))
    files = find_files([str(path)])
    pages = [page_of(unit) for unit in units(files, longest=60)]
    records = list(read_records(files, longest=60))
    assert [doc_id for page in pages for doc_id in page.doc_ids if doc_id] == ["0", "2", "5"]
    assert [at for page in pages for at in page.offsets] == [record.place.offset for record in records]
    bad = [record for record in records if isinstance(record, BadRecord)]
    assert [(one.raw, one.size) for page in pages for one in page.bad] == [(one.raw, one.size) for one in bad]
    assert len(bad) == 4
