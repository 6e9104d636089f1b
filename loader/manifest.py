"""The manifest of a shard set: what its files are, and how to know that they are whole.

A shard set is a folder with `manifest.json` (written last, atomically), the shards (`shard-00000.arrow`, ...) and the
lengths index (`lengths.arrow`). This module is the format's one description; it opens no shard.

Shards are Arrow IPC files with the columns `input_ids: large_list<uint16|uint32>`, `doc_id: large_string` and
`source: uint16` (an index into `Manifest.sources`). A shard may have the column `targets: large_list<int32>`: of each
document start, end pairs of the token ranges that are to be learned, ascending, not empty, not overlapping, inside the
document. A null there, as a shard without the column, means that all of a document is supervised, an empty list that
nothing is. The lengths index has one row per document, in shard order: `length: int64`, `supervised: int64` (labels
that are not -100 once labels are shifted inside the document: its supervised tokens but the first), and once more
`source: uint16`, so that the order is known without any shard (sets of earlier versions have it in the shards only).

Beside these a set may have the files of `COMPANIONS`, whose checksums are in the manifest, as is the manifest's own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import xxhash
from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.explain import explain
from seqmesh.loader.files import atomic_write, checksum

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
LENGTHS_NAME = "lengths.arrow"
COMPANIONS = ("quarantine.jsonl", "tokenizer.json", "tokenizer.model")
MAX_VOCABULARY = 1 << 31  # ids travel as int32

TokenDtype = Literal["uint16", "uint32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the set: `bytes` long, `xxh3` its xxh3-128 checksum in hexadecimal."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    file: str
    rows: int
    tokens: int
    bytes: int
    xxh3: str

    def __post_init__(self) -> None:
        if "/" in self.file or self.file in ("", ".", ".."):
            raise ValueError(f"file is {self.file!r}: must be a plain name inside the set's folder")
        if min(self.rows, self.tokens, self.bytes) < 0:
            raise ValueError(f"{self.file}: rows, tokens and bytes must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A finished shard set. Nothing in it depends on when, where or with how many workers it was made."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    token_dtype: TokenDtype
    vocab_size: int
    tokenizer: str  # fingerprint: tokenizer bytes and every option that changes tokens, nothing else; + chat template's
    eod_id: int | None  # ends every document
    sources: tuple[str, ...]
    shards: tuple[FileEntry, ...]
    lengths: FileEntry
    counts: dict[str, int]  # what prepare read, kept, found empty, refused
    bod_id: int | None = None  # begins every document
    format: int = FORMAT_VERSION
    beside: dict[str, str] = field(default_factory=dict, compare=False)  # of each companion, its xxh3-128
    xxh3: str = field(default="", compare=False)  # of the manifest without it; sets of earlier versions have neither

    def __post_init__(self) -> None:
        if self.format != FORMAT_VERSION:
            raise ValueError(f"format is {self.format}: this version of seqmesh reads format {FORMAT_VERSION}")
        if token_dtype(self.vocab_size) != np.dtype(self.token_dtype):
            raise ValueError(f"token_dtype is {self.token_dtype}: does not fit a vocabulary of {self.vocab_size}")
        for what in ("rows", "tokens"):
            total = sum(getattr(shard, what) for shard in self.shards)
            if getattr(self.lengths, what) != total:
                raise ValueError(f"lengths index has {getattr(self.lengths, what)} {what}, the shards have {total}")

    @property
    def documents(self) -> int:
        return self.lengths.rows

    @property
    def tokens(self) -> int:
        return self.lengths.tokens


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The narrowest unsigned integer that holds every id below `vocab_size`. Raises ValueError out of range."""
    if not 1 <= vocab_size <= MAX_VOCABULARY:
        raise ValueError(f"vocab_size is {vocab_size}: must be from 1 to {MAX_VOCABULARY}")
    return np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.uint32)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Declare the set complete. Call it once every file of it is on the disk. Checksums of the companions that are
    there, and of the manifest, are added."""
    beside = {name: checksum(folder / name) for name in COMPANIONS if (folder / name).is_file()}
    manifest = replace(manifest, beside=beside, xxh3="")
    digest = xxhash.xxh3_128_hexdigest(manifest_bytes(manifest))
    atomic_write(folder / MANIFEST_NAME, manifest_bytes(replace(manifest, xxh3=digest)))


def manifest_bytes(manifest: Manifest) -> bytes:
    """What is in the file."""
    return json.dumps(asdict(manifest), indent=1, sort_keys=True).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest. Raises FileNotFoundError where there is none, ValueError where it is unfit."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a finished shard set: it has no {MANIFEST_NAME}")
    return parse_manifest(path.read_bytes(), str(path))


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Raises ValueError, which says where it was found, for anything that is no manifest."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{where} is not a valid manifest: {explain(error)}") from error


_ADAPTER = TypeAdapter(Manifest)
