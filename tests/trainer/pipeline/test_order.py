"""The order of a stage's operations: complete, as torch's where replicas are alike, and nobody waits for ever."""

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from seqmesh.trainer.pipeline.order import Operation, Place, operations

Shape = tuple[int, int]  # stages, parts
SHAPES = st.sampled_from([(2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (2, 3), (3, 2), (4, 2), (4, 3), (5, 2)])


class Task(NamedTuple):
    """An operation of one process."""

    replica: int
    stage: int
    operation: Operation


@st.composite
def replicas(draw: st.DrawFn, most: int = 4) -> list[list[bool]]:
    """Which micro-batches each replica has: of any number, with any of them empty."""
    rarely_empty = st.sampled_from([True, True, True, False])
    return draw(st.lists(st.lists(rarely_empty, max_size=7), min_size=1, max_size=most))


def places(shape: Shape) -> list[Place]:
    stages, parts = shape
    return [Place(stage=stage, stages=stages, parts=parts) for stage in range(stages)]


@given(SHAPES, st.lists(st.booleans(), max_size=20))
def test_every_operation_is_there_once_and_no_more_are_in_flight_than_was_said(
    shape: Shape, present: list[bool]
) -> None:
    for place in places(shape):
        order = operations(present, place)
        mine = [number for number, there in enumerate(present) if there]
        expected = {Operation(m, part, back) for m in mine for part in range(shape[1]) for back in (False, True)}
        assert Counter(order) == Counter(expected)
        flying = most = 0
        for each in order:
            flying += -1 if each.backward else 1
            most = max(most, flying)
        assert most <= place.ahead + 1
        if len(present) >= 2 * shape[0] and all(present):
            assert most == place.ahead + 1


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 2), (4, 2), (4, 3)])
def test_replicas_alike_have_torchs_order(shape: Shape) -> None:
    for count in (shape[0], 3 * shape[0]):
        for place in places(shape):
            order = operations([True] * count, place)
            assert [(place.virtual(each.part), each.backward, each.batch) for each in order] == torchs_order(
                place, count
            )


def torchs_order(place: Place, count: int) -> list[tuple[int, bool, int]]:
    """(virtual stage, backward, micro-batch) of torch.distributed.pipelining, which no group is needed to ask."""
    schedule: Any = SimpleNamespace(
        _num_stages=place.stages,
        pp_group_size=place.stages,
        n_local_stages=place.parts,
        microbatches_per_round=place.stages,
        _n_microbatches=count,
    )
    if place.parts == 1:
        actions = Schedule1F1B._get_pipeline_order(schedule)[place.stage]  # type: ignore[index]
    else:
        actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, place.stage)
    found, counted = [], Counter[tuple[int, bool]]()
    for each in actions:
        if each is None or each.computation_type.value not in ("F", "B"):
            continue
        backward = each.computation_type.value == "B"
        number = counted[each.stage_index, backward]  # what 1F1B says itself begins with 1 on its last stage
        assert place.parts == 1 or each.microbatch_index == number
        counted[each.stage_index, backward] += 1
        found.append((each.stage_index, backward, number))
    return found


@given(SHAPES, replicas(), st.randoms(use_true_random=False))
def test_replicas_that_differ_and_share_documents_never_wait_for_ever(
    shape: Shape, present: list[list[bool]], random: Any
) -> None:
    """Event simulation: rings connect replicas of any micro-batch; all that are connected do it together."""
    together = {m: groups_of(m, present, random) for m in range(max(map(len, present)))}
    left = {
        (replica, place.stage): operations(mine, place)
        for place in places(shape)
        for replica, mine in enumerate(present)
    }
    done: set[Task] = set()
    while any(left.values()):
        ready = {
            process: order[0]
            for process, order in left.items()
            if order and waited_for(Task(*process, order[0]), shape) <= done
        }
        begun = [
            (replica, stage)
            for (replica, stage), operation in ready.items()
            if all(ready.get((other, stage)) == operation for other in together[operation.batch][replica])
        ]
        assert begun, f"all wait: {left}"
        done |= {Task(*process, left[process].pop(0)) for process in begun}


def groups_of(batch: int, present: list[list[bool]], random: Any) -> dict[int, list[int]]:
    """Of each replica that has this micro-batch, those that do it with it; two of three meet."""
    having = [replica for replica, mine in enumerate(present) if batch < len(mine) and mine[batch]]
    group = {replica: random.choice([-1, -1, replica]) for replica in having}
    return {replica: [other for other in having if group[other] == group[replica]] for replica in having}


def waited_for(task: Task, shape: Shape) -> set[Task]:
    """What has to be done on other stages, or was to be done on its own, before a task can begin."""
    stages, parts = shape
    batch, part, backward = task.operation
    virtual, last = part * stages + task.stage, stages * parts - 1
    source = virtual + 1 if backward else virtual - 1
    if virtual == last and backward:
        return {Task(task.replica, task.stage, Operation(batch, part))}
    if source < 0:
        return set()
    return {Task(task.replica, source % stages, Operation(batch, source // stages, backward))}


@given(SHAPES, st.lists(st.booleans(), max_size=20))
def test_messages_arrive_in_the_order_in_which_they_are_expected(shape: Shape, present: list[bool]) -> None:
    """Rows and gradients together, from one process to another: what is sent has no name."""
    sent, expected = defaultdict[tuple[int, int], list[Any]](list), defaultdict[tuple[int, int], list[Any]](list)
    for place in places(shape):
        for each in operations(present, place):
            virtual, step = place.virtual(each.part), -1 if each.backward else 1
            for target, message in ((virtual + step, "sent"), (virtual - step, "expected")):
                if not 0 <= target < shape[0] * shape[1]:
                    continue
                if message == "sent":
                    sent[place.stage, target % shape[0]].append((each.batch, each.backward, target))
                else:
                    expected[target % shape[0], place.stage].append((each.batch, each.backward, virtual))
    assert sent == expected
