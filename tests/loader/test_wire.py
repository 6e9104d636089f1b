from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.batch import ARRAYS, batch_digest
from seqmesh.loader.errors import WireError
from seqmesh.loader.feed import Feed
from seqmesh.loader.wire import (
    MAX_HEADER_BYTES,
    PROTOCOL,
    Ack,
    Batch,
    Bye,
    End,
    Error,
    Heartbeat,
    Hello,
    Message,
    Unknown,
    Welcome,
    decode,
    decode_batch,
    encode,
    encode_batch,
    payload_bytes,
)
from tests.support import make_set, settings_for, walk

STATE = {"position": 3, "seed": 2**61}
MESSAGES = [
    Hello(rank=1, session=2, credit=3, state=STATE, wave=4),
    Hello(rank=1, session=2, credit=3, state=None, wave=4),
    Welcome(session=1, job="ab", settings="{}", state=STATE, data="ff", vocab_size=9),
    Ack(session=1, sequence=2, credit=3),
    Heartbeat(session=1, sequence=2, refused=3),
    Unknown(session=1),
    End(session=1, sequence=2),
    Error(session=1, message="what was wrong"),
    Bye(session=1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message)[0]) == message


def test_a_batch_survives_the_wire(tmp_path: Path) -> None:
    _, batch = next(walk(Feed(settings_for(make_set(tmp_path, [5, 9, 30]))), 0))
    frames = encode_batch(batch, session=1, sequence=7, before=STATE, after=STATE)
    header = decode(frames[0])
    assert isinstance(header, Batch)
    raw = [bytes(memoryview(frame).cast("B")) for frame in frames[1:]]
    received = decode_batch(header, raw)
    assert batch_digest(received) == batch_digest(batch)
    assert received.plan == batch.plan
    assert payload_bytes(raw) == sum(len(frame) for frame in raw)
    with pytest.raises(WireError, match="input_ids came as"):
        decode_batch(header, [raw[0][:-1], *raw[1:]])
    with pytest.raises(WireError, match=f"a batch of 2 arrays: must have {len(ARRAYS)}"):
        decode_batch(header, raw[:2])
    with pytest.raises(WireError, match="without its proper fields"):
        decode_batch(header.model_copy(update={"scalars": header.scalars | {"tokens": "many"}}), raw)


def packed(**changes: Any) -> bytes:
    fields = {"v": PROTOCOL, "type": "ack", "session": 1, "sequence": 2, "credit": 3} | changes
    return bytes(msgpack.packb({k: v for k, v in fields.items() if v is not ...}))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (packed(v=PROTOCOL + 1), "not a message of protocol version"),
        (packed(v=...), "not a message of protocol version"),
        (packed(type="exec"), "unknown type"),
        (packed(type=["ack"]), "unknown type"),
        (packed(credit="3"), "not a valid message"),
        (packed(credit=-1), "not a valid message"),
        (packed(credit=2**64 - 1), "not a valid message"),
        (packed(credit=...), "not a valid message"),
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
        decode(frame)


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_be_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


def test_numpy_numbers_do_not_slip_into_a_state() -> None:
    with pytest.raises(TypeError, match="can not serialize"):
        encode(Hello(rank=0, session=0, credit=0, state={"step": np.int64(3)}, wave=0))
