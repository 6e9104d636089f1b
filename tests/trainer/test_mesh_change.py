"""One job whose mesh changes on the way, beside one that is not changed, and what its processes exchange meanwhile.

The whole trainer on four processes: the loop, one loader process, checkpoints.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.embedded import Loader
from seqmesh.trainer import loop, train
from seqmesh.trainer.config import load_config
from seqmesh.trainer.job import Job
from seqmesh.trainer.passes import Batch
from tests.jobs import VOCAB, logged, write_job
from tests.ranks import new_store, run_ranks
from tests.recording import Collective, Trace, switch_on, traced
from tests.stores import CALLS, Calls, asked, count_calls
from tests.support import long_tail, make_set

STEPS = 6
LOADER = {"tokens_per_step": 128, "capacity": 32, "max_document": 60, "overlong": "split", "seed": 5}
MODEL = {"vocab_size": VOCAB, "width": 16, "layers": 4, "heads": 4, "kv_heads": 2}
MESHES = (
    ["parallel={tensor: 2}", "sharding=parameters", "steps=2"],
    ["loader.mode=waves", "steps=4"],
    ["parallel={stages: 2, parts: 2}", "sharding=optimizer", f"steps={STEPS}"],
)
Documents = set[tuple[int, int, int]]  # row of the set, offset there, length


@dataclass
class Ran:
    """Of one process and one start of a job. calls: of the store, before the first step. documents: of which it had a
    piece, in each step; batches: the digests of what it was served."""

    trace: Trace = field(default_factory=Trace)
    calls: Calls = field(default_factory=Counter)
    documents: dict[int, Documents] = field(default_factory=dict)
    batches: list[str] = field(default_factory=list)

    def note(self, batch: Batch) -> str:
        """In place of the loop's `batch_digest`."""
        columns = (batch.document_ids, batch.document_offsets, batch.document_lengths)
        self.documents.setdefault(batch.step, set()).update(zip(*(c.tolist() for c in columns), strict=True))
        self.batches.append(batch_digest(batch))
        return self.batches[-1]

    def run(self, job: Job) -> None:
        """In place of the trainer's `run`."""
        self.calls = asked()
        with traced() as self.trace:
            loop.run(job)


def watch() -> None:
    switch_on()
    count_calls()


def run_starts(starts: Sequence[tuple[Path, list[str]]], ports: Sequence[int]) -> list[Ran]:
    """A process of four, in each start of a job. ports: of a store for each. The first start has a loader process, the
    others read by themselves, which is quicker here."""
    every = []
    for number, ((job, overrides), port) in enumerate(zip(starts, ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        CALLS.clear()
        ran = Ran()
        with (
            patch.object(train, "run", ran.run),
            patch.object(loop, "batch_digest", ran.note),
            patch.object(train, "Loader", partial(Loader, mode="inline") if number else Loader),
        ):
            train.train(load_config(job, overrides), say=lambda _line: None)
        every.append(ran)
    return every


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that is to change its mesh, one that is not."""
    data = make_set(tmp_path_factory.mktemp("set"), long_tail(80, 60), vocab=VOCAB)
    common = {"loader": LOADER | {"data": str(data)}, "model": MODEL, "dtype": "float64", "ranks": 4, "steps": STEPS}
    common |= {"optim": {"lr": 1e-2, "final": 1.0}, "peak_flops": 1e12, "gc_every": None}  # which take time
    changed, whole = (write_job(tmp_path_factory.mktemp(name), data, **common) for name in ("changed", "whole"))
    return changed, whole


@pytest.fixture(scope="module")
def starts(jobs: tuple[Path, Path]) -> list[list[Ran]]:
    """By start, then by process: the last is that of the job that does not change."""
    changed, whole = jobs
    every = [*((changed, mesh) for mesh in MESHES), (whole, [])]
    stores = [new_store() for _ in every]
    ran = run_ranks(run_starts, 4, every, [store.port for store in stores], before=watch, join=False)
    return [list(processes) for processes in zip(*ran, strict=True)]


def test_a_job_that_changes_its_mesh_keeps_its_loss_curve_and_its_global_batches(
    jobs: tuple[Path, Path], starts: list[list[Ran]]
) -> None:
    changed, whole = (logged(job) for job in jobs)
    assert list(changed) == list(whole) == list(range(1, STEPS + 1))
    for step, record in whole.items():
        assert changed[step]["loss"] == pytest.approx(record["loss"], rel=1e-9)
        assert changed[step]["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-9)
    assert sum(record["rings"] for record in changed.values()) > 3
    documents = [union(processes) for processes in starts]
    assert documents[0] | documents[1] | documents[2] == documents[3]
    assert [sorted(each) for each in documents] == [[0, 1], [2, 3], [4, 5], [0, 1, 2, 3, 4, 5]]


def union(processes: Sequence[Ran]) -> dict[int, Documents]:
    """The global batches, by step."""
    return {
        step: set[tuple[int, int, int]]().union(*(ran.documents[step] for ran in processes))
        for step in processes[0].documents
    }


def test_all_processes_of_a_replica_are_served_the_same_batches(starts: list[list[Ran]]) -> None:
    for processes, replicas in zip(starts, ([0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]), strict=True):
        served = [ran.batches for ran in processes]
        assert [served.index(batches) for batches in served] == [replicas.index(replica) for replica in replicas]


def test_members_of_every_group_exchange_the_same_in_the_same_order_and_no_two_can_wait_for_each_other(
    starts: list[list[Ran]],
) -> None:
    """No group is made under way: `traced` checks that."""
    axes = (("tensor", "data"), (), ("data", "stages", "returns"), ())
    for processes, expected in zip(starts, axes, strict=True):
        traces = [ran.trace for ran in processes]
        groups = set().union(*(trace.groups for trace in traces))
        assert {name for name, *_ in groups} == {"default_pg", *expected}
        for name, *members in groups:
            orders = [of_group(traces[int(member)], (name, *members)) for member in members]
            assert orders == [orders[0]] * len(members)
            assert orders[0] or name in ("stages", "returns")  # where there are messages alone
        check_no_circle([trace.collectives for trace in traces])


def test_nothing_but_the_groups_asks_the_store_before_the_first_step(starts: list[list[Ran]]) -> None:
    """Not the loader's process, nor a checkpoint that is resumed from."""
    for ran in (ran for processes in starts for ran in processes):
        assert ran.calls == dict.fromkeys(("set", "multi_get"), len(ran.trace.groups))


def of_group(trace: Trace, group: tuple[str, ...]) -> list[Collective]:
    found = [each for each in trace.collectives if each[0] == group]
    numbers = [number for _, number, _ in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    return found


def check_no_circle(orders: Sequence[Sequence[Collective]]) -> None:
    """Each process ends one exchange before it begins the next: there must be an order of all of them that is every
    process's own."""
    sorter = TopologicalSorter[Collective]()
    for order in orders:
        for before, after in pairwise(order):
            sorter.add(after, before)
    assert len(list(sorter.static_order())) == len(set().union(*orders))


def test_what_one_process_sends_another_takes_in_the_same_order(starts: list[list[Ran]]) -> None:
    ringed, piped = {"default_pg"}, {"default_pg", "stages", "returns"}
    for processes, expected in zip(starts, (ringed, ringed, piped, ringed), strict=True):
        sent = {way: sizes for ran in processes for way, sizes in ran.trace.sent.items()}
        received = {way: sizes for ran in processes for way, sizes in ran.trace.received.items()}
        assert sent == received
        assert {group[0] for group, _, _ in sent} == expected
