from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.errors import WireError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.wire import (
    MAX_HEADER_BYTES,
    PROTOCOL,
    Ack,
    Batch,
    Bye,
    Counted,
    CountSteps,
    End,
    Error,
    Heartbeat,
    Message,
    Unknown,
    Welcome,
    block_checksum,
    check_frame,
    decode,
    decode_batch,
    encode,
    layout_of,
    seal,
)
from tests.serving import hello
from tests.support import make_set, settings_for

STATE = {"position": 3, "seed": 2**61}
MESSAGES = [
    CountSteps(state=STATE),
    Counted(steps=None, error=""),
    Counted(steps=3, error="why not"),
    hello(rank=1, session=2, credit=3, state=STATE, wave=4, held=[5, 7]),
    hello(),
    Welcome(session=1, job="ab", settings="{}", state=STATE, data="ff", vocab_size=9, rings="/a/b"),
    Ack(session=1, sequence=2, held=[0, 1]),
    Heartbeat(session=1, sequence=2, refused=3),
    Unknown(session=1),
    End(session=1, sequence=2),
    Error(session=1, message="what was wrong"),
    Bye(session=1, sequence=3, held=[2]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message)[0]) == message


def test_a_batch_survives_the_wire(tmp_path: Path) -> None:
    feed = Feed(settings_for(make_set(tmp_path, [5, 9, 30])))
    draft = feed.draft(0, Position(feed.start))
    assert draft is not None
    block = np.empty(draft.nbytes, np.uint8)
    batch = draft.fill(block)
    place: dict[str, Any] = {"arena": "", "offset": 0, "checksum": block_checksum(block)}
    sizes = list(draft.outline.lengths)
    sent = Batch(session=1, sequence=7, scalars=draft.outline.scalars, lengths=sizes, after=STATE, **place)
    header = decode(encode(sent)[0])
    assert isinstance(header, Batch)
    assert header == sent
    frame = bytes(block)
    starts, size = layout_of(header)
    assert (starts, size) == (draft.outline.starts, draft.nbytes)
    received = decode_batch(header, check_frame(header, [frame], size), starts)
    assert batch_digest(received) == batch_digest(batch)
    assert received.plan == batch.plan
    for frames, message in (
        ([frame[:-1]], "bytes came as"),
        ([], "bytes came as"),
        ([frame, frame], "bytes came as"),
        ([frame[:-1] + bytes([frame[-1] ^ 1])], "came damaged"),
    ):
        with pytest.raises(WireError, match=message):
            check_frame(header, frames, size)
    with pytest.raises(WireError, match="without its proper fields"):
        layout_of(header.model_copy(update={"scalars": header.scalars | {"tokens": "many"}}))
    with pytest.raises(WireError, match="a batch of 2 arrays"):
        layout_of(header.model_copy(update={"lengths": [1, 2]}))
    with pytest.raises(WireError, match="the limit is"):
        layout_of(header.model_copy(update={"lengths": [1 << 62, *header.lengths[1:]]}))


def packed(**changes: Any) -> bytes:
    fields = {"v": PROTOCOL, "type": "ack", "session": 1, "sequence": 2, "held": []} | changes
    return bytes(msgpack.packb({k: v for k, v in fields.items() if v is not ...}))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (packed(v=PROTOCOL + 1), "not a message of protocol version"),
        (packed(v=...), "not a message of protocol version"),
        (packed(type="exec"), "unknown type"),
        (packed(type=["ack"]), "unknown type"),
        (packed(sequence="3"), "not a valid message"),
        (packed(sequence=-1), "not a valid message"),
        (packed(held=[2**64 - 1]), "not a valid message"),
        (packed(held=...), "not a valid message"),
        (packed(surprise=1), "not a valid message"),
        (packed()[:-3], "not a msgpack map"),
        (packed() + b"\x00", "not a msgpack map"),
        (b"", "not a msgpack map"),
        (b"\xdf\xff\xff\xff\xff", "not a msgpack map"),  # a map that claims 4 Gi entries
        (b"\xc6\xff\xff\xff\xff", "not a msgpack map"),  # bytes that claim 4 GiB
        (b"\x91" * 3000, "not a msgpack map"),  # nested far too deep
        (msgpack.packb({1: 2}), "not a msgpack map"),
        (msgpack.packb([1, 2]), "not a message of protocol"),
        (b"x" * (MAX_HEADER_BYTES + 1), "the limit is"),
    ],
)
def test_anything_else_is_refused(frame: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(seal(frame))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_flipped_bit_is_found(message: Message) -> None:
    (frame,) = encode(message)
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="its checksum differs"):
            decode(damaged)
    for other in (b"", frame[:-1], frame + b"x"):
        with pytest.raises(WireError, match="its checksum differs"):
            decode(other)


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_be_refused(frame: bytes) -> None:
    for each in (frame, seal(frame)):
        with pytest.raises(WireError):
            decode(each)


def test_numpy_numbers_do_not_slip_into_a_state() -> None:
    with pytest.raises(TypeError, match="can not serialize"):
        encode(hello(state={"step": np.int64(3)}))
