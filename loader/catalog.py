"""What a set of documents is, whatever format it is kept in: `Catalog`, its `Part`s, and `Chunk`s of open parts.

A part is what is fetched, kept and let go of as a whole: a file, or a range of a large one. Documents are numbered
through all parts, in order. Which formats there are, and how each is read, is in `formats`; nothing is opened here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from seqmesh.loader.storage.location import Location
from seqmesh.packer.lengths import Int64Array

FormatName = Literal["seqmesh", "parquet", "huggingface", "megatron"]
BadShards = Literal["refuse", "quarantine"]

ALL = "all"  # the name of the source that is the whole set
COLUMN = "input_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a format does not say by itself. column: of the token ids, in Parquet and Hugging Face sets. vocab_size: ids
    are below it; a shard set knows its own, others must be told. bad_shards: refuse a set with a file that can not be
    read, or leave that file out and say so."""

    column: str = COLUMN
    vocab_size: int | None = None
    bad_shards: BadShards = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`size` bytes of a file of the set, from `start` on, with so many documents and tokens. kept: bytes of a local
    copy. xxh3: checksum of the bytes, where the format has one. dtype: of ids, where the file does not say."""

    file: str
    rows: int
    tokens: int
    size: int
    kept: int
    start: int = 0
    xxh3: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Catalog:
    """A set, as far as it is known without reading tokens.

    lengths, supervised [N]: tokens of each document, and labels of it that count. codes [N]: its source, as a place in
    `sources`; None: still to be read from the parts. fingerprint: which data this is, wherever it lies. bad: parts that
    can not be read, and why; their documents, if it is known how many they are, are not served.
    part_first [P + 1]: number of the first document of each part, and of all.
    """

    location: Location
    format: FormatName
    parts: tuple[Part, ...]
    lengths: Int64Array
    supervised: Int64Array
    sources: tuple[str, ...]
    codes: npt.NDArray[np.uint16] | None
    vocab_size: int
    fingerprint: str
    column: str = COLUMN
    bad: dict[int, str] = field(default_factory=dict)
    part_first: Int64Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        first = np.cumsum([0, *(part.rows for part in self.parts)], dtype=np.int64)
        object.__setattr__(self, "part_first", first)

    def name_of(self, part: Part) -> str:
        """What messages say of a part."""
        return str(self.location.child(part.file))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Documents that lie in memory one after the other: a record batch, say.

    offsets [R + 1]: where each begins in `ids`; int64. ids: of any integer type. spans: a row of the table for
    `spans.locate_spans`; holds: what keeps the memory of that alive. columns: the record batch, where there is one.
    """

    offsets: Int64Array
    ids: npt.NDArray[Any]
    spans: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    holds: Any = None
    columns: Any = None

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def limit(self) -> int:
        """Ids of this type are below it, those of signed types that are negative left out; see `gather`."""
        bits = 8 * self.ids.itemsize - (self.ids.dtype.kind == "i")
        return 1 << min(bits, 62)

    @property
    def lengths(self) -> Int64Array:
        return np.diff(self.offsets)
