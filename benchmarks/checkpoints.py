"""`seqmesh bench checkpoint`: how long a step waits for a checkpoint, and how long it takes.

Real ranks (gloo), one thread each, save the same tensors in one stage, where the step waits for the disk, and in two;
and load them. Parameters are whole on every rank; the optimizer's state is, too, or its rows are spread. Products of
matrices stand for steps: alone, and while a checkpoint is written. torch's own `save` and `async_save` make no
checksums. Files go to the disk, and to memory, where a save takes the least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import TypeAdapter

from seqmesh.benchmarks.harness import Results, Spread, chosen_peers, ratio, row
from seqmesh.benchmarks.ranks import ask_ranks
from seqmesh.benchmarks.shards import scratch_folder

PEERS = ("torch",)
MODULE = "seqmesh.benchmarks.checkpoint_rank"
ONE, STALL, WHOLE = "one stage", "two stages, the step waits", "two stages, until it is there"
ALONE, BESIDE = "products alone", "products beside a save"
SAVE, ASYNC = "torch save", "torch async_save, the step waits"
LOAD = "verify and load"
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What ranks are asked. size: bytes of all tensors, each counted once. spread: the optimizer's state by rows.
    products: of matrices, in a turn. peers: whether torch's own are timed."""

    folder: str
    size: int
    spread: bool
    repeats: int
    products: int
    peers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """seconds: of the slowest rank, of every repeat. size: bytes of all tensors, each once. read: bytes of tensors that
    each rank read to load them."""

    seconds: dict[str, list[float]]
    size: int
    read: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    ranks: int
    size: int
    spread: bool = False
    disk: bool = True

    @property
    def name(self) -> str:
        spread = ", state spread" if self.spread else ""
        return f"{self.size // MIB} MiB on {self.ranks} ranks{spread}, {'disk' if self.disk else 'memory'}"


QUICK = (Case(ranks=2, size=42 * MIB), Case(ranks=2, size=42 * MIB, spread=True, disk=False))
FULL = (
    *QUICK,
    Case(ranks=2, size=42 * MIB, disk=False),
    Case(ranks=2, size=384 * MIB, spread=True),
    Case(ranks=4, size=42 * MIB),
    Case(ranks=4, size=384 * MIB, spread=True),
)


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Ask the ranks, case by case."""
    peers = bool(chosen_peers(PEERS, against))
    results = Results()
    for case in QUICK if quick else FULL:
        with _place(case) as folder:
            job = Job(
                folder=str(folder),
                size=case.size,
                spread=case.spread,
                repeats=3 if quick else 7,
                products=100 * case.size // (42 * MIB),
                peers=peers and not case.spread,
            )
            answer = TypeAdapter(Answer).validate_json(ask_ranks(MODULE, asdict(job), case.ranks))
        results += figures(case.name, answer)
    return results


@contextmanager
def _place(case: Case) -> Iterator[Path]:
    if not case.disk:
        with scratch_folder(6 * case.size) as folder:
            yield folder
        return
    with TemporaryDirectory(prefix="seqmesh-bench-") as name:
        yield Path(name)


def figures(case: str, answer: Answer) -> Results:
    """All times, and the two stages beside one."""
    read = {"read_most": max(answer.read), "read_all": sum(answer.read)}
    rows = {
        name: row(case, name, Spread.of(seconds).scaled(1e3), "ms", bytes=answer.size, **(read if name == LOAD else {}))
        for name, seconds in answer.seconds.items()
    }
    ratios = [
        ratio("checkpoint_stall", rows[STALL], rows[ONE]),
        ratio("checkpoint_whole", rows[WHOLE], rows[ONE]),
        ratio("products_beside_a_save", rows[BESIDE], rows[ALONE]),
        *(ratio("stall_against_torch", rows[STALL], rows[name]) for name in (ASYNC,) if name in rows),
        *(ratio("one_stage_against_torch", rows[ONE], rows[name]) for name in (SAVE,) if name in rows),
    ]
    return Results(rows=tuple(rows.values()), ratios=tuple(ratios))
