"""Labels of documents with supervised spans, against a reference that asks of every token whether it lies in one."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.loader.errors import ShardError
from seqmesh.loader.feed import Feed
from seqmesh.loader.gather import UNSUPERVISED
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.spans import first_bad_span
from seqmesh.loader.supervised import supervised_counts
from seqmesh.packer.pieces import piece_ranges
from seqmesh.tools.shard_writer import write_shards
from tests.support import documents_of, rewrite_shard, settings_for, walk

Spans = list[tuple[int, int]]


@st.composite
def spans_of(draw: st.DrawFn, length: int) -> Spans | None:
    """Spans of a document, which may touch each other; None: all of it is supervised."""
    if draw(st.booleans()):
        return None
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=10)))
    spans = list(pairwise(cuts))  # all of them one after the other; then leave some out
    return [span for span in spans if draw(st.integers(0, 2))]


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], list[Spans | None]]:
    lengths = draw(st.lists(st.one_of(st.integers(1, 4), st.integers(1, 60)), min_size=1, max_size=14))
    return lengths, [draw(spans_of(length)) for length in lengths]


def expected_labels(tokens: Sequence[int], spans: Spans | None, offset: int, length: int) -> list[int]:
    """Of the piece of `length` tokens from `offset` on, a document of its own."""
    return [
        tokens[after] if spans is None or any(a <= after < b for a, b in spans) else UNSUPERVISED
        for after in range(offset + 1, offset + length)
    ] + [UNSUPERVISED]


@settings(max_examples=40, deadline=None)
@given(
    documents=sets(),
    mesh=st.sampled_from([(1, 64, 24), (3, 20, 40), (4, 9, 30), (2, 64, 1)]),
    overlong=st.sampled_from(["truncate", "split"]),
    mode=st.sampled_from(["free", "waves"]),
    shard_tokens=st.sampled_from([10, 50, 1000]),
)
def test_the_labels_of_a_step_are_the_supervised_tokens_of_its_spans(
    documents: tuple[list[int], list[Spans | None]],
    mesh: tuple[int, int, int],
    overlong: str,
    mode: str,
    shard_tokens: int,
) -> None:
    lengths, spans = documents
    ranks, capacity, longest = mesh
    ids = documents_of(lengths)
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), ids, vocab_size=1000, shard_tokens=shard_tokens, targets=spans)
        changes = {"ranks": ranks, "capacity": capacity, "max_document": longest, "overlong": overlong, "mode": mode}
        feed = Feed(settings_for(Path(folder), tokens_per_step=90, **changes))
        counted, stated = Counter[int](), Counter[int]()
        for rank in range(ranks):
            for _, batch in walk(feed, rank):
                stated[batch.step] = batch.supervised_tokens_in_step
                counted[batch.step] += int((batch.labels != UNSUPERVISED).sum())
                for i, document in enumerate(batch.document_ids.tolist()):
                    offset, length = int(batch.document_offsets[i]), int(batch.document_lengths[i])
                    labels = expected_labels(ids[document].tolist(), spans[document], offset, length)
                    ranges = piece_ranges(length, int(batch.ring_sizes[i]), int(batch.ring_indices[i]))
                    found = batch.labels[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]].tolist()
                    assert found == [labels[p] for first, last in ranges for p in range(first, last)]
        assert counted == stated
        shards = feed.shards
        whole = [expected_labels(ids[d].tolist(), spans[d], 0, n) for d, n in enumerate(lengths)]
        assert shards.supervised.tolist() == [sum(label != UNSUPERVISED for label in labels) for labels in whole]


def test_pieces_are_counted_from_their_spans_and_whole_documents_from_the_index(tmp_path: Path) -> None:
    write_shards(tmp_path, documents_of([10, 10, 10]), vocab_size=1000, targets=[[(0, 3), (5, 9)], None, []])
    shards = ShardSet(tmp_path)
    assert shards.supervised.tolist() == [6, 9, 0]
    pieces = np.array([[0, 0, 4], [0, 4, 6], [0, 5, 3], [0, 2, 2], [1, 3, 5], [2, 3, 5], [0, 0, 10], [0, 0, 1]])
    assert supervised_counts(shards, *np.ascontiguousarray(pieces.T)).tolist() == [2, 4, 2, 0, 4, 0, 6, 0]
    shards.supervised = np.array([77, 9, 0])
    assert supervised_counts(shards, *np.ascontiguousarray(pieces.T)).tolist() == [2, 4, 2, 0, 4, 0, 77, 0]


def test_a_set_without_spans_knows_it(tmp_path: Path) -> None:
    write_shards(tmp_path, documents_of([3, 4]), vocab_size=1000, targets=[None, None])
    shards = ShardSet(tmp_path)
    assert shards.spans(np.array([0, 1])) is None
    assert supervised_counts(shards, np.array([1]), np.array([1]), np.array([2])).tolist() == [1]


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_spans_of_shards_in_several_record_batches_and_of_sliced_columns_are_found(tmp_path: Path, cut: int) -> None:
    lengths = [4, 9, 2, 70, 5] * 4
    targets = [[(1, 3)], None, [], [(0, 1), (2, 5), (60, 70)], [(4, 5)]] * 4
    write_shards(tmp_path, documents_of(lengths), vocab_size=1000, targets=targets)
    batch = pa.ipc.open_file(str(tmp_path / "shard-00000.arrow")).get_batch(0)
    longer = (
        pa.Table.from_batches([batch.slice(7, 3), batch]).combine_chunks().to_batches()[0]
    )  # so that the slice below begins inside of validity bytes
    rewrite_shard(tmp_path, "shard-00000.arrow", [longer.slice(3, cut), longer.slice(3 + cut)])
    shards = ShardSet(tmp_path)
    numbers = np.random.default_rng(0).permutation(len(lengths))
    spans = shards.spans(numbers)
    assert spans is not None
    expected = [-1 if (pairs := targets[d]) is None else len(pairs) for d in numbers]
    assert spans.count.tolist() == expected
    counts = supervised_counts(shards, numbers, numbers * 0, np.array(lengths)[numbers] - 1)
    assert counts.tolist() == [{4: 2, 9: 7, 2: 0, 70: 12, 5: 0}[lengths[d]] for d in numbers]


def damaged(folder: Path, *, offsets: dict[int, int] | None = None, values: dict[int, int] | None = None) -> ShardSet:
    """A set whose second document has other list offsets or span ends than the writer gave it."""
    write_shards(folder, documents_of([5, 6, 7]), vocab_size=1000, targets=[[(0, 5)], [(1, 2), (3, 6)], None])
    batch = pa.ipc.open_file(str(folder / "shard-00000.arrow")).get_batch(0)
    column: Any = batch.column("targets")
    parts = [np.frombuffer(column.buffers()[1], np.int64).copy(), column.values.to_numpy().copy()]
    for array, changes in zip(parts, (offsets, values), strict=True):
        for place, value in (changes or {}).items():
            array[place] = value
    child = pa.array(parts[1], pa.int32())
    buffers = [column.buffers()[0], pa.py_buffer(parts[0].tobytes())]
    broken = pa.Array.from_buffers(column.type, len(column), buffers, children=[child])
    columns = [*batch.columns[:-1], broken]
    rewrite_shard(folder, "shard-00000.arrow", [pa.RecordBatch.from_arrays(columns, schema=batch.schema)])
    return ShardSet(folder)


@pytest.mark.parametrize(
    "damage",
    [
        {"offsets": {1: -(10**12)}},  # as a flipped bit would
        {"offsets": {1: 10**12}},
        {"offsets": {1: 3}},
        {"values": {2: -1}},
        {"values": {5: 7}},
        {"values": {4: 1}},
        {"values": {3: 1}},
    ],
)
def test_damaged_spans_are_refused_before_memory_is_read(tmp_path: Path, damage: dict[str, dict[int, int]]) -> None:
    shards = damaged(tmp_path, **damage)
    assert shards.spans(np.array([2])) is not None
    words = r"shard-00000.arrow: the spans \(targets\) of document 1 are not ascending ranges of its 6 tokens"
    with pytest.raises(ShardError, match=words):
        shards.spans(np.array([2, 1]))
    feed = Feed(settings_for(tmp_path, shuffle=False))
    with pytest.raises(ShardError, match="targets"):
        list(walk(feed, 0))


def test_offsets_beyond_all_spans_are_refused_at_once(tmp_path: Path) -> None:
    write_shards(tmp_path, documents_of([5, 6, 7]), vocab_size=1000, targets=[[(0, 5)], [(1, 2), (3, 6)], None])
    path = tmp_path / "shard-00000.arrow"
    before, after = (np.array([0, 2, 6, last], np.int64).tobytes() for last in (6, 10**12))
    assert path.read_bytes().count(before) == 1
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(ShardError, match=r"shard-00000.arrow: the column targets is damaged"):
        ShardSet(tmp_path)


@given(st.lists(st.integers(-2, 12), max_size=6), st.integers(0, 10))
def test_the_first_bad_span_is_found(flat: list[int], length: int) -> None:
    bad = [
        i
        for i, (start, end) in enumerate(zip(flat[::2], [*flat[1::2], -9][: len(flat[::2])], strict=True))
        if not (max([0, *flat[1 : 2 * i : 2]]) <= start < end <= length)
    ]
    assert first_bad_span(np.array(flat, np.int32), length) == (bad[0] if bad else -1)
