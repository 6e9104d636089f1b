"""`seqmesh bench packer`: packing, balancing and planning, one thread.

pack: documents per CPU-second of `pack(best_fit_decreasing)` beside peers that are installed, a roof and a floor (see
`packing`); the number of bins is counted beside Martello and Toth's bound, under which nobody gets. Peers that are slow
are given fewer documents, in a case named after their number, where the others are measured on as many. methods: all of
ours. stream: packing as documents arrive. memory: what packing takes beside its input. partition: items spread over
parts (see `partitioning`). plan: CPU milliseconds of `plan_step`, with the balance that it reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from seqmesh.benchmarks.harness import (
    Ratio,
    Results,
    Row,
    Spread,
    absent,
    chosen_peers,
    installed_version,
    measure,
    row,
)
from seqmesh.benchmarks.lengths import SETS, python_documents, web_lengths
from seqmesh.benchmarks.packer_memory import extra_bytes
from seqmesh.benchmarks.packing import CSR, SEQMESH, SPEED, calling, packing
from seqmesh.benchmarks.partitioning import balancing, equal_parts
from seqmesh.benchmarks.peers_packing import ADAPTERS, FAST
from seqmesh.benchmarks.processes import measurable
from seqmesh.packer.bins import METHODS, pack
from seqmesh.packer.cost import MODEL_8B
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.online import OnlinePacker
from seqmesh.packer.plan import Mesh

PEERS = tuple(ADAPTERS)
CAPACITY = 32_768  # of plans and partitions
K, M = 1_000, 1_000_000
LARGE = 5 * M  # documents; from so many on, cases are repeated less often

WHOLE_LISTS = {"wlbllm": 99_519, "prolong": 77_932}
CALL = ("web128k", 10 * K)
TABLE, STREAMS, OPEN_BINS = ("web32k", "sft8k"), ("web32k", "sft8k"), (32, 8)
MEMORY = "web32k"
PARTITIONS = ((1_000, 8), (10_000, 64), (100_000, 1_024))  # items, parts
EQUAL_PARTS = (8_192, 64)
PLANS = ((1 << 20, 8), (1 << 20, 64), (1 << 23, 8), (1 << 23, 64))  # tokens in the step, ranks
Case = tuple[str, int]  # a set of lengths, documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. packs: with fast peers. slow: with all peers. few_repeats: of large and slow cases."""

    packs: tuple[Case, ...]
    slow: tuple[Case, ...]
    documents: int  # of the methods' table and of streams
    memory: int  # documents
    seeds: int
    repeats: int
    few_repeats: int

    def at_most(self, documents: int) -> Scale:
        """The same with no case larger than so many documents."""

        def cut(cases: tuple[Case, ...]) -> tuple[Case, ...]:
            return tuple(dict.fromkeys((name, min(count, documents)) for name, count in cases))

        slow = cut(self.slow)
        return replace(
            self,
            packs=tuple(case for case in cut(self.packs) if case not in slow),
            slow=slow,
            documents=min(self.documents, documents),
            memory=min(self.memory, documents),
        )


QUICK = Scale(
    packs=(("web32k", M), ("python_env", 100 * K), ("wlbllm", WHOLE_LISTS["wlbllm"])),
    slow=(("web32k", 2 * K), ("sft8k", K)),
    documents=100 * K,
    memory=M,
    seeds=5,
    repeats=5,
    few_repeats=2,
)
FULL = Scale(
    packs=(
        *((name, count) for name in ("web32k", "web128k") for count in (100 * K, M, 10 * M)),
        *((name, count) for name in ("uniform32k", "sft8k", "half32k", "python_env") for count in (M, 10 * M)),
        *WHOLE_LISTS.items(),
        ("wikipedia", M),
    ),
    slow=tuple((name, 10 * K) for name in ("web32k", "web128k", "sft8k", "python_env", *WHOLE_LISTS, "wikipedia")),
    documents=M,
    memory=10 * M,
    seeds=30,
    repeats=9,
    few_repeats=3,
)


def run(*, quick: bool, against: tuple[str, ...] = (), documents: int | None = None) -> Results:
    """All cases. `documents`: the most in any of them."""
    peers = chosen_peers(PEERS, against)
    scale = QUICK if quick else FULL
    if documents is not None:
        scale = scale.at_most(documents)
    results = packs(scale, peers) + memory(scale.memory, peers)
    for name in TABLE:
        results += methods(name, scale.documents, scale.few_repeats)
    for name in STREAMS:
        results += streaming(name, scale.documents, scale.repeats)
    return results + balances(scale, documents) + plans(scale.repeats)


def packs(scale: Scale, peers: tuple[str, ...]) -> Results:
    """Every list of lengths through the packers, and one call on a short list."""
    fast = tuple(peer for peer in peers if peer in FAST)
    results = Results()
    for name, count in scale.packs:
        repeats = scale.few_repeats if count >= LARGE else scale.repeats
        results += packing(case_name("pack", name, count), *lengths_of(name, count), fast, repeats)
    for name, count in scale.slow:
        results += packing(case_name("pack", name, count), *lengths_of(name, count), peers, scale.few_repeats)
    case = case_name("call", CALL[0], CALL[1])
    return results + calling(*lengths_of(*CALL), case, scale.repeats)


def methods(name: str, documents: int, repeats: int) -> Results:
    """Our methods on one list of lengths."""
    lengths, capacity = lengths_of(name, documents)
    case = case_name("methods", name, documents)
    spreads = measure({method: _packer(lengths, capacity, method) for method in METHODS}, repeats)
    rows = []
    for method, spread in spreads.items():
        bins = pack(lengths, capacity, method=method)
        counts = {"bins": bins.count, "fill": bins.fill}
        rows.append(row(case, method, spread.rate(documents), SPEED, **counts))
    return Results(rows=tuple(rows))


def streaming(name: str, documents: int, repeats: int) -> Results:
    """`OnlinePacker` on one list of lengths. stream_excess: by what fraction its bins are over the bound."""
    lengths, capacity = lengths_of(name, documents)
    bound = pack(lengths, capacity).bound
    results = Results()
    for open_bins in OPEN_BINS:
        spread = measure({SEQMESH: _streamer(lengths, capacity, open_bins)}, repeats)[SEQMESH]
        bins = int(OnlinePacker(capacity, max_open=open_bins).push(lengths).bin_of.max()) + 1
        counts = {"bins": bins, "bound": bound, "over": bins - bound}
        case = case_name("stream", name, documents) + f", K={open_bins}"
        found = row(case, SEQMESH, spread.rate(documents), SPEED, **counts)
        excess = Ratio(
            figure="stream_excess",
            value=counts["over"] / bound,
            numerator=f"{found.name}:over",
            denominator=f"{found.name}:bound",
        )
        results += Results(rows=(found,), ratios=(excess,))
    return results


def memory(documents: int, peers: tuple[str, ...]) -> Results:
    """Megabytes beside the input, of ours and of fast peers, each in a process of its own."""
    lengths, capacity = lengths_of(MEMORY, documents)
    case = case_name("memory", MEMORY, documents)
    rows = tuple(
        memory_row(case, name, lengths, capacity) for name in (SEQMESH, CSR, *(peer for peer in peers if peer in FAST))
    )
    return Results(rows=rows)


def memory_row(case: str, name: str, lengths: Int64Array, capacity: int) -> Row:
    installed = name not in ADAPTERS or installed_version(name) is not None
    if not (installed and measurable()):
        return absent(case, name, "MB")
    extra, bins = extra_bytes(name, lengths, capacity)
    return row(case, name, Spread.of([extra / 1e6]), "MB", bins=bins, documents=len(lengths))


def balances(scale: Scale, most: int | None) -> Results:
    """Documents of web-like lengths spread over parts by their cost; `most` of them."""
    results = Results()
    for items, parts in PARTITIONS:
        lengths = web_lengths(min(items, most or items), CAPACITY)
        results += balancing(MODEL_8B.cost_model().of(lengths), parts, scale.repeats)
    items, parts = EQUAL_PARTS
    return results + equal_parts(min(items, most or items) // parts * parts, parts, scale.seeds)


def plans(repeats: int) -> Results:
    results = Results()
    for tokens, ranks in PLANS:
        results += planning(tokens, ranks, repeats)
    return results


def planning(tokens: int, ranks: int, repeats: int) -> Results:
    """One step of real lengths planned for `ranks`."""
    lengths, cost = python_documents(tokens, CAPACITY), MODEL_8B.cost_model()
    mesh = Mesh(ranks=ranks, capacity=CAPACITY)
    spread = measure({SEQMESH: lambda: _discard(plan_step(lengths, mesh, cost))}, repeats)[SEQMESH]
    plan = plan_step(lengths, mesh, cost)
    case = f"plan {tokens >> 20}M tokens on {ranks}"
    counts = {"documents": len(lengths), "imbalance": plan.imbalance, "gap": plan.gap}
    return Results(rows=(row(case, SEQMESH, spread.scaled(1e3), "CPU-ms", **counts),))


def lengths_of(name: str, documents: int) -> tuple[Int64Array, int]:
    """The lengths and the capacity of a case."""
    chosen = SETS[name]
    return chosen.draw(documents), chosen.capacity


def case_name(kind: str, name: str, documents: int) -> str:
    """Thousands and millions of documents are written as K and M where they are whole."""
    for unit, letter in ((M, "M"), (K, "K")):
        if documents % unit == 0:
            return f"{kind} {name}, {documents // unit}{letter}"
    return f"{kind} {name}, {documents}"


def _packer(lengths: Int64Array, capacity: int, method: str) -> Callable[[], None]:
    return lambda: _discard(pack(lengths, capacity, method=method))


def _streamer(lengths: Int64Array, capacity: int, open_bins: int) -> Callable[[], None]:
    return lambda: _discard(OnlinePacker(capacity, max_open=open_bins).push(lengths))


def _discard(_result: object) -> None:
    """A candidate returns nothing unless it takes the time itself."""
