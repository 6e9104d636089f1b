"""Damaged and odd inputs for the readers, made from a seed, and what must be true of reading them.

Every line that is not blank is one record at its place, and every row of a table; what cannot be read raises ValueError
or OSError with the name of the file. The fast way through a file (units, another parser) says the same.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from seqmesh.tools.documents import BOM, read_records
from seqmesh.tools.inputs import InputFile, find_files
from seqmesh.tools.records import BadRecord, Columns, Document, Record
from seqmesh.tools.units import cut
from seqmesh.tools.units.page import page_of

LONGEST = 4000
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
TABLES = ("parquet", "arrow", "stream")
COLUMNS = (Columns(), Columns(keep=("n",)), Columns(chat="chat"), Columns(id="name"))
TEXTS = (
    *("", " ", "plain", "zwölf 🙂", "\0", "\u2028\u0085", "a\r\nb", "\ufeff", "\ufdd0", "<|endoftext|>", "\\ud800"),
    *("x" * 100, "é" * 3000, "9" * 400),
)
LINES = (
    *(b"", b" \t\x0b\x0c\r", b"\x00", b"\xff\xfe", BOM, BOM + b'{"text": "b"}', b'{"text": "a"}{"text": "b"}', b"null"),
    *(b"[" * 2000, b'{"a":' * 2000, b'{"text": "a", "n": ' + b"9" * 5000 + b"}", b'{"text": "a", "id": 1e400}'),
    *(b'{"text": "\\ud800"}', b'{"text": "\\ud83d\\ude42"}', b'{"text": "a", "id": 18446744073709551616}', b'{"text"'),
    *(b'{"text": "a", "text": "b"}', b'{"text": NaN}', b'{"text": "a", "id": null}', b'{"text": "\xed\xa0\x80"}'),
    *(b'{"text": "a", "n": NaN}', b'{"text": "\xc0\x80"}', b"{'text': 1}", b'{"text": "a",}', b'{"text": "a"} x'),
    *(b'{"text": "a", "id": -0}', b'{"text": "a", "id": 1.0}', b'{"text": "a", "source": ""}', b'{"\\u0074ext": "a"}'),
    *(b'{"chat": [{"role": "user", "content": "a"}]}', b'{"chat": [[]]}', b'{"text": "a", "name": 0}'),
)


def some_line(random: random.Random) -> bytes:
    if random.random() < 0.4:
        line = random.choice(LINES)
    else:
        fields: dict[str, Any] = {"text": random.choice(TEXTS) * random.choice((1, 1, 1, 3))}
        for name in ("id", "source", "n", "name", "chat"):
            if random.random() < 0.3:
                plain = (random.choice(TEXTS), 7, -1, 2**70, 0.5, None, True)
                values: tuple[Any, ...] = (*plain, [1], {"a": []}, [{"role": "user"}])
                fields[name] = random.choice(values)
        line = json.dumps(fields, ensure_ascii=random.random() < 0.5).encode()
    return damaged(line, random) if random.random() < 0.2 else line


def some_lines(random: random.Random) -> bytes:
    ends = random.choice(((b"\n",), (b"\r\n",), (b"\n", b"\r\n", b"\n\n", b"\r", b"")))
    body = b"".join(some_line(random) + random.choice(ends) for _ in range(random.randrange(12)))
    return (BOM if random.random() < 0.2 else b"") + body


def damaged(data: bytes, random: random.Random) -> bytes:
    """Cut, or with a few bytes changed, inserted, removed or repeated."""
    mutable = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(mutable) + 1)
        kind = random.randrange(5)
        if kind == 0:
            del mutable[at:]
        elif kind == 1 and at < len(mutable):
            mutable[at] ^= 1 << random.randrange(8)
        elif kind == 2:
            mutable[at:at] = random.randbytes(random.choice((1, 4, 8)))
        elif kind == 3:
            del mutable[at : at + random.choice((1, 4, 100))]
        else:
            mutable[at : at + 4] = random.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80"))
    return bytes(mutable)


def some_table(kind: str, random: random.Random) -> bytes:
    count = random.randrange(20)
    text = pa.array([random.choice((None, *TEXTS)) for _ in range(count)], pa.string())
    kinds = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.binary())
    columns: dict[str, Any] = {"text": text.cast(random.choice(kinds))}
    if random.random() < 0.5:
        columns["id"] = random.choice((list(range(count)), ["x"] * count, [None] * count, [0.5] * count))
    if random.random() < 0.3:
        columns["chat"] = [[{"role": "user", "content": "a"}]] * count
    if random.random() < 0.3:
        columns["n"] = random.choice((pa.array([2**62] * count), pa.array([10**15] * count, pa.timestamp("s"))))
    table, sink, rows = pa.table(columns), io.BytesIO(), random.choice((1, 3, 50))
    if kind == "parquet":
        version: Any = random.choice(("none", "snappy", "zstd"))
        pq.write_table(table, sink, row_group_size=rows, compression=version, write_page_checksum=random.random() < 0.5)
    else:
        codec: Any = random.choice((None, None, "zstd", "lz4"))
        make: Any = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def check_seed(seed: int, folder: Path) -> None:
    """Make one case and read it. Raises AssertionError, or whatever a reader should not have raised."""
    chosen = random.Random(seed)
    columns = chosen.choice(COLUMNS)
    if chosen.random() < 0.6:
        suffix = chosen.choice(("", "", *PACKERS))
        data = some_lines(chosen)
        packed = PACKERS[suffix](data)
        if suffix and chosen.random() < 0.3:
            check_any(_file(folder, f"in.jsonl{suffix}", damaged(packed, chosen)), columns)
        else:
            check_lines(_file(folder, f"in.jsonl{suffix}", packed), data, columns, chosen)
        return
    kind = chosen.choice(TABLES)
    data = some_table(kind, chosen)
    name = "in.parquet" if kind == "parquet" else "in.arrow"
    check_any(_file(folder, name, damaged(data, chosen) if chosen.random() < 0.8 else data), columns)


def check_lines(file: InputFile, data: bytes, columns: Columns, random: random.Random) -> None:
    """Lines that are stored whole: one record for each that is not blank, and the same on every way."""
    records = list(read_records([file], columns=columns, longest=LONGEST))
    assert [(record.place.record, record.place.offset) for record in records] == list(_places(data))
    start = random.choice([record.place.cursor for record in records]) if records else None
    if start:
        rest = read_records([file], columns=columns, longest=LONGEST, start=start)
        assert list(map(_shown, rest)) == [_shown(one) for one in records if one.place.offset >= start.offset]
    check_units(file, records, columns, random.choice((1, 7, 64, 1000)))


def check_units(file: InputFile, records: list[Record], columns: Columns, size: int) -> None:
    """Cut small, the file gives the same records."""
    before, cut.UNIT_BYTES = cut.UNIT_BYTES, size
    try:
        found = list(_from_units(file, columns))
    finally:
        cut.UNIT_BYTES = before
    assert found == [_key(record) for record in records]


def check_any(file: InputFile, columns: Columns) -> None:
    """Whatever is in the file: records one after the other, then its end or an error that names it."""
    last = -1
    try:
        for record in read_records([file], columns=columns, longest=LONGEST):
            assert record.place.record > last if file.kind == "jsonl" else record.place.record == last + 1
            last = record.place.record
            _shown(record)
    except (ValueError, OSError) as error:
        assert file.shown in str(error), repr(error)


def _file(folder: Path, name: str, data: bytes) -> InputFile:
    (folder / name).write_bytes(data)
    return find_files([str(folder / name)])[0]


def _places(data: bytes) -> Iterator[tuple[int, int]]:
    """Number and offset of each line that is not blank, found in the plainest way."""
    offset = 0
    for number, line in enumerate(data.split(b"\n")):
        content = line[3:] if number == 0 and line[:3] == BOM else line
        if content.strip():
            yield number, offset
        offset += len(line) + 1


def _from_units(file: InputFile, columns: Columns) -> Iterator[tuple[Any, ...]]:
    """The records by way of units, counted as the run does it."""
    before = 0
    for unit in cut.units([file], columns=columns, longest=LONGEST):
        page = page_of(unit)
        continues = unit.readings[0].continues
        bad = iter(page.bad)
        first = before if continues else 0
        for text, name, source, number, offset in zip(
            page.texts, page.doc_ids, page.sources, page.records, page.offsets, strict=True
        ):
            reason = next(bad).reason if text is None else ""
            doc_id = f"{file.name}:{number + first + 1}" if name is None and text is not None else name or ""
            yield number + first, offset, text or "", doc_id, source, reason
        before = page.records_in_last + first


def _key(record: Record) -> tuple[Any, ...]:
    place = record.place
    if isinstance(record, BadRecord):
        return place.record, place.offset, "", "", place.reading.file.source, record.reason
    return place.record, place.offset, record.text, record.doc_id, record.source, ""


def _shown(record: Record) -> tuple[Any, ...]:
    """A record, once everything of it is known to have a UTF-8 form."""
    if isinstance(record, BadRecord):
        return (*_key(record), record.as_json().encode(), len(record.raw) <= LONGEST + 1)
    assert isinstance(record, Document)
    (record.text + record.doc_id + record.source + (record.metadata or "")).encode()
    return (*_key(record), record.metadata, record.messages)
