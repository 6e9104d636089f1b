"""What loader and ranks say to each other. The only place that knows bytes on the wire.

A message is a list of frames. The first is a msgpack map with a protocol version `v` and a `type`; array frames follow
for `batch`. Nothing on the wire can run code, and every size is limited before it is read.

    rank                                     loader
     │ hello (rank, where to begin, credit)    │
     │────────────────────────────────────────►│
     │◄──────────────── welcome (job, settings)│   or error, and the rank is not served
     │◄───────────────── batch 0, batch 1, ... │   as long as the rank's credit, in bytes, lasts
     │ ack (up to batch 0, bytes so far)       │   the rank has used a batch: credit comes back
     │────────────────────────────────────────►│
     │◄────────────────────────────── heartbeat│   whenever nothing else was sent for a second
     │◄──────────────────────────────────── end│   after the last batch of the last epoch
     │ bye                                     │
     │────────────────────────────────────────►│

`session` numbers the hellos of one rank, `sequence` the batches of one session: a rank that says hello again at its
last position gets the exact next batch, and drops what an earlier session left in the pipe. So everything that can go
wrong between the two mends by one more hello; docs/loader.md says what leads to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seqmesh.loader.batch import ARRAYS, SCALARS, NumpyBatch, PackedBatch
from seqmesh.loader.errors import WireError

PROTOCOL = 1
MAX_HEADER_BYTES = 1 << 16
MAX_ARRAY_BYTES = 1 << 31
MAX_ITEMS = 1 << 10  # of any map or list in a header

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Message(BaseModel):
    """Fields are checked by type when a message is read; anything unknown is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Hello(Message):
    """Serve `rank` from `state` (None: from the job's start), its micro-batch `wave`, within `credit` bytes."""

    rank: Count
    session: Count
    credit: Count
    state: dict[str, Any] | None
    wave: Count


class Welcome(Message):
    """job: random name of this loader process. settings: the job's LoaderSettings as JSON. state: where it begins.
    data: fingerprint of the shard set; vocab_size: its tokenizer's."""

    session: Count
    job: str
    settings: str
    state: dict[str, Any]
    data: str
    vocab_size: Count


class Batch(Message):
    """One micro-batch. before, after: stream states around its step. lengths: items of each array frame."""

    session: Count
    sequence: Count
    before: dict[str, Any]
    after: dict[str, Any]
    scalars: dict[str, int | float | str]
    lengths: list[Count]


class Ack(Message):
    """The rank has used the batches up to `sequence`, `credit` bytes in all: so much is free again. Counted from the
    session's begin, so that an ack may be lost or come twice."""

    session: Count
    sequence: Count
    credit: Count


class Heartbeat(Message):
    """The loader lives. sequence: batches sent in this session so far; a rank that got fewer has lost one.
    refused: messages that the loader refused since it started, whoever sent them."""

    session: Count
    sequence: Count
    refused: Count


class Unknown(Message):
    """The loader does not know this connection, being a new process, say: the rank must say hello again."""

    session: Count


class End(Message):
    """No batch follows `sequence` − 1: the last epoch is done. Said again in place of heartbeats."""

    session: Count
    sequence: Count


class Error(Message):
    """The loader can not serve this rank, or serves it no longer."""

    session: Count
    message: str


class Bye(Message):
    """The rank is done."""

    session: Count


_ALL: tuple[type[Message], ...] = (Hello, Welcome, Batch, Ack, Heartbeat, Unknown, End, Error, Bye)
TYPES = {t.__name__.lower(): t for t in _ALL}

Frames = Sequence[Any]  # bytes, memoryviews or arrays


def encode(message: Message) -> list[Any]:
    """A message without arrays as frames."""
    header = {"v": PROTOCOL, "type": type(message).__name__.lower(), **message.model_dump()}
    return [msgpack.packb(header)]


def decode(header: Any) -> Message:
    """Read the first frame. Raises WireError for anything that is not a message of this protocol version."""
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(header)} bytes: the limit is {MAX_HEADER_BYTES}")
    try:
        fields = msgpack.unpackb(
            header, strict_map_key=True, max_map_len=MAX_ITEMS, max_array_len=MAX_ITEMS, max_bin_len=0, max_ext_len=0
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack map: {error}") from error
    if not isinstance(fields, dict) or fields.pop("v", None) != PROTOCOL:
        raise WireError(f"not a message of protocol version {PROTOCOL}")
    message_type = TYPES.get(str(fields.pop("type", None)))
    if message_type is None:
        raise WireError("a message of an unknown type")
    try:
        return message_type.model_validate(fields)
    except ValidationError as error:
        raise WireError(f"not a valid message: {error}") from error


def encode_batch(
    batch: NumpyBatch, *, session: int, sequence: int, before: dict[str, Any], after: dict[str, Any]
) -> list[Any]:
    """A batch as a header and one frame per array. The arrays are not copied: leave them alone afterwards."""
    arrays = [np.ascontiguousarray(getattr(batch, name), dtype) for name, dtype in ARRAYS.items()]
    header = Batch(
        session=session,
        sequence=sequence,
        before=before,
        after=after,
        scalars={name: getattr(batch, name) for name in SCALARS},
        lengths=[len(array) for array in arrays],
    )
    return [*encode(header), *arrays]


def decode_batch(header: Batch, frames: Frames) -> NumpyBatch:
    """Rebuild a batch around its frames, not copied: read-only views. Raises WireError where they do not match."""
    if {name: type(value) for name, value in header.scalars.items()} != SCALARS:
        raise WireError("a batch without its proper fields")
    if not len(header.lengths) == len(frames) == len(ARRAYS):
        raise WireError(f"a batch of {len(frames)} arrays: must have {len(ARRAYS)}")
    fields: dict[str, Any] = dict(header.scalars)
    for (name, dtype), length, frame in zip(ARRAYS.items(), header.lengths, frames, strict=True):
        expected = length * np.dtype(dtype).itemsize
        if expected > MAX_ARRAY_BYTES or len(frame) != expected:
            raise WireError(f"{name} came as {len(frame)} bytes for {length} items of {dtype}")
        fields[name] = np.frombuffer(frame, dtype)
    return PackedBatch(**fields)


def payload_bytes(frames: Frames) -> int:
    """What a batch costs in credit: the bytes of its array frames."""
    return sum(memoryview(frame).nbytes for frame in frames)
