"""One file of a ledger: what the steps that a loader process served were made of, a row a step.

A file is an Arrow IPC *stream*, which can be added to: whatever becomes of its end, what was written before it is read.
Its schema says in its metadata (see `Head`) of which job it is. Written by `recorder`, read together with the others of
its folder by `ledgers`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.planner import Step
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.state import StreamState
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import piece_tokens

SUFFIX = ".arrows"
VERSION = "1"  # of the file's format
END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream whose writer was closed
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # of times

# Lists have 64-bit offsets: many steps together may have over 2**31 documents.
LISTS = {
    "document": pa.int64(),
    "offset": pa.int64(),
    "length": pa.int64(),
    "source": pa.uint16(),
    "ring_sizes": pa.int32(),
    "ring_ranks": pa.int32(),
    "waves": pa.int32(),
}
_PLAIN = {
    "step": pa.int64(),
    "epoch": pa.int64(),
    "time": pa.timestamp("us", "UTC"),
    "plan": pa.string(),
    "continued": pa.bool_(),
    "tokens": pa.int64(),
    "supervised_tokens": pa.int64(),
    "rings": pa.int64(),
    "imbalance": pa.float64(),
    "before": pa.string(),
    "after": pa.string(),
}
_KINDS: tuple[Any, ...] = tuple(_PLAIN.values())
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=False) for name, kind in _PLAIN.items()]
    + [pa.field(name, pa.large_list(kind), nullable=False) for name, kind in LISTS.items()]
)

_SCALARS = itemgetter("step", "epoch", "tokens_in_step", "supervised_tokens_in_step", "rings_in_step", "imbalance")
_STATE = TypeAdapter(StreamState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Which job a file is of. settings: the loader's; data: fingerprint of the shards; sources: names of the places in
    the column `source`; seqmesh: the version that wrote; host, pid, begun: of the loader process."""

    settings: LoaderSettings
    data: str
    sources: tuple[str, ...]
    seqmesh: str
    host: str
    pid: int
    begun: datetime

    def to_metadata(self) -> dict[str, str]:
        return {
            "seqmesh.ledger": VERSION,
            "settings": self.settings.to_json().decode(),
            "data": self.data,
            "sources": json.dumps(self.sources),
            "seqmesh": self.seqmesh,
            "host": self.host,
            "pid": str(self.pid),
            "begun": self.begun.isoformat(),
        }

    @classmethod
    def from_metadata(cls, metadata: dict[bytes, bytes] | None) -> Head:
        """Raises ValueError for anything else than what `to_metadata` gives."""
        found = {key.decode(): value.decode() for key, value in (metadata or {}).items()}
        if found.get("seqmesh.ledger") != VERSION:
            raise ValueError(f"not a ledger of version {VERSION}")
        if missing := [f.name for f in fields(cls) if f.name not in found]:
            raise ValueError(f"its metadata lack {', '.join(missing)}")
        return cls(
            settings=LoaderSettings.from_json(found["settings"]),
            data=found["data"],
            sources=tuple(json.loads(found["sources"])),
            seqmesh=found["seqmesh"],
            host=found["host"],
            pid=int(found["pid"]),
            begun=datetime.fromisoformat(found["begun"]),
        )


class Row(NamedTuple):
    """A step to be written: when it began to be served, in microseconds, and whether to a rank that another loader
    process had served before."""

    step: Step
    microseconds: int
    continued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """What one step trained on, D documents on R ranks.

    document (row of the set), offset (tokens before the piece that was taken), length (tokens taken), source (place
    in the head's `sources`), ring_sizes [D]; ring_ranks: the ranks of all documents' rings, one after the other; waves
    [R]: micro-batches of each rank. int64. plan: the plan's digest. before, after: the stream's state. time: when it
    began to be served. file: where it is written; None for a step that was planned again.
    """

    step: int
    epoch: int
    time: datetime
    plan: str
    tokens: int
    supervised_tokens: int
    rings: int
    imbalance: float
    document: Int64Array
    offset: Int64Array
    length: Int64Array
    source: Int64Array
    ring_sizes: Int64Array
    ring_ranks: Int64Array
    waves: Int64Array
    before: StreamState
    after: StreamState
    head: Head
    file: Path | None

    @property
    def ranks_of(self) -> list[list[int]]:
        """The ranks that held each document."""
        ends, ranks = np.cumsum(self.ring_sizes).tolist(), self.ring_ranks.tolist()
        return [ranks[start:stop] for start, stop in pairwise([0, *ends])]

    def by_rank(self) -> tuple[Int64Array, Int64Array]:
        """Documents, or pieces of one, and tokens that each rank had [R]."""
        holder = np.repeat(np.arange(len(self.document)), self.ring_sizes)
        index = np.arange(len(holder)) - np.repeat(np.cumsum(self.ring_sizes) - self.ring_sizes, self.ring_sizes)
        tokens = np.zeros(len(self.waves), np.int64)
        np.add.at(tokens, self.ring_ranks, piece_tokens(self.length[holder], self.ring_sizes[holder], index))
        return np.bincount(self.ring_ranks, minlength=len(self.waves)), tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LedgerFile:
    """A file as far as it can be read. batches: of rows; intact: bytes up to there; damage: what is wrong with the
    rest, empty where nothing is. closed: whether its loader ended in order: nothing that it served is missing then."""

    path: Path
    head: Head
    batches: list[pa.RecordBatch]
    intact: int
    damage: str
    closed: bool


def record_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as columns. Every step's arrays are touched once, together."""
    steps = [row.step for row in rows]
    numbers = zip(*map(_SCALARS, (step.scalars for step in steps)), strict=True)
    step, epoch, tokens, supervised_tokens, rings, imbalance = map(np.array, numbers)
    before, after = _texts(steps)
    columns: tuple[Any, ...] = (
        step,
        epoch,
        np.array([row.microseconds for row in rows]),
        [step.digest for step in steps],
        [row.continued for row in rows],
        tokens,
        supervised_tokens,
        rings,
        imbalance,
        before,
        after,
    )
    plain: list[Any] = [pa.array(column, kind) for column, kind in zip(columns, _KINDS, strict=True)]
    draws, plans = [step.documents for step in steps], [step.plan for step in steps]
    documents = _ends([len(draw.document) for draw in draws])
    lists = {
        "document": _lists("document", documents, [draw.document for draw in draws]),
        "offset": _lists("offset", documents, [draw.offset for draw in draws]),
        "length": _lists("length", documents, [draw.length for draw in draws]),
        "source": _lists("source", documents, [draw.source for draw in draws]),
        "ring_sizes": _ring_sizes(documents, [plan.ring_offsets for plan in plans]),
        "ring_ranks": _lists(
            "ring_ranks", _ends([len(plan.ring_ranks) for plan in plans]), [plan.ring_ranks for plan in plans]
        ),
        "waves": _lists("waves", _ends([len(plan.waves) for plan in plans]), [plan.waves for plan in plans]),
    }
    return pa.RecordBatch.from_arrays([*plain, *lists.values()], schema=SCHEMA)


def _texts(steps: Sequence[Step]) -> tuple[list[bytes], list[bytes]]:
    """The states before and after each step as JSON. A state after one step is mostly the one before the next."""
    known: dict[int, bytes] = {}

    def text(state: StreamState) -> bytes:
        found = known.get(id(state))
        if found is None:
            found = known[id(state)] = _STATE.serializer.to_json(state)
        return found

    return [text(step.before) for step in steps], [text(step.after) for step in steps]


def _ends(counts: list[int]) -> Int64Array:
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def _lists(name: str, ends: Int64Array, parts: list[Int64Array]) -> Any:
    return _list_array(name, ends, np.concatenate(parts))


def _ring_sizes(documents: Int64Array, offsets: list[Int64Array]) -> Any:
    """From the ring offsets of each step, one more than it has documents."""
    sizes = np.diff(np.concatenate(offsets))
    between = (documents[1:-1] + np.arange(len(offsets) - 1)).astype(np.int64)
    return _list_array("ring_sizes", documents, np.delete(sizes, between))


def _list_array(name: str, ends: Int64Array, values: Int64Array) -> Any:
    """A list for each row, whose items begin and end at `ends`."""
    narrow: Any = values.astype(LISTS[name].to_pandas_dtype(), copy=False)
    offsets: Any = ends
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(narrow))


def read_file(path: Path) -> LedgerFile:
    """A file as far as it is whole. Raises ValueError, naming the file, where not even its head is."""
    try:
        source = pa.memory_map(str(path))
        reader = pa.ipc.open_stream(source)
        head = Head.from_metadata(reader.schema.metadata)
        if not reader.schema.equals(SCHEMA):
            raise ValueError("its columns are not a ledger's")
    except (pa.ArrowInvalid, OSError, ValueError, ValidationError) as error:
        raise ValueError(f"{path}: is no ledger, or its head is damaged: {error}") from error
    size = path.stat().st_size
    batches, intact, damage = read_batches(reader, source, size)
    with path.open("rb") as file:
        file.seek(intact)
        closed = file.read() == END
    return LedgerFile(path=path, head=head, batches=batches, intact=intact, damage=damage, closed=closed)


def read_batches(
    reader: pa.ipc.RecordBatchStreamReader, source: pa.NativeFile, size: int
) -> tuple[list[pa.RecordBatch], int, str]:
    """What is whole of a source of `size` bytes: batches, bytes up to there, and what is wrong with the rest."""
    batches: list[pa.RecordBatch] = []
    intact = source.tell()
    try:
        while True:
            batch = reader.read_next_batch()
            batch.validate()
            batches.append(batch)
            intact = source.tell()
    except StopIteration:
        return batches, intact, "what follows is no record" if source.tell() < size else ""
    except (pa.ArrowInvalid, OSError) as error:
        return batches, intact, str(error).strip().splitlines()[0]


def record_at(file: LedgerFile, batch: int, row: int) -> Record:
    """One row. Raises ValueError, naming the file and the step, where it contradicts itself."""
    return _record(file.batches[batch].slice(row, 1), file.head, file.path)


def record_of(step: Step, head: Head, time: datetime) -> Record:
    """The record of a step that was planned again."""
    return _record(record_batch([Row(step, int(time.timestamp() * 1e6))]), head, None)


def _record(row: pa.RecordBatch, head: Head, file: Path | None) -> Record:
    plain: dict[str, Any] = {name: row.column(name)[0].as_py() for name in _PLAIN if name not in ("continued", "time")}
    microseconds = int(row.column("time").to_numpy().astype(np.int64)[0])
    plain["time"] = EPOCH + timedelta(microseconds=microseconds)
    try:
        row.validate(full=True)
        arrays: dict[str, Any] = {name: _int64(row.column(name)[0]) for name in LISTS}
        states = {name: _STATE.validate_json(plain[name]) for name in ("before", "after")}
        if int(arrays["length"].sum()) != plain["tokens"] or arrays["ring_sizes"].sum() != len(arrays["ring_ranks"]):
            raise ValueError("its documents are not those that were counted")
    except (pa.ArrowInvalid, ValueError) as error:
        raise ValueError(f"{file}: the record of step {plain['step']} is damaged: {error}") from error
    return Record(**plain | states | arrays, head=head, file=file)


def _int64(scalar: Any) -> npt.NDArray[np.int64]:
    return np.asarray(scalar.values.to_numpy(zero_copy_only=False), np.int64)
