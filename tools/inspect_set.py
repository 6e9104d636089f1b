"""`seqmesh inspect`: what is in a shard set, from its manifest and lengths index.

Reads lengths and the column of sources through memory maps; tokens are touched only for a document that is shown. File
sizes are compared with the manifest first, which finds missing and cut files; checksums are not computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqmesh.loader.manifest import LENGTHS_NAME, FileEntry, Manifest, read_manifest
from seqmesh.tools import shuffles
from seqmesh.tools.shuffles import ShuffleOptions
from seqmesh.tools.units.filters import FILTERED

PERCENTILES = (1, 25, 50, 75, 90, 99, 100)
LONG_ABOVE = (4096, 32768, 131072)
BAR_WIDTH = 12
TOP_SOURCES = 20

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSummary:
    """The numbers that `seqmesh inspect` prints."""

    manifest: Manifest
    source_documents: dict[str, int]
    source_tokens: dict[str, int]
    percentiles: dict[int, int]  # of document length, nearest rank; empty for a set without documents
    histogram: tuple[Bucket, ...]
    long_share: dict[int, float]  # share of tokens in documents longer than the key


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """One document as stored."""

    doc_id: str
    source: str
    ids: npt.NDArray[np.unsignedinteger[Any]]


def inspect_set(folder: Path) -> SetSummary:
    """Summarise a set. Raises FileNotFoundError or ValueError naming the file that is missing or cut."""
    manifest = open_manifest(folder)
    lengths = _lengths(folder)
    sources = _sources(folder, manifest)
    size = len(manifest.sources)
    documents = np.bincount(sources, minlength=size)
    tokens = np.zeros(size, np.int64)
    np.add.at(tokens, sources, lengths)
    return SetSummary(
        manifest=manifest,
        source_documents=dict(zip(manifest.sources, documents.tolist(), strict=True)),
        source_tokens=dict(zip(manifest.sources, tokens.tolist(), strict=True)),
        percentiles=length_percentiles(lengths),
        histogram=length_histogram(lengths),
        long_share={limit: _share(lengths[lengths > limit].sum(), lengths.sum()) for limit in LONG_ABOVE},
    )


def read_document(folder: Path, index: int) -> StoredDocument:
    """Document number `index` of the set, counted from 0. Raises ValueError where there is none."""
    manifest = open_manifest(folder)
    if not 0 <= index < manifest.documents:
        raise ValueError(f"{folder} has no document {index}: it holds {manifest.documents}, counted from 0")
    row = index
    for shard in manifest.shards:
        if row < shard.rows:
            break
        row -= shard.rows
    for batch in _batches(folder / shard.file):
        if row < batch.num_rows:
            break
        row -= batch.num_rows
    return StoredDocument(
        doc_id=batch.column("doc_id")[row].as_py(),
        source=manifest.sources[batch.column("source")[row].as_py()],
        ids=batch.column("input_ids")[row].values.to_numpy(),
    )


def decoded(folder: Path, document: StoredDocument) -> str:
    """Its text, by the set's own tokenizer. Raises where that file is missing or not the one recorded."""
    from seqmesh.tools.tokenizers.file import decode, load_recorded  # slow to import, and rarely needed

    return decode(load_recorded(folder, read_manifest(folder)), document.ids)


def open_manifest(folder: Path) -> Manifest:
    """The manifest, once every file it names is there in its full size."""
    manifest = read_manifest(folder)
    for entry in (manifest.lengths, *manifest.shards):
        _check_size(folder / entry.file, entry)
    return manifest


def length_percentiles(lengths: Int64Array) -> dict[int, int]:
    """Nearest-rank percentiles: each is the length of some document."""
    if not lengths.size:
        return {}
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    return dict(zip(PERCENTILES, map(int, values), strict=True))


def length_histogram(lengths: Int64Array) -> tuple[Bucket, ...]:
    """Power-of-two buckets (1, 2–3, 4–7, ...) from the shortest document's to the longest's."""
    if not lengths.size:
        return ()
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2), exact below 2^53
    first = int(exponents.min())
    documents = np.bincount(exponents - first)
    tokens = np.zeros(len(documents), np.int64)
    np.add.at(tokens, exponents - first, lengths)
    return tuple(
        Bucket(low=1 << first + i, high=(2 << first + i) - 1, documents=int(documents[i]), tokens=int(tokens[i]))
        for i in range(len(documents))
    )


def run(
    *,
    folder: Path,
    show: int | None = None,
    shuffle: bool = False,
    windows: tuple[int, ...] = (),
    seed: int | None = None,
    epoch: int | None = None,
    console: Console | None = None,
) -> None:
    """The whole command: tables about the set, or with `show` one document as text, or with `shuffle` a table of
    shuffles, to which the other options belong. Raises ValueError for options that do not go together."""
    console = console or Console()
    if shuffle and show is not None:
        raise ValueError("show and shuffle are both set: ask for one of them")
    if shuffle:
        shuffles.run(folder, ShuffleOptions(windows=windows, seed=seed or 0, epoch=epoch or 0), console)
        return
    if windows or seed is not None or epoch is not None:
        raise ValueError("window, seed and epoch belong to --shuffle, which is not set")
    if show is not None:
        _print_document(console, folder, show)
        return
    summary = inspect_set(folder)
    console.print(Text(str(folder)), soft_wrap=True)
    console.print(_overview(summary))
    if summary.percentiles:
        console.print(_source_table(summary))
        console.print(_histogram_table(summary))


def _check_size(path: Path, entry: FileEntry) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the manifest names it, so the set is not whole")
    size = path.stat().st_size
    if size != entry.bytes:
        what = "cut short" if size < entry.bytes else "too long"
        raise ValueError(f"{path} is {what}: {size} bytes, the manifest says {entry.bytes}")


def _batches(path: Path) -> list[pa.RecordBatch]:
    """The record batches of an Arrow file, as views of its memory map."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _column(path: Path, name: str) -> list[npt.NDArray[Any]]:
    return [batch.column(name).to_numpy() for batch in _batches(path)]


def _lengths(folder: Path) -> Int64Array:
    return np.concatenate([np.zeros(0, np.int64), *_column(folder / LENGTHS_NAME, "length")])


def _sources(folder: Path, manifest: Manifest) -> Int64Array:
    parts = [part for shard in manifest.shards for part in _column(folder / shard.file, "source")]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else 0.0


def _overview(summary: SetSummary) -> Table:
    manifest = summary.manifest
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("documents", f"{manifest.documents:,}")
    table.add_row("tokens", f"{manifest.tokens:,}")
    table.add_row("shards", f"{len(manifest.shards):,} ({sum(shard.bytes for shard in manifest.shards):,} bytes)")
    table.add_row("vocabulary", f"{manifest.vocab_size:,} ({manifest.token_dtype})")
    table.add_row("tokenizer", Text(manifest.tokenizer))
    if manifest.bod_id is not None:
        table.add_row("begin of document", f"id {manifest.bod_id}")
    table.add_row("end of document", "none" if manifest.eod_id is None else f"id {manifest.eod_id}")
    for name in ("documents_in", "empty", "refused", *FILTERED):
        if name in manifest.counts:
            table.add_row(name.replace("_", " "), f"{manifest.counts[name]:,}")
    if summary.percentiles:
        table.add_section()
        table.add_row("mean length", f"{manifest.tokens / manifest.documents:,.1f}")
        for percent, length in summary.percentiles.items():
            table.add_row("longest" if percent == 100 else f"{percent} % are at most", f"{length:,}")
        for limit, share in summary.long_share.items():
            table.add_row(f"tokens in documents above {limit >> 10}K", f"{share:.1%}")
    return table


def _source_table(summary: SetSummary) -> Table:
    table = Table("source", title="sources", title_justify="left")
    table.add_column("documents", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    tokens = summary.source_tokens
    ranked = sorted(tokens, key=lambda name: (-tokens[name], name))
    rows = [(name, summary.source_documents[name], tokens[name]) for name in ranked[:TOP_SOURCES]]
    if rest := ranked[TOP_SOURCES:]:
        others = sum(summary.source_documents[name] for name in rest), sum(tokens[name] for name in rest)
        rows.append((f"{len(rest)} others", *others))
    for name, documents, count in rows:
        table.add_row(Text(name), f"{documents:,}", f"{count:,}", f"{_share(count, summary.manifest.tokens):.1%}")
    return table


def _histogram_table(summary: SetSummary) -> Table:
    table = Table(title="length of documents, in tokens", title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("length", justify="right")
    for what in ("documents", "tokens"):
        table.add_column(what, justify="right")
        table.add_column(f"share of {what}", no_wrap=True)
    for bucket, documents, tokens in zip(
        summary.histogram,
        _bars([bucket.documents for bucket in summary.histogram]),
        _bars([bucket.tokens for bucket in summary.histogram]),
        strict=True,
    ):
        table.add_row(f"{bucket.low:,}+", f"{bucket.documents:,}", documents, f"{bucket.tokens:,}", tokens)
    return table


def _bars(values: Sequence[int]) -> list[str]:
    """One bar per value, the largest of full width, each followed by its share of the sum."""
    total, largest = sum(values), max(values)
    widths = [round(BAR_WIDTH * value / largest) for value in values]
    return [f"{'█' * width:<{BAR_WIDTH}} {value / total:6.1%}" for width, value in zip(widths, values, strict=True)]


def _print_document(console: Console, folder: Path, index: int) -> None:
    document = read_document(folder, index)
    text = decoded(folder, document)
    head = f"document {index}: {document.doc_id}, source {document.source}, {len(document.ids):,} tokens"
    console.print(Text(_printable(head)), style="bold")
    console.print(Text(_printable(text)), soft_wrap=True)


def _printable(text: str) -> str:
    """Control characters (escape sequences among them) as visible pictures, so that data cannot steer a terminal."""
    pictures = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
    return text.translate(pictures | dict.fromkeys(range(0x80, 0xA0), 0xFFFD))
