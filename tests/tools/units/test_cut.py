"""Units: every record is in one of them, whatever the files, the size of a unit and the place to begin at."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqmesh.tools.documents import BOM, read_records
from seqmesh.tools.inputs import InputFile, find_files
from seqmesh.tools.records import START, BadRecord, Cursor, Record
from seqmesh.tools.units import cut
from seqmesh.tools.units.cut import Unit, records_of, units


def lines(rng: random.Random, count: int) -> bytes:
    """Lines of every kind: good, bad, blank, empty and very long ones, with and without a last end of line."""
    kinds = ["not json\n", "\n", "  \r\n", '{"text": ""}\n', '{"text": 5}\n']
    made = [BOM.decode()] if rng.random() < 0.3 else []
    for number in range(count):
        text = "é" * int(rng.lognormvariate(2, 1.5)) + str(number)
        good = json.dumps({"text": text} | ({"id": number} if rng.random() < 0.3 else {}), ensure_ascii=False)
        made.append(rng.choice(kinds) if rng.random() < 0.3 else good + "\n")
    return "".join(made).encode().removesuffix(b"\n" * rng.randrange(2))


def table(rng: random.Random, path: Path) -> None:
    texts = [None if rng.random() < 0.1 else "x" * rng.randrange(60) for _ in range(rng.randrange(1, 60))]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=rng.choice([1, 7, 100]))


def some_files(rng: random.Random, folder: Path) -> tuple[InputFile, ...]:
    (folder / "texts").mkdir(parents=True)
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_bytes(b"\xff" if number == 2 else b"t" * rng.randrange(90))
    (folder / "a.jsonl").write_bytes(lines(rng, rng.randrange(50)))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(rng, rng.randrange(50))))
    table(rng, folder / "c.parquet")
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "d.jsonl").write_bytes(lines(rng, 3))
    names = ["a.jsonl", "b.jsonl.gz", "texts", "c.parquet", "empty.jsonl", "d.jsonl"]
    rng.shuffle(names)
    return find_files([str(folder / name) for name in names])


def shown(record: Record, before: int) -> tuple[object, ...]:
    """A record with its line counted from the beginning of the file, so many lines coming before its unit."""
    place, line = record.place, record.place.record + before
    numbered = not isinstance(record, BadRecord) and record.numbered
    name = None if isinstance(record, BadRecord) or numbered else record.doc_id
    content = record.reason if isinstance(record, BadRecord) else record.text
    return (place.reading.start.file, line, place.offset, content, name, record.size)


def count_of_lines(unit: Unit) -> int:
    """Lines that begin in the last stretch of a unit, counted in another way."""
    last = unit.readings[-1]
    if last.stop is None or last.file.kind != "jsonl":
        return 0
    data = Path(last.file.path).read_bytes()
    begins = [0, *(at + 1 for at, byte in enumerate(data) if byte == 10)]
    return sum(last.start.offset <= at < min(last.stop, len(data)) for at in begins)


def by_units(files: tuple[InputFile, ...], start: Cursor) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    before = 0
    for unit in units(files, start=start):
        first = unit.readings[0]
        if not first.continues:
            before = 0
        found.extend(
            shown(record, before * (record.place.reading.start.file == first.start.file)) for record in records_of(unit)
        )
        known = unit.readings[-1].start.record
        before = before * (len(unit.readings) == 1) + known + count_of_lines(unit)
    return found


@pytest.mark.parametrize("seed", range(25))
def test_units_hold_every_record_once_from_any_record_on(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    files = some_files(rng, tmp_path / "in")
    monkeypatch.setattr(cut, "UNIT_BYTES", rng.choice([1, 7, 50, 300, 5000]))
    monkeypatch.setattr(cut, "UNIT_RECORDS", rng.choice([1, 3, 1000]))
    everything = list(read_records(files))
    assert by_units(files, START) == [shown(record, 0) for record in everything]
    for number in rng.sample(range(len(everything)), min(4, len(everything))):
        rest = by_units(files, everything[number].place.cursor)
        assert rest == [shown(record, 0) for record in everything[number:]]


def test_units_are_of_bounded_size_and_say_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "abcdefghij"}\n' * 200)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abcdefghij"}\n' * 200))
    pq.write_table(pa.table({"text": ["x" * 100] * 60}), tmp_path / "c.parquet", row_group_size=4, use_dictionary=False)
    pq.write_table(pa.table({"text": ["x" * 100] * 60}), tmp_path / "d.parquet", use_dictionary=False)
    found = list(units(find_files(sorted(str(path) for path in tmp_path.iterdir()))))
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert all(unit.size <= 1000 + 23 for unit in found)
    assert [unit.position for unit in found] == sorted(unit.position for unit in found)
    assert found[-1].position == total
    names = [str(unit).removeprefix(f"{tmp_path}/") for unit in found]
    assert names[:2] == ["a.jsonl, bytes 0 to 1000", "a.jsonl, bytes 1000 to 2000"]
    assert "d.parquet, records 0 to 9" in names
    assert any(re.fullmatch(r"c\.parquet, rows \d+ to \d+", name) for name in names), names


def test_a_line_much_longer_than_a_unit_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 1 << 16)
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n{"text": "' + "x" * (1 << 20) + '"}\n{"text": "last"}\n')
    found = list(units(find_files([str(tmp_path / "a.jsonl")])))
    sizes = [[record.size for record in records_of(unit)] for unit in found]
    assert sizes == [[5, 1 << 20], *[[]] * 15, [4]]


def test_small_files_share_a_unit(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number:02d}.txt").write_text(str(number))
    (unit,) = units(find_files([str(tmp_path)]))
    assert len(unit.readings) == 50
    assert str(unit) == f"{tmp_path}/00.txt to {tmp_path}/49.txt (50 files)"


def test_damage_in_a_compressed_file_ends_the_units_after_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 500_000)
    rng = random.Random(3)
    data = b"".join(b'{"text": "%d"}\n' % rng.randrange(1 << 60) for _ in range(200_000))
    packed = gzip.compress(data)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    found = units(find_files([str(tmp_path / "a.jsonl.gz")]))
    read = 0
    with pytest.raises(ValueError, match=r"cannot read .*a\.jsonl\.gz after line \d+"):
        for unit in found:
            read += len(list(records_of(unit)))
    assert read > 20_000
