"""Megatron-Core's indexed datasets: `NAME.bin` holds the ids, `NAME.idx` says where sequences and documents begin.

The index: nine bytes of magic, version 1 (uint64), a code for the type of ids (uint8), the numbers of sequences and of
document boundaries (uint64 each); then for each sequence its length (int32) and its first byte in the .bin (int64), and
the sequences that documents begin with (int64, the last of all being the number of sequences). A document here is a
document there, whatever sequences it has. A part is a range of about 64 MiB of a .bin, between documents.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from seqmesh.loader.catalog import ALL, Catalog, Chunk, Part, Reading
from seqmesh.loader.errors import ShardError
from seqmesh.loader.formats.sample import content_sample
from seqmesh.loader.storage.location import Location
from seqmesh.packer.lengths import Int64Array

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
PART_BYTES = 1 << 26
ENDS = ".idx", ".bin"


def pairs(files: dict[str, int]) -> list[str]:
    """Names, without an ending, of the datasets among these files."""
    return sorted(name[:-4] for name in files if name.endswith(".idx") and f"{name[:-4]}.bin" in files)


def catalog(location: Location, names: list[str], files: dict[str, int], reading: Reading) -> Catalog:
    """Of one or several datasets, in this order. Raises ShardError for an index that is damaged or does not fit its
    .bin."""
    assert reading.vocab_size is not None
    parts: list[Part] = []
    lengths: list[Int64Array] = [np.zeros(0, np.int64)]
    bad: dict[int, str] = {}
    for name in names:
        where = str(location.child(f"{name}.idx"))
        try:
            starts, dtype = parse_index(location.read(f"{name}.idx"), files[f"{name}.bin"], where)
        except ShardError as error:
            if reading.bad_shards == "refuse":
                raise
            bad[len(parts)] = str(error)
            parts.append(Part(file=f"{name}.bin", rows=0, tokens=0, size=0, kept=0))
            continue
        lengths.append(np.diff(starts) // dtype.itemsize)
        parts += _cut(f"{name}.bin", starts, dtype)
    every = np.concatenate(lengths)
    sample = content_sample(location, {f"{name}{end}": files[f"{name}{end}"] for name in names for end in ENDS})
    return Catalog(
        location=location,
        format="megatron",
        parts=tuple(parts),
        lengths=every,
        supervised=np.maximum(every - 1, 0),
        sources=(ALL,),
        codes=np.zeros(len(every), np.uint16),
        vocab_size=reading.vocab_size,
        fingerprint=xxhash.xxh3_128(every.tobytes() + sample.encode()).hexdigest(),
        bad=bad,
    )


def parse_index(data: bytes, bin_bytes: int, where: str) -> tuple[Int64Array, np.dtype[Any]]:
    """Where each document begins in the .bin, and the last one ends, in bytes [N + 1]; and the type of its ids."""
    if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
        raise ShardError(f"{where}: is not the index of a Megatron dataset")
    version, code = int.from_bytes(data[9:17], "little"), data[17]
    sequences, boundaries = (int(n) for n in np.frombuffer(data, "<u8", 2, 18))
    if version != 1 or code not in DTYPES:
        raise ShardError(f"{where}: has version {version} and ids of type {code}: must be 1, and integers")
    if len(data) < HEADER_BYTES + 12 * sequences + 8 * boundaries:
        raise ShardError(f"{where}: has {len(data)} bytes, too few for {sequences} sequences; copy it again")
    dtype = np.dtype(DTYPES[code])
    sizes = np.frombuffer(data, "<i4", sequences, HEADER_BYTES).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, HEADER_BYTES + 4 * sequences)
    first = np.frombuffer(data, "<i8", boundaries, HEADER_BYTES + 12 * sequences)
    ends = np.concatenate((pointers, [bin_bytes])) if sequences else np.zeros(1, np.int64)
    if (sizes < 0).any() or (sequences and pointers[0] != 0) or (np.diff(ends) != sizes * dtype.itemsize).any():
        raise ShardError(f"{where}: its sequences are not one after the other in a .bin of {bin_bytes} bytes")
    if boundaries < 1 or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
        raise ShardError(f"{where}: its documents are not ranges of its {sequences} sequences")
    return ends[first], dtype


def chunks(path: Path, number: int, catalog: Catalog, start: int) -> list[Chunk]:
    """The documents of a part, whose bytes begin at `start` of a file."""
    part, first = catalog.parts[number], int(catalog.part_first[number])
    if not part.rows:
        return []
    where, held = catalog.name_of(part), path.stat().st_size if path.is_file() else 0
    if held < start + part.size:
        raise ShardError(f"{where}: has {held} bytes, its index needs {start + part.size}; copy it again")
    lengths, dtype = catalog.lengths[first : first + part.rows], np.dtype(part.dtype)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    if part.size == 0:
        return [Chunk(offsets=offsets, ids=np.zeros(0, dtype))]
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), start + part.size - page, access=mmap.ACCESS_READ, offset=page)
    ids: npt.NDArray[Any] = np.frombuffer(memory, dtype, part.tokens, start - page)
    return [Chunk(offsets=offsets, ids=ids)]


def _cut(file: str, starts: Int64Array, dtype: np.dtype[Any]) -> list[Part]:
    """Parts of about PART_BYTES, each of whole documents."""
    parts, first = [], 0
    while first < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[first] + PART_BYTES, "right")) - 1
        last = min(max(last, first + 1), len(starts) - 1)
        start, size = int(starts[first]), int(starts[last] - starts[first])
        tokens = size // dtype.itemsize
        parts.append(
            Part(file=file, rows=last - first, tokens=tokens, size=size, kept=size, start=start, dtype=dtype.str)
        )
        first = last
    return parts
