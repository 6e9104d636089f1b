from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.batch import ARRAYS, arrays_in, batch_digest, block_layout
from seqmesh.loader.errors import ShardError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.gather import UNSUPERVISED
from seqmesh.loader.planner import Step
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.packer.offload import WHOLE, Offload, memory_tokens
from seqmesh.packer.pieces import piece_ranges
from seqmesh.packer.plan import check_plan
from tests.support import documents_of, global_batches, long_tail, make_set, settings_for, walk

LENGTHS = long_tail(120, 60)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), LENGTHS, shard_tokens=300)


def steps_of(feed: Feed) -> Iterator[Step]:
    state = feed.start
    while (step := feed.step(state)) is not None:
        yield step
        state = step.after


def test_batches_over_the_capacity_say_how_much_to_offload(data: Path) -> None:
    """Two ranks of 16 tokens hold documents of 60; the global batches are those without offload."""
    offload = Offload(layers=8, token_cost=1)
    few = settings_for(
        data, ranks=2, capacity=16, max_document=60, offload=offload, cost=CostModel(linear=9, quadratic=2)
    )
    with pytest.raises(ValueError, match="max_document is 60: 2 ranks of 16 tokens hold 32; use"):
        replace(few, offload=None).check_mesh()
    with pytest.raises(ValueError, match="hold 32, with all that can be offloaded in time; use"):
        replace(few, offload=replace(offload, token_cost=10_000)).check_mesh()
    feed, ratios = Feed(few), set()
    for rank in range(2):
        for _, batch in walk(feed, rank):
            share = batch.offload_ratio * WHOLE
            assert memory_tokens(np.array([batch.tokens]), np.array([int(share)]), offload.layers)[0] <= few.capacity
            assert (share > 0) == (batch.tokens > few.capacity)
            ratios.add(batch.offload_ratio)
    assert len(ratios) > 3
    many = Feed(replace(few, ranks=4, offload=None))
    assert global_batches(feed) == global_batches(many)
    assert few.order() == many.settings.order()
    for step in steps_of(feed):
        check_plan(step.plan, step.documents.length, ranks=2, capacity=16, layers=offload.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "waves"}, "offload is set, mode is 'waves'"),
        ({"batching": "rows", "rows_per_step": 4, "tokens_per_step": None}, "offload is set, batching is 'rows'"),
        ({"pad_to": 8}, "offload and pad_to are both set"),
    ],
)
def test_offload_is_refused_where_no_plan_uses_it(data: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_for(data, offload=Offload(layers=4, token_cost=1), **changes)


@pytest.mark.parametrize("mode", ["free", "waves"])
@pytest.mark.parametrize(
    ("ranks", "capacity", "longest"),
    [(1, 64, None), (2, 64, 17), (3, 70, 40), (5, 128, 1), (2, 31, 60), (4, 13, 48), (4, 15, 55)],
)
def test_every_batch_holds_its_documents_with_shifted_labels(
    data: Path, ranks: int, capacity: int, longest: int | None, mode: str
) -> None:
    documents = documents_of(LENGTHS)
    settings = settings_for(data, ranks=ranks, capacity=capacity, max_document=longest, overlong="split", mode=mode)
    feed = Feed(settings)
    for rank in range(ranks):
        for _, batch in walk(feed, rank):
            assert batch.tokens == len(batch.input_ids) <= capacity
            bounds = batch.cu_seqlens.tolist()
            assert bounds[0] == 0
            assert bounds[-1] == batch.tokens
            assert batch.max_seqlen == max((b - a for a, b in pairwise(bounds)), default=0)
            for i, (a, b) in enumerate(pairwise(bounds)):
                start, length = int(batch.document_offsets[i]), int(batch.document_lengths[i])
                tokens = documents[batch.document_ids[i]][start : start + length].tolist()
                labels = [*tokens[1:], UNSUPERVISED]
                ranges = piece_ranges(length, int(batch.ring_sizes[i]), int(batch.ring_indices[i]))
                positions = [position for first, last in ranges for position in range(first, last)]
                assert batch.position_ids[a:b].tolist() == positions
                assert batch.input_ids[a:b].tolist() == [tokens[p] for p in positions]
                assert batch.labels[a:b].tolist() == [labels[p] for p in positions]


def test_pieces_of_a_ring_know_their_ring(data: Path) -> None:
    feed = Feed(settings_for(data, ranks=4, capacity=20, max_document=60))
    rings: dict[tuple[int, int], list[tuple[int, int, list[int]]]] = {}
    for rank in range(4):
        for _, batch in walk(feed, rank):
            ends = np.cumsum(batch.ring_sizes).tolist()
            for i, ring in enumerate(batch.ring_ids.tolist()):
                members = batch.ring_ranks[ends[i] - batch.ring_sizes[i] : ends[i]].tolist()
                assert members[batch.ring_indices[i]] == rank
                assert (ring == -1) == (members == [rank])
                if ring >= 0:
                    rings.setdefault((batch.step, ring), []).append((int(batch.ring_indices[i]), batch.wave, members))
    assert len(rings) > 5
    for pieces in rings.values():
        assert sorted(index for index, _, _ in pieces) == list(range(len(pieces)))
        assert len({wave for _, wave, _ in pieces}) == 1
        assert all(members == pieces[0][2] for _, _, members in pieces)
    steps = {batch.step: batch.rings_in_step for _, batch in walk(feed, 0)}
    assert sum(steps.values()) == len(rings)


def test_each_batch_names_the_plan_of_the_step_after(data: Path) -> None:
    batches = [batch for _, batch in walk(Feed(settings_for(data, ranks=2)), 0)]
    plans = {batch.step: batch.plan for batch in batches}
    assert all(batch.next_plan == plans.get(batch.step + 1, "") for batch in batches)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_token_reaches_exactly_one_rank_exactly_once_per_epoch(data: Path, ranks: int) -> None:
    feed = Feed(settings_for(data, ranks=ranks, max_document=12 * ranks, capacity=13, overlong="split", epochs=2))
    seen: Counter[tuple[int, int, int]] = Counter()
    for rank in range(ranks):
        for _, batch in walk(feed, rank):
            for i, document in enumerate(batch.document_ids.tolist()):
                start = int(batch.document_offsets[i])
                rows = batch.position_ids[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]].tolist()
                seen.update((batch.epoch, document, start + position) for position in rows)
    assert seen == Counter((e, d, t) for e in range(2) for d, length in enumerate(LENGTHS) for t in range(length))


def test_supervised_tokens_of_a_step_are_those_in_its_batches(data: Path) -> None:
    ranks = 3
    feed = Feed(settings_for(data, ranks=ranks, max_document=13, overlong="truncate"))
    counted: Counter[int] = Counter()
    stated: dict[int, int] = {}
    for rank in range(ranks):
        for _, batch in walk(feed, rank):
            counted[batch.step] += int((batch.labels != UNSUPERVISED).sum())
            assert stated.setdefault(batch.step, batch.supervised_tokens_in_step) == batch.supervised_tokens_in_step
    assert counted == stated


def test_every_rank_sees_every_step_and_its_end(data: Path) -> None:
    feed = Feed(settings_for(data, ranks=50))
    steps_of, empty = [], 0
    for rank in range(50):
        batches = [batch for _, batch in walk(feed, rank)]
        assert [b.step for b in batches if b.last_in_step] == sorted({b.step for b in batches})
        empty += sum(b.tokens == 0 and b.cu_seqlens.tolist() == [0] for b in batches)
        steps_of.append([b.step for b in batches if b.last_in_step])
    assert all(steps == steps_of[0] for steps in steps_of)
    assert empty > 0  # with 50 ranks somebody has nothing to do


def test_the_digest_tells_content_and_place_apart(data: Path) -> None:
    feed = Feed(settings_for(data))
    digests = [batch_digest(batch) for _, batch in walk(feed, 0)]
    assert len(set(digests)) == len(digests)
    again = feed.deliver(0, Position(feed.start))
    assert again is not None
    assert batch_digest(again.batch) == digests[0]
    again.batch.labels[3] += 1
    assert batch_digest(again.batch) != digests[0]


@given(st.sampled_from([7, 300, 70_000]), st.integers(0, 5))
def test_ids_of_either_width_come_out_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, vocab: int, extra: int
) -> None:
    folder = tmp_path_factory.mktemp("width")
    lengths = [4, 1, 9 + extra]
    feed = Feed(settings_for(make_set(folder, lengths, vocab=vocab), shuffle=False))
    _, batch = next(walk(feed, 0))
    found = sorted(batch.input_ids[a:b].tolist() for a, b in pairwise(batch.cu_seqlens))
    assert found == sorted(d.tolist() for d in documents_of(lengths, vocab=vocab))
    assert batch.input_ids.dtype == np.int32


def test_a_rank_or_wave_that_the_plan_lacks_is_refused(data: Path) -> None:
    feed = Feed(settings_for(data, ranks=2))
    with pytest.raises(ValueError, match="rank is 2: this loader serves ranks 0 to 1"):
        feed.deliver(2, Position(feed.start))
    with pytest.raises(ValueError, match="wave is 99: rank 0 has"):
        feed.deliver(0, Position(feed.start, 99))


@given(st.lists(st.integers(0, 1000), min_size=len(ARRAYS), max_size=len(ARRAYS)))
def test_the_arrays_of_a_block_are_aligned_and_do_not_overlap(lengths: list[int]) -> None:
    starts, size = block_layout(lengths)
    ends = [a + n * np.dtype(dtype).itemsize for a, n, dtype in zip(starts, lengths, ARRAYS.values(), strict=True)]
    assert all(number % 64 == 0 for number in (*starts, size))
    assert starts[0] == 0
    assert all(end <= start < end + 64 for end, start in zip(ends, (*starts[1:], size), strict=True))
    block = np.zeros(size, np.uint8)
    for (name, array), start, end in zip(arrays_in(block, lengths).items(), starts, ends, strict=True):
        assert array.dtype == ARRAYS[name]
        array[:] = -1
        assert block[start:end].all()
        assert np.count_nonzero(block) == end - start
        array[:] = 0


def test_a_block_that_is_too_small_is_refused(data: Path) -> None:
    lengths = [3] * len(ARRAYS)
    size = block_layout(lengths)[1]
    assert not arrays_in(bytes(size), lengths)["labels"].any()
    with pytest.raises(ValueError, match=f"the block has {size - 1} bytes: its arrays need {size}"):
        arrays_in(bytes(size - 1), lengths)
    with pytest.raises(ValueError, match="zip"):
        block_layout(lengths[:-1])
    draft = Feed(settings_for(data)).draft(0, Position(Feed(settings_for(data)).start))
    assert draft is not None
    with pytest.raises(ValueError, match=f"its arrays need {draft.outline.nbytes}"):
        draft.fill(np.zeros(draft.outline.nbytes - 64, np.uint8))


def test_a_draft_fills_any_block_with_the_batch_that_would_be_delivered(data: Path) -> None:
    feed = Feed(settings_for(data, ranks=4, capacity=20, max_document=60))
    ring = np.empty(1 << 20, np.uint8)
    position, end = Position(feed.start), 0
    while (draft := feed.draft(3, position)) is not None:
        delivery = feed.deliver(3, position)
        assert delivery is not None
        block = ring[end : end + draft.outline.nbytes]
        batch = draft.fill(block)
        assert batch_digest(batch) == batch_digest(delivery.batch)
        assert draft.next_position == delivery.next_position
        for name, array in arrays_in(bytes(block), draft.outline.lengths).items():
            assert np.shares_memory(getattr(batch, name), block) or not len(array)
            assert getattr(batch, name).tolist() == array.tolist()
        position, end = draft.next_position, end + draft.outline.nbytes
        assert position == delivery.next_position
    assert end > 10_000


@pytest.mark.parametrize("pad_to", [1, 8, 24])
@pytest.mark.parametrize("fields", [("labels", "position_ids"), ("position_ids",), ("labels",), ()])
def test_batches_hold_the_fields_that_were_asked_for_and_are_padded(
    data: Path, fields: tuple[str, ...], pad_to: int
) -> None:
    common: dict[str, Any] = {"ranks": 9, "capacity": 24, "max_document": 60}
    plain, feed = (Feed(settings_for(data, **common, **more)) for more in ({}, {"fields": fields, "pad_to": pad_to}))
    padding = {"input_ids": 0, "labels": UNSUPERVISED, "position_ids": 0}
    fresh = np.full(1 << 16, 7, np.uint8)  # so that what is not written shows
    empty = 0
    for rank in (0, 8):
        position = Position(feed.start)
        for _, expected in walk(plain, rank):
            draft = feed.draft(rank, position)
            assert draft is not None
            batch, position = draft.fill(fresh), draft.next_position
            empty += batch.tokens == 0
            assert batch.tokens == batch.cu_seqlens[-1] == expected.tokens
            assert batch.pad == max(-(-batch.tokens // pad_to), 1) * pad_to - batch.tokens
            for name in ARRAYS:
                rows = getattr(expected, name).tolist()
                if name in padding:
                    rows = [*rows, *[padding[name]] * batch.pad] if name in ("input_ids", *fields) else []
                assert getattr(batch, name).tolist() == rows
    assert empty > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_to": 0}, "pad_to is 0: must be at least 1"),
        ({"pad_to": 24}, "pad_to is 24: the capacity, 64, must be a multiple of it"),
        ({"pad_to": 128}, "pad_to is 128: the capacity, 64, must be a multiple of it"),
        ({"fields": ("labels", "labels")}, "fields is .'labels', 'labels'.: must be of labels, position_ids, each at"),
        ({"fields": ("input_ids",)}, "fields is .'input_ids'.: must be of labels, position_ids"),
    ],
)
def test_shapes_that_can_not_be_served_are_refused(data: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_for(data, **changes)


def test_the_shape_of_batches_is_no_part_of_their_order(data: Path) -> None:
    settings = settings_for(data, fields=("labels",), pad_to=8)
    assert settings.order() == settings_for(data).order()
    assert LoaderSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("vocab", [1000, 70_000])
def test_an_id_outside_the_vocabulary_is_refused_naming_file_and_document(tmp_path: Path, vocab: int) -> None:
    folder = make_set(tmp_path, [5, 6, 7, 8], vocab=vocab, shard_tokens=12)
    path = folder / "shard-00001.arrow"
    ids = documents_of([5, 6, 7, 8], vocab=vocab)[2].astype(np.uint16 if vocab < 1 << 16 else np.uint32)
    damaged = ids.copy()
    damaged[3] = vocab
    path.write_bytes(path.read_bytes().replace(ids.tobytes(), damaged.tobytes()))
    feed = Feed(settings_for(folder, shuffle=False, capacity=12, tokens_per_step=12))
    batches = walk(feed, 0)
    next(batches)
    with pytest.raises(ShardError, match=f"shard-00001.arrow: document 2 holds an id that is not below .* {vocab};"):
        next(batches)
