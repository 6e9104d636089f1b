"""One file of a ledger: what the steps that a loader process served were made of, a row a step.

A file is an Arrow IPC *stream*, which can be added to: whatever becomes of its end, what was written before it is read.
Its schema says in its metadata (see `Head`) of which job it is. Written by `recorder`, read together with the others of
its folder by `reading`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from seqmesh.loader.files import END_OF_STREAM
from seqmesh.loader.ledger.entries import LISTS, PLAIN, SCHEMA, TRIVIAL, Entries, parts_of, state_of
from seqmesh.loader.planner import Step
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.state import StreamState
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import piece_tokens

SUFFIX = ".arrows"
VERSION = "1"  # of the file's format
UNWRITTEN = 1 << 11  # steps that may wait to be written when a loader is killed, at most
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # of times


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
        closed = file.read() == END_OF_STREAM
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
    return _record(file.batches[batch], row, file.head, file.path)


def record_of(step: Step, head: Head, time: datetime) -> Record:
    """The record of a step that was planned again."""
    entries = Entries()
    entries.add(parts_of(step), int(time.timestamp() * 1e6))
    return _record(entries.to_batch(), 0, head, None)


def _record(batch: pa.RecordBatch, row: int, head: Head, file: Path | None) -> Record:
    one = batch.slice(row, 1)
    plain: dict[str, Any] = {name: one.column(name)[0].as_py() for name in PLAIN if name not in ("continued", "time")}
    microseconds = int(one.column("time").to_numpy().astype(np.int64)[0])
    plain["time"] = EPOCH + timedelta(microseconds=microseconds)
    try:
        one.validate(full=True)
        arrays = _arrays(one)
        states = {"before": _before(batch, row), "after": state_of(_integers(batch, "after", row))}
        if int(arrays["length"].sum()) != plain["tokens"] or arrays["ring_sizes"].sum() != len(arrays["ring_ranks"]):
            raise ValueError("its documents are not those that were counted")
    except (pa.ArrowInvalid, ValueError) as error:
        raise ValueError(f"{file}: the record of step {plain['step']} is damaged: {error}") from error
    return Record(**plain | states | arrays, head=head, file=file)


def _arrays(row: pa.RecordBatch) -> dict[str, Any]:
    """The lists of one row, also those that were written empty."""
    found = {name: np.asarray(_values(row.column(name)[0]), np.int64) for name in LISTS}
    for name, value in TRIVIAL.items():
        if not len(found[name]):
            found[name] = np.full(len(found["document"]), value, np.int64)
    return found


def _before(batch: pa.RecordBatch, row: int) -> StreamState:
    """The state before a step: its own, or the one after the step of the row before."""
    return state_of(_integers(batch, "before", row) or (_integers(batch, "after", row - 1) if row else []))


def _integers(batch: pa.RecordBatch, name: str, row: int) -> list[int]:
    found: list[int] = _values(batch.column(name)[row]).tolist()
    return found


def _values(scalar: Any) -> npt.NDArray[Any]:
    return np.asarray(scalar.values.to_numpy(zero_copy_only=False))
