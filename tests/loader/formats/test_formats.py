"""Every format gives the same batches as the same documents in shards, byte for byte."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.catalog import Reading
from seqmesh.loader.errors import ShardError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.formats import megatron
from seqmesh.loader.mixture import Mixture, SourceOptions
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.storage.cache import Cache
from tests.formats import table_of, write_all, write_arrow, write_megatron, write_parquet
from tests.support import VOCAB, documents_of, long_tail, settings_for, walk

LENGTHS = long_tail(60, 120)
DOCUMENTS = documents_of(LENGTHS)
READING = Reading(vocab_size=VOCAB)
SOURCES = [("web", "code", "notes")[n % 3] for n in range(60)]
TARGETS = [(None, [(0, 1)], [], [(0, length)])[n % 4] for n, length in enumerate(LENGTHS)]
MIXTURE = Mixture(sources={name: SourceOptions(weight=n) for n, name in enumerate(("notes", "code", "web"))})


def digests(data: Path | str, **changes: Any) -> list[str]:
    feed = Feed(settings_for(Path(data), **{"vocab_size": VOCAB} | changes))
    found = [batch_digest(batch) for rank in range(feed.settings.ranks) for _, batch in walk(feed, rank)]
    feed.shards.close()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 2, "max_document": 120},
        {"tokens_per_step": None, "batching": "rows", "rows_per_step": 2, "capacity": 128, "window": 50},
        {"overlong": "split", "shuffle": False, "max_document": 10},
    ],
)
def test_all_formats_give_the_same_batches(tmp_path: Path, changes: dict[str, Any]) -> None:
    places = write_all(tmp_path, DOCUMENTS, vocab=VOCAB)
    expected = digests(places["seqmesh"], **changes)
    assert len(expected) > 10
    for name in ("parquet", "huggingface", "megatron"):
        assert digests(places[name], **changes) == expected, name


def test_sources_and_supervised_spans_are_the_same(tmp_path: Path) -> None:
    places = write_all(tmp_path, DOCUMENTS, vocab=VOCAB, sources=SOURCES, targets=TARGETS)
    changes = {"max_document": 50, "capacity": 50, "overlong": "truncate", "mixture": MIXTURE}
    expected = digests(places["seqmesh"], **changes)
    assert digests(places["parquet"], **changes) == expected
    assert digests(places["huggingface"], **changes) == expected


@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("lists", ["list", "large_list", "fixed"])
def test_lists_of_any_type_are_read(tmp_path: Path, kind: str, lists: str) -> None:
    ids = getattr(pa, kind)()
    documents = documents_of([5] * 20 if lists == "fixed" else [3, 9, 1, 40], vocab=100)
    types = {"list": pa.list_(ids), "large_list": pa.large_list(ids), "fixed": pa.list_(ids, 5)}
    table = table_of(documents, types[lists])
    for folder in (write_arrow(tmp_path / "arrow", table), write_parquet(tmp_path / "parquet", table)):
        shards = ShardSet(folder, reading=Reading(vocab_size=100))
        assert [shards.tokens(n).tolist() for n in range(len(shards))] == [each.tolist() for each in documents]
        assert digests(folder, shuffle=False) == digests(
            write_arrow(tmp_path / folder.name / "x", table), shuffle=False
        )


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64"])
def test_a_negative_id_is_refused_whatever_its_type(tmp_path: Path, kind: str) -> None:
    documents = documents_of([4, 4, 4], vocab=100)
    documents[1][2] = -1
    settings = settings_for(write_megatron(tmp_path / "text", documents, kind), vocab_size=1 << 30, shuffle=False)
    feed = Feed(settings)
    with pytest.raises(ShardError, match=r"text.bin: document 1 holds an id"):
        feed.deliver(0, Position(feed.start))
    table = table_of(documents, pa.list_(getattr(pa, kind)()))
    with pytest.raises(ShardError, match=r"part-0.parquet: row 1 holds the id -1: must be below vocab_size, 100"):
        ShardSet(write_parquet(tmp_path / "parquet", table, files=1), reading=Reading(vocab_size=100))


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]),
    sequences=st.integers(1, 3),
)
def test_megatron_documents_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dtype: str, sequences: int
) -> None:
    documents = documents_of(lengths, vocab=100)
    folder = tmp_path_factory.mktemp("megatron")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "PART_BYTES", 40)
        shards = ShardSet(write_megatron(folder / "text", documents, dtype, sequences=sequences), reading=READING)
    assert [shards.tokens(n).tolist() for n in range(len(shards))] == [each.tolist() for each in documents]
    assert shards.part_first[-1] == len(documents)
    wanted = np.arange(len(documents))
    assert shards.places(wanted)[1].tolist() == [np.dtype(dtype).itemsize] * len(documents)


def test_the_library_s_own_saved_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"input_ids": [each.tolist() for each in DOCUMENTS], "source": SOURCES})
    made.save_to_disk(tmp_path / "saved", num_shards=4)
    made.select(range(10, 50)).save_to_disk(tmp_path / "chosen")
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "splits")
    shards = ShardSet(tmp_path / "saved", reading=READING)
    assert [shards.tokens(n).tolist() for n in range(len(shards))] == [each.tolist() for each in DOCUMENTS]
    assert [shards.sources[code] for code in shards.source_codes()] == SOURCES
    chosen = ShardSet(tmp_path / "chosen", reading=READING)
    assert [chosen.tokens(n).tolist() for n in range(len(chosen))] == [each.tolist() for each in DOCUMENTS[10:50]]
    with pytest.raises(ValueError, match="holds several splits: name the folder of one"):
        ShardSet(tmp_path / "splits", reading=READING)


def test_one_file_or_dataset_of_a_folder_can_be_named(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "parquet", table_of(DOCUMENTS))
    assert len(ShardSet(folder / "part-1.parquet", reading=READING)) == 20
    for number in range(2):
        write_megatron(tmp_path / "text" / f"part{number}", DOCUMENTS[number * 30 : number * 30 + 30])
    for name in ("part1", "part1.bin", "part1.idx"):
        shards = ShardSet(tmp_path / "text" / name, reading=READING)
        assert shards.tokens(0).tolist() == DOCUMENTS[30].tolist()
    assert [n.tolist() for n in map(ShardSet(tmp_path / "text", reading=READING).tokens, range(60))] == [
        each.tolist() for each in DOCUMENTS
    ]


def test_what_is_no_set_is_said_to_be_none(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "not there", tmp_path / "x.parquet"):
        with pytest.raises(FileNotFoundError, match=r"is not a finished shard set: it has no manifest.json; nor is it"):
            ShardSet(place, reading=READING)


def test_a_vocabulary_must_be_said_where_nothing_else_says_it(tmp_path: Path) -> None:
    places = write_all(tmp_path, DOCUMENTS, vocab=VOCAB)
    for name in ("parquet", "huggingface", "megatron"):
        with pytest.raises(ValueError, match="vocab_size is missing: "):
            ShardSet(places[name])
        with pytest.raises(ValueError, match=f"verify is true: .* is {name}: it has no checksums"):
            Feed(settings_for(places[name], vocab_size=VOCAB, verify=True, max_document=120, capacity=120))
    with pytest.raises(ValueError, match=f"vocab_size is 7: .* has a vocabulary of {VOCAB}"):
        ShardSet(places["seqmesh"], reading=Reading(vocab_size=7))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"tokens": [[1]]}), "has no column 'input_ids'; it has tokens"),
        (pa.table({"input_ids": [1, 2]}), "input_ids is int64: must be a list of integers"),
        (pa.table({"input_ids": [["a"]]}), r"input_ids is list<.*string>: must be a list of integers"),
        (pa.table({"input_ids": [[1], None]}), "null"),
        (pa.table({"input_ids": [[1], [2, None]]}), "null"),
        (pa.table({"input_ids": [[1]], "source": [1]}), "source is int64: must be names"),
        (pa.table({"input_ids": [[1]], "source": pa.array([None], pa.string())}), "source has nulls: must be names"),
        (pa.table({"input_ids": [[1, 2]], "targets": [[1, 3]]}), r"spans \(targets\) of row 0"),
    ],
)
def test_unfit_columns_are_refused_with_file_and_reason(tmp_path: Path, table: pa.Table, message: str) -> None:
    for folder in (write_arrow(tmp_path / "a", table, files=1), write_parquet(tmp_path / "p", table, files=1)):
        with pytest.raises(ShardError, match=rf"(part-0.parquet|of-00001.arrow): .*{message}"):
            ShardSet(folder, reading=READING)


def test_a_stream_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "arrow", table_of(DOCUMENTS), files=1)
    path = folder / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ShardError, match=r"data-00000-of-00001.arrow: (is cut short|can not be read)"):
            ShardSet(folder, reading=READING)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: b"", "is not the index of a Megatron dataset"),
        (lambda index: index[:9] + b"\x02" + index[10:], "has version 2"),
        (lambda index: index[:17] + b"\x07" + index[18:], "ids of type 7"),
        (lambda index: index[:-9], "too few for 60 sequences"),
        (lambda index: index[:34] + b"\x7f" + index[35:], "its sequences are not one after the other"),
        (lambda index: index[:-8] + b"\x01" + index[-7:], "its documents are not ranges of its 60 sequences"),
    ],
)
def test_a_damaged_megatron_index_is_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    prefix = write_megatron(tmp_path / "text", DOCUMENTS)
    path = Path(f"{prefix}.idx")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ShardError, match=rf"text.idx: .*{message}"):
        ShardSet(prefix, reading=READING)


def test_a_bin_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "text", DOCUMENTS)
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-4])
    with pytest.raises(ShardError, match=r"text.idx: its sequences are not one after the other in a .bin of \d+ bytes"):
        ShardSet(prefix, reading=READING)


def test_bad_files_are_left_out_where_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = write_all(tmp_path, DOCUMENTS, vocab=VOCAB)
    spoilt = {
        "seqmesh": "shard-00001.arrow",
        "parquet": "part-1.parquet",
        "huggingface": "data-00001-of-00003.arrow",
    }
    for name, file in spoilt.items():
        path = places[name] / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        whole = ShardSet(places["megatron"], reading=READING)
        with pytest.raises(ShardError, match=file):
            ShardSet(places[name], reading=READING)
        shards = ShardSet(places[name], reading=Reading(vocab_size=VOCAB, bad_shards="quarantine"))
        assert list(shards.bad_shards) == [file]
        assert f"{file}" in caplog.text and "left out: " in caplog.text
        caplog.clear()
        assert shards.fingerprint != whole.fingerprint
        changes = {"bad_shards": "quarantine", "max_document": 120, "capacity": 120, "vocab_size": VOCAB}
        feed = Feed(settings_for(places[name], **changes))
        served = sorted(d for _, batch in walk(feed, 0) for d in batch.document_ids.tolist())
        kept = [n for n in range(len(shards)) if shards.usable is None or shards.usable[n]]
        assert served == kept and 0 < len(kept) < 60
        kept_tokens = [feed.shards.tokens(n).tolist() for n in kept]
        assert all(any(tokens == each.tolist() for each in DOCUMENTS) for tokens in kept_tokens)


def test_the_copy_of_a_changed_file_is_not_used_again(tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path / "cache")
    folder = write_parquet(tmp_path / "parquet", table_of(DOCUMENTS), files=1)
    first = ShardSet(folder, reading=READING, cache=cache)
    write_parquet(tmp_path / "other", table_of(DOCUMENTS[::-1]), files=1)
    (tmp_path / "other" / "part-0.parquet").replace(folder / "part-0.parquet")
    second = ShardSet(folder, reading=READING, cache=cache)
    assert first.fingerprint != second.fingerprint
    assert second.tokens(0).tolist() == DOCUMENTS[-1].tolist()
    assert first.tokens(0).tolist() == DOCUMENTS[0].tolist()
