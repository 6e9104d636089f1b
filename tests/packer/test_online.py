import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.packer.online import OnlinePacker, packs

Options = dict[str, Any]


def textbook(lengths: list[int], capacity: int, options: Options) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Each document's bin, (document, bin that it finished), and the bins left open, oldest first."""
    max_wait, max_documents = options.get("max_wait"), options.get("max_documents")
    bin_of: list[int] = []
    closed: list[tuple[int, int]] = []
    bins: list[dict[str, int]] = []  # the open ones, oldest first
    for position, length in enumerate(lengths):
        fitting = [b for b in bins if b["room"] > 0 and b["room"] >= length]
        if not fitting:
            serial = len(set(bin_of))
            fitting = [{"serial": serial, "room": capacity, "documents": 0, "opened_at": position}]
            bins += fitting
        chosen = min(fitting, key=lambda b: (b["room"], b["serial"]))
        chosen["documents"] += 1
        chosen["room"] = 0 if chosen["documents"] == max_documents else chosen["room"] - length
        bin_of.append(chosen["serial"])
        fullest = min(bins, key=lambda b: (b["room"], b["serial"]))
        if max_wait is not None and position - bins[0]["opened_at"] >= max_wait:
            closed.append((position, bins.pop(0)["serial"]))
        elif fullest["room"] == 0 or len(bins) > options.get("max_open", 32):
            bins.remove(fullest)
            closed.append((position, fullest["serial"]))
    return bin_of, closed, [b["serial"] for b in bins]


@st.composite
def streams(draw: st.DrawFn, most: int = 60) -> tuple[list[int], int, Options]:
    """Lengths that the capacity holds, many of them equal, none, all of it, or about a half or a third."""
    capacity = draw(st.one_of(st.integers(1, 12), st.integers(1, 100), st.sampled_from([2**31 + 7, 2**40, 2**48])))
    special = sorted({0, 1, capacity // 3, capacity // 2, capacity // 2 + 1, capacity - 1, capacity})
    length = draw(
        st.sampled_from(
            [
                st.integers(0, capacity),
                st.integers(0, max(1, capacity // 8)),
                st.sampled_from([n for n in special if n <= capacity]),
                st.just(draw(st.integers(0, capacity))),
            ]
        )
    )
    options = {
        "max_open": draw(st.sampled_from([1, 2, 3, 5, 32, 33])),
        "max_wait": draw(st.sampled_from([None, None, 0, 1, 2, 3, 7, 20])),
        "max_documents": draw(st.sampled_from([None, None, 1, 2, 5])),
    }
    return draw(st.lists(length, max_size=most)), capacity, options


def push_all(packer: OnlinePacker, lengths: list[int], sizes: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Push in chunks of these sizes, the last chunk being the rest; closings by the stream position."""
    bin_of: list[int] = []
    closed: list[tuple[int, int]] = []
    at = 0
    for size in [*sizes, len(lengths)]:
        first = packer.seen
        assigned = packer.push(lengths[at : at + size])
        at += size
        bin_of += assigned.bin_of.tolist()
        closed += zip((first + assigned.closed_at).tolist(), assigned.closed.tolist(), strict=True)
    return bin_of, closed


@settings(max_examples=400)
@given(streams(), st.lists(st.integers(0, 9), max_size=8))
def test_any_chunking_gives_what_the_textbook_gives(case: tuple[list[int], int, Options], sizes: list[int]) -> None:
    lengths, capacity, options = case
    packer = OnlinePacker(capacity, **options)
    bin_of, closed = push_all(packer, lengths, sizes)
    left = packer.flush().tolist()
    assert (bin_of, closed, left) == textbook(lengths, capacity, options)
    assert packer.seen == packer.oldest == len(lengths)


@settings(max_examples=300)
@given(streams())
def test_the_promises_hold(case: tuple[list[int], int, Options]) -> None:
    lengths, capacity, options = case
    packer = OnlinePacker(capacity, **options)
    assigned = packer.push(lengths)
    left = packer.flush().tolist()
    bin_of, closed_at = assigned.bin_of.tolist(), assigned.closed_at.tolist()
    assert all(a < b for a, b in pairwise(closed_at))  # no document finishes two
    assert sorted(assigned.closed.tolist() + left) == list(range(len(set(bin_of))))
    members = {serial: [i for i, b in enumerate(bin_of) if b == serial] for serial in set(bin_of)}
    until = dict(zip(assigned.closed.tolist(), closed_at, strict=True))
    for serial, documents in members.items():
        assert sum(lengths[d] for d in documents) <= capacity
        assert len(documents) <= (options["max_documents"] or len(documents))
        assert documents[-1] <= until.get(serial, len(lengths))
        if options["max_wait"] is not None:
            assert until.get(serial, len(lengths) - 1) - documents[0] <= options["max_wait"]
    for position in range(len(lengths)):
        is_open = [s for s in members if members[s][0] <= position < until.get(s, len(lengths))]
        assert len(is_open) <= options["max_open"]


@settings(max_examples=150)
@given(streams(most=40))
def test_every_saved_state_goes_on_identically(case: tuple[list[int], int, Options]) -> None:
    lengths, capacity, options = case
    packer = OnlinePacker(capacity, **options)
    saved, closed_by = [json.dumps(packer.state())], [0]
    for length in lengths:
        closed_by.append(closed_by[-1] + len(packer.push([length]).closed))
        saved.append(json.dumps(packer.state()))
    bin_of, closed, left = textbook(lengths, capacity, options)
    for position, text in enumerate(saved):
        resumed = OnlinePacker.restore(json.loads(text))
        assert json.dumps(resumed.state()) == text
        assert push_all(resumed, lengths[position:], []) == (bin_of[position:], closed[closed_by[position] :])
        assert json.dumps(resumed.state()) == saved[-1]
        assert resumed.flush().tolist() == left


@given(streams())
def test_oldest_is_where_the_oldest_open_bin_begins(case: tuple[list[int], int, Options]) -> None:
    lengths, capacity, options = case
    packer = OnlinePacker(capacity, **options)
    for end in range(len(lengths) + 1):
        bin_of, _, still_open = textbook(lengths[:end], capacity, options)
        assert packer.oldest == (bin_of.index(still_open[0]) if still_open else end)
        packer.push(lengths[end : end + 1])


@given(streams(), st.integers(1, 9))
def test_packs_come_in_the_order_of_their_closing_with_all_documents(
    case: tuple[list[int], int, Options], size: int
) -> None:
    lengths, capacity, options = case
    chunks = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    found = [pack.tolist() for pack in packs(chunks, OnlinePacker(capacity, **options))]
    bin_of, closed, left = textbook(lengths, capacity, options)
    order = [serial for _, serial in closed] + left
    assert found == [[i for i, b in enumerate(bin_of) if b == serial] for serial in order]


def test_four_deliveries_resumed_after_each_of_them() -> None:
    state = OnlinePacker(5).state()
    seen = []
    for length in [3, 3, 3, 2]:
        packer = OnlinePacker.restore(json.loads(json.dumps(state)))
        assigned = packer.push([length])
        seen.append((assigned.bin_of.tolist(), assigned.closed.tolist()))
        state = packer.state()
    assert seen == [([0], []), ([1], []), ([2], []), ([0], [0])]
    assert OnlinePacker.restore(state).flush().tolist() == [1, 2]


def test_a_bin_that_fills_while_another_is_due_is_finished_by_the_next_document() -> None:
    packer = OnlinePacker(10, max_wait=2)
    assigned = packer.push([6, 5, 5])  # the third fills bin 1 and is the last that bin 0 waits for
    assert (assigned.closed.tolist(), assigned.closed_at.tolist()) == ([0], [2])
    assert packer.push([0]).closed.tolist() == [1]  # to which not even an empty document was added
    assert packer.flush().tolist() == [2]


def test_a_full_document_does_not_push_out_an_open_bin() -> None:
    packer = OnlinePacker(10, max_open=1)
    assigned = packer.push([4, 10, 6])
    assert assigned.bin_of.tolist() == [0, 1, 0]
    assert assigned.closed.tolist() == [1, 0]


def test_a_long_stream_matches_the_textbook() -> None:
    rng = np.random.default_rng(5)
    lengths = np.minimum(rng.lognormal(6.4, 1.5, 4000).astype(np.int64), 8192)
    for max_open in (1, 31, 32, 33, 64, 100):
        options = {"max_open": max_open, "max_wait": 300}
        expected = textbook(lengths.tolist(), 8192, options)
        packer = OnlinePacker(8192, **options)
        bin_of, closed = push_all(packer, lengths.tolist(), [1, 0, 1000, 7])
        assert (bin_of, closed, packer.flush().tolist()) == expected


def test_the_state_is_as_long_as_the_bins_are_many_and_of_plain_integers() -> None:
    packer = OnlinePacker(1000, max_open=7)
    packer.push(np.random.default_rng(0).integers(0, 600, 10_000))
    state = packer.state()
    assert sum(len(value) if isinstance(value, list) else 1 for value in state.values()) <= 4 * 7 + 7
    flat = [n for value in state.values() for n in (value if isinstance(value, list) else [value])]
    assert all(type(n) is int or n is None for n in flat)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64", ">i4"])
def test_any_integer_dtype_stride_and_read_only_input(dtype: str) -> None:
    lengths = np.array([3, 99, 3, 99, 3, 99, 2, 99], dtype)[::2]
    lengths.flags.writeable = False
    assert OnlinePacker(5).push(lengths).bin_of.tolist() == [0, 1, 2, 0]
    assert OnlinePacker(5).push(lengths[::-1]).bin_of.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1, 11, 12], "document 4 of the stream has 11 tokens: more than the capacity, 10"),
        ([1, -1], r"lengths\[1\] is -1: must be at least 0"),
        ([1.5], "dtype float64"),
        (np.array([2**63], np.uint64), "does not fit"),
    ],
)
def test_a_refused_chunk_changes_nothing(bad: Any, message: str) -> None:
    packer = OnlinePacker(10)
    packer.push([4, 7, 2])
    before = packer.state()
    with pytest.raises(ValueError, match=message):
        packer.push(bad)
    assert packer.state() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity is 0: must be an integer from 1 to"),
        ({"capacity": 2**48 + 1}, "capacity is 281474976710657"),
        ({"capacity": 8.0}, r"capacity is 8\.0"),
        ({"max_open": 0}, "max_open is 0: must be an integer from 1 to 4095"),
        ({"max_open": 4096}, "max_open is 4096"),
        ({"max_wait": -1}, "max_wait is -1"),
        ({"max_documents": 0}, "max_documents is 0"),
        ({"max_documents": True}, "max_documents is True"),
    ],
)
def test_bad_options_are_refused_and_named(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnlinePacker(**{"capacity": 10, **options})


def _of(**changes: Any) -> Callable[[Options], Options]:
    return lambda state: {**state, **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_of(version=2), "version is 2: must be 1"),
        (lambda _: {}, "version is None"),
        (_of(extra=1), "missing or unknown: extra"),
        (lambda state: {k: v for k, v in state.items() if k != "rooms"}, "missing or unknown: rooms"),
        (_of(capacity="10"), "capacity is '10'"),
        (_of(seen=-1), "seen is -1"),
        (_of(opened=5), "opened is 5"),
        (_of(rooms=[1]), "not of one length"),
        (_of(max_open=1), "not of one length"),
        (_of(rooms=[6, 11]), r"rooms\[1\] is 11: contradicts"),
        (_of(rooms=[6, -1]), r"rooms\[1\] is -1"),
        (_of(rooms=[6.0, 3.0]), "rooms has dtype float64"),
        (_of(rooms=None), "rooms has 0 dimensions"),
        (_of(serials=[1, 0]), r"serials\[1\] is 0"),
        (_of(serials=[0, 2]), r"serials\[1\] is 2"),
        (_of(opened_at=[1, 1]), r"opened_at\[1\] is 1"),
        (_of(opened_at=[0, 3]), r"opened_at\[1\] is 3"),
        (_of(max_wait=2), r"opened_at\[0\] is 0"),
        (_of(documents=[1, 0]), r"documents\[1\] is 0"),
        (_of(documents=[1, 3]), r"documents\[1\] is 3"),
        (_of(max_documents=2), r"rooms\[1\] is 1: contradicts"),
    ],
)
def test_malformed_states_are_refused(change: Callable[[Options], Options], message: str) -> None:
    packer = OnlinePacker(10)
    packer.push([4, 7, 2])
    with pytest.raises(ValueError, match=message):
        OnlinePacker.restore(change(packer.state()))


def test_packs_refuses_a_packer_whose_open_bins_it_does_not_know() -> None:
    packer = OnlinePacker(10)
    packer.push([10, 4])
    with pytest.raises(ValueError, match="bins open since document 1"):
        next(packs([[1]], packer))


def test_few_open_bins_waste_little() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(np.log(601), 1.507, 200_000).astype(np.int64), 1, 32_768)
    packer = OnlinePacker(32_768)
    bins = len(packer.push(lengths).closed) + len(packer.flush())
    assert bins <= 1.003 * np.ceil(lengths.sum() / 32_768)


def test_a_stream_goes_on_after_a_flush() -> None:
    packer = OnlinePacker(10)
    packer.push([4, 7])
    assert packer.flush().tolist() == [0, 1]
    assert packer.flush().tolist() == []
    assert packer.push([3]).bin_of.tolist() == [2]
    assert packer.oldest == 2
