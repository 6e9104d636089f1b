import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.storage.agenda import Agenda, Held

PARTS = range(7)
Some = st.sets(st.sampled_from(PARTS))


@pytest.fixture
def agenda() -> Iterator[Agenda]:
    agenda = Agenda()
    yield agenda
    for number in list(agenda.held):
        agenda.drop(number)


def held(size: int, used: bool = False) -> Held:
    return Held(os.open("/dev/null", os.O_RDONLY), size, used)


@given(st.permutations(PARTS), st.integers(0, 7), Some, Some, Some)
def test_what_is_next(order: list[int], count: int, here: set[int], busy: set[int], failed: set[int]) -> None:
    for line in (set[int](), {n for n in busy if n % 2}):
        agenda = Agenda(busy=set(busy), line=line)
        agenda.plan(order[:count], 0.0)
        agenda.held = {number: Held(-1, 1) for number in here}
        agenda.failed = {number: (Exception(), 1.0) for number in failed}
        expected = None
        for number in order[:count]:
            if number in line:
                break
            if number not in here | busy | failed:
                expected = number
                break
        assert agenda.next() == expected
        for number in busy:
            wanted = number in order[:count]
            sooner = wanted and expected is not None and order.index(expected) < order.index(number)
            assert agenda.goes_on(number) == (wanted and not sooner)
        agenda.closed = True
        assert agenda.next() is None
        assert not any(agenda.goes_on(number) for number in busy)


def test_a_plan_lets_go_of_what_nobody_wants_or_uses(agenda: Agenda) -> None:
    agenda.held = {0: held(1), 1: held(1), 2: held(1, used=True)}
    agenda.missed = {3: 1.0, 4: 1.0}
    agenda.failed = {5: (Exception(), 1.0), 6: (Exception(), 3.0)}
    agenda.plan([1, 3, 5, 6, 1], retry_before=2.0)
    assert set(agenda.held) == {1, 2}
    assert agenda.missed == {3: 1.0}
    assert set(agenda.failed) == {6}
    assert agenda.rank == {1: 0, 3: 1, 5: 2, 6: 3}
    assert [agenda.missed_for(number, 4.0) for number in (3, 4)] == [3.0, 0.0]


def test_what_is_given_up_for_what(agenda: Agenda) -> None:
    agenda.held = {0: held(1, used=True), 1: held(10), 2: held(100), 3: held(1000)}
    agenda.plan([0, 1, 4, 2, 3], retry_before=0.0)
    assert agenda.least_urgent(4) == 3
    agenda.drop(3)
    assert agenda.least_urgent(4) == 2
    agenda.drop(2)
    assert agenda.least_urgent(4) is None
    assert sorted(agenda.in_the_way(4)) == [1, 10]
    agenda.line = {4, 3}
    assert agenda.is_first_in_line(4)
    assert not agenda.is_first_in_line(3)
    assert agenda.is_over([0, 1])
    assert not agenda.is_over([1, 4])
    agenda.failed[4] = (Exception(), 1.0)
    assert agenda.is_over([1, 4, 3])
