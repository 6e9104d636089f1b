"""What loader and ranks say to each other. The only place that knows bytes on the wire.

A message is a msgpack map with a protocol version `v` and a `type`, in one frame. The frame ends with a checksum, so
that a damaged message is not taken for another. The arrays of a batch are one block of bytes, which lies in a ring of
shared memory or follows as a second frame (see `batch.block_layout`). Nothing on the wire can run code, and every size
is limited before it is read.

    rank                                     loader
     │ hello (rank, where to begin, credit)    │
     │────────────────────────────────────────►│
     │◄──────────────── welcome (job, settings)│   or error, and the rank is not served
     │◄───────────────── batch 0, batch 1, ... │   as long as the rank's credit, in bytes, lasts
     │ ack (got 0 and 1, still uses 1)         │   what the rank has let go of: credit comes back
     │────────────────────────────────────────►│
     │◄────────────────────────────── heartbeat│   whenever nothing else was sent for a second
     │◄──────────────────────────────────── end│   after the last batch of the last epoch
     │ bye                                     │
     │────────────────────────────────────────►│

Beside that, on a connection of its own: `count steps` and `counted`.

`session` numbers the hellos of one connection, `sequence` its batches: a rank that says hello again at its last
position gets the exact next batch, and drops what an earlier session left in the pipe. So everything that can go
wrong between the two mends by one more hello; docs/loader.md says what leads to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgpack
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seqmesh.loader.batch import SCALARS, Block, NumpyBatch, PackedBatch, arrays_at, block_layout
from seqmesh.loader.errors import WireError

PROTOCOL = 3
MAX_HEADER_BYTES = 1 << 16
CHECKSUM_BYTES = 8
MAX_BLOCK_BYTES = 1 << 34
MAX_ITEMS = 1 << 10  # of any map or list in a header

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
State = dict[str, Any]  # of the stream, see `StreamState.to_dict`
Transport = Literal["shm", "zmq"]


class Message(BaseModel):
    """Fields are checked by type when a message is read; anything unknown is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Hello(Message):
    """Serve `rank` from `state` (None: from the job's start), its micro-batch `wave`, within `credit` bytes.

    client: a random name of the sender, the same in all its hellos: process `peer` of the `peers` that hold this rank's
    replica together. Its next batch is to be number `sequence`; of those before it, it still uses the `held`.
    transport: where blocks of bytes are to be.
    """

    client: str
    rank: Count
    peer: Count
    peers: Count
    session: Count
    sequence: Count
    held: list[Count]
    credit: Count
    state: State | None
    wave: Count
    transport: Transport


class Welcome(Message):
    """job: random name of this loader process. settings: the job's LoaderSettings as JSON. state: where it begins.
    data: fingerprint of the shard set; vocab_size: its tokenizer's. rings: path of the socket where memory of rings is
    handed over, see `handover`; empty: nowhere."""

    session: Count
    job: str
    settings: str
    state: State
    data: str
    vocab_size: Count
    rings: str


class Batch(Message):
    """One micro-batch. lengths: items of each of its arrays. after: the stream's state after its step, with a step's
    last batch. arena, offset: where in which ring its block of bytes is; without an arena it is the frame that follows,
    and `checksum` its xxh3-64."""

    session: Count
    sequence: Count
    scalars: dict[str, int | float | str]
    lengths: list[Count]
    after: State | None
    arena: str
    offset: Count
    checksum: Annotated[int, Field(ge=0, lt=1 << 64)]


class Ack(Message):
    """The rank has got the batches before number `sequence`, and has let go of all of these but the `held`. Whole, not
    a difference, so that an ack may be lost or come twice."""

    session: Count
    sequence: Count
    held: list[Count]


class Heartbeat(Message):
    """The loader lives. sequence: the next batch's; a rank that waits for an earlier one has lost it. refused: messages
    that the loader refused since it started, whoever sent them."""

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
    """The rank is done. It has got the batches before number `sequence`, and still uses the `held`, until its process
    ends."""

    session: Count
    sequence: Count
    held: list[Count]


class CountSteps(Message):
    """How many global batches does the job have that stands at `state`? From whoever it may be, without a hello, and
    asked again until the answer is there."""

    state: State


class Counted(Message):
    """So many steps, from the first to the last; None: still counting. error: why they can not be counted; or empty."""

    steps: Count | None
    error: str


_SESSION: tuple[type[Message], ...] = (Hello, Welcome, Batch, Ack, Heartbeat, Unknown, End, Error, Bye)
_ALL: tuple[type[Message], ...] = (*_SESSION, CountSteps, Counted)
TYPES = {t.__name__.lower(): t for t in _ALL}

Frames = Sequence[Any]  # bytes, memoryviews or arrays


def encode(message: Message) -> list[Any]:
    """A message as frames: one, to which a batch's block may be added."""
    header = {"v": PROTOCOL, "type": type(message).__name__.lower(), **message.__dict__}
    return [seal(msgpack.packb(header))]


def seal(packed: bytes) -> bytes:
    """A packed map with its checksum, xxh3-64, behind it."""
    return packed + xxhash.xxh3_64_digest(packed)


def decode(header: Any) -> Message:
    """Read the first frame. Raises WireError for anything that is not a message of this protocol version."""
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(header)} bytes: the limit is {MAX_HEADER_BYTES}")
    packed, checksum = header[:-CHECKSUM_BYTES], header[-CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(packed) != checksum:
        raise WireError("not a message, or a damaged one: its checksum differs")
    try:
        fields = msgpack.unpackb(
            packed, strict_map_key=True, max_map_len=MAX_ITEMS, max_array_len=MAX_ITEMS, max_bin_len=0, max_ext_len=0
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


def layout_of(header: Batch) -> tuple[tuple[int, ...], int]:
    """Where the arrays of a batch begin in its block, and the block's size. Raises WireError for a batch that can not
    be."""
    if {name: type(value) for name, value in header.scalars.items()} != SCALARS:
        raise WireError("a batch without its proper fields")
    try:
        starts, size = block_layout(header.lengths)
    except ValueError as error:
        raise WireError(f"a batch of {len(header.lengths)} arrays: {error}") from error
    if size > MAX_BLOCK_BYTES:
        raise WireError(f"a batch of {size} bytes: the limit is {MAX_BLOCK_BYTES}")
    return starts, size


def decode_batch(header: Batch, block: Block, starts: Sequence[int]) -> NumpyBatch:
    """The batch whose arrays are views of a block of the size that `layout_of` gave with these starts."""
    return PackedBatch(**header.scalars, **arrays_at(block, header.lengths, starts))  # type: ignore[arg-type]  # checked


def check_frame(header: Batch, frames: Frames, size: int) -> Any:
    """The block of a batch that came as a frame. Raises WireError where it is missing, cut short or damaged."""
    if len(frames) != 1 or len(frames[0]) != size:
        raise WireError(f"a batch of {size} bytes came as {[len(frame) for frame in frames]}")
    if block_checksum(frames[0]) != header.checksum:
        raise WireError(f"a batch of {size} bytes came damaged: its checksum differs")
    return frames[0]


def block_checksum(block: Any) -> int:
    """xxh3-64 of a block of bytes; 12 GB/s, so that a frame that is not what was sent is found out."""
    return xxhash.xxh3_64_intdigest(block)
