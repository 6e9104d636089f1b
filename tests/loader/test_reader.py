"""Credit, acks and heartbeats of one reader, without sockets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.feed import Position
from seqmesh.loader.reader import MAX_HEARTBEATS, MAX_UNDER_WAY, Reader, Sent
from seqmesh.loader.stream import StreamState
from seqmesh.loader.wire import End, Heartbeat

START = Position(StreamState(seed=0))


def reader(**changes: Any) -> Reader:
    fields: dict[str, Any] = {"identity": b"", "client": "x", "rank": 0, "peer": 0, "peers": 1, "session": 1}
    return Reader(**fields | {"sequence": 0, "transport": "zmq", "position": START, "limit": 100} | changes)


def send(each: Reader, *sizes: int) -> None:
    for size in sizes:
        each.note_sent(Sent(size, 1, None), START)


def test_a_rank_that_never_answers_is_not_sent_heartbeats_for_ever() -> None:
    silent = reader()
    for _ in range(MAX_HEARTBEATS):
        assert silent.next_heartbeat() < float("inf")
        assert isinstance(silent.heartbeat(0), Heartbeat)
    assert silent.next_heartbeat() == float("inf")
    silent.unanswered = 0
    assert silent.next_heartbeat() < float("inf")
    silent.ended = True
    assert isinstance(silent.heartbeat(0), End)


def test_acks_may_come_twice_or_not_at_all_and_never_give_more_than_was_sent() -> None:
    rank = reader()
    for _ in range(3):
        assert rank.may_send(30)
        send(rank, 30)
    assert not rank.may_send(30)
    assert len(rank.acknowledge(2)) == 2  # that of batch 0 was lost
    assert len(rank.let_go(2)) == 2
    assert not rank.acknowledge(2)
    assert not rank.let_go(2)
    assert (rank.may_send(70), rank.may_send(71)) == (True, False)
    assert not rank.let_go(1)
    assert len(rank.acknowledge(900)) == 1
    assert len(rank.let_go(900)) == 1
    assert (rank.under_way, rank.used, rank.got) == ({}, 0, 3)


def test_what_is_held_gives_no_credit_back_until_it_is_let_go_of() -> None:
    rank = reader()
    send(rank, 40, 40)
    assert [each.size for each in rank.let_go(2, held=[0])] == [40]
    assert (rank.may_send(60), rank.may_send(61)) == (True, False)
    send(rank, 60)
    assert not rank.may_send(1)
    rank.let_go(3, held=[2])
    assert rank.used == 60


def test_one_batch_may_be_larger_than_all_the_credit_and_many_small_ones_are_few() -> None:
    rank = reader()
    assert rank.may_send(1000)
    send(rank, 1000)
    assert not rank.may_send(0)
    rank.let_go(1)
    send(rank, *[0] * MAX_UNDER_WAY)
    assert not rank.may_send(0)


@given(st.lists(st.tuples(st.sampled_from(["send", "ack"]), st.integers(0, 60), st.sets(st.integers(0, 30)))))
def test_credit_is_what_a_plain_list_of_batches_says(steps: list[tuple[str, int, set[int]]]) -> None:
    rank, sizes, gone = reader(), list[int](), set[int]()
    for what, number, held in steps:
        if what == "send" and rank.may_send(number):
            send(rank, number)
            sizes.append(number)
        elif what == "ack":
            rank.acknowledge(number)
            rank.let_go(number, held)
            gone |= {n for n in range(min(number, len(sizes))) if n not in held}
        kept = {n for n in range(len(sizes)) if n not in gone}
        assert set(rank.under_way) == kept
        assert rank.used == sum(sizes[n] for n in kept)


@pytest.mark.parametrize(("peers", "name"), [(1, "rank 0"), (2, "rank 0, peer 0")])
def test_a_reader_is_named_for_people(peers: int, name: str) -> None:
    assert reader(peers=peers).name == name
