"""The same documents in every format that the loader reads."""

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqmesh.tools.shard_writer import write_shards

Documents = Sequence[np.ndarray[Any, Any]]
MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def table_of(
    documents: Documents,
    kind: pa.DataType | None = None,
    *,
    sources: Sequence[str] | None = None,
    targets: Sequence[Any] | None = None,
) -> pa.Table:
    """One row for each document."""
    columns = {"input_ids": pa.array([each.tolist() for each in documents], kind or pa.list_(pa.int32()))}
    if sources is not None:
        columns["source"] = pa.array(sources)
    if targets is not None:
        flat = [None if each is None else [n for pair in each for n in pair] for each in targets]
        columns["targets"] = pa.array(flat, pa.list_(pa.int32()))
    return pa.table(columns)


def write_parquet(folder: Path, table: pa.Table, *, files: int = 3, rows: int = 7) -> Path:
    """So many files, in row groups of so many rows."""
    folder.mkdir(parents=True)
    for number, part in enumerate(cut(table, files)):
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=rows)
    return folder


def write_arrow(folder: Path, table: pa.Table, *, files: int = 3, rows: int = 7) -> Path:
    """As `Dataset.save_to_disk` does, in record batches of so many rows."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for name, part in zip(names, cut(table, files), strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part, max_chunksize=rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def write_megatron(prefix: Path, documents: Documents, dtype: str = "int32", *, sequences: int = 1) -> Path:
    """As Megatron-Core's `IndexedDatasetBuilder` does; each document is of up to so many sequences."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    pieces = [piece for each in documents for piece in np.array_split(each, min(sequences, max(len(each), 1)))]
    counts = [min(sequences, max(len(each), 1)) for each in documents]
    width = np.dtype(dtype).itemsize
    sizes = np.array([len(piece) for piece in pieces], np.int32)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes[:-1], dtype=np.int64) * width))[: len(pieces)]
    Path(f"{prefix}.bin").write_bytes(b"".join(piece.astype(dtype).tobytes() for piece in pieces))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(pieces), len(documents) + 1)
    first = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    Path(f"{prefix}.idx").write_bytes(header + sizes.tobytes() + starts.tobytes() + first.tobytes())
    return prefix


def cut(table: pa.Table, files: int) -> list[pa.Table]:
    """Tables of about equally many rows, one after the other."""
    edges = [table.num_rows * number // files for number in range(files + 1)]
    return [table.slice(first, last - first) for first, last in pairwise(edges)]


def write_all(folder: Path, documents: Documents, *, vocab: int, **columns: Any) -> dict[str, Path]:
    """Where the same documents lie in each format. Sources and targets only where the format has them."""
    write_shards(folder / "shards", documents, vocab_size=vocab, shard_tokens=500, **columns)
    table = table_of(documents, **columns)
    found = {
        "seqmesh": folder / "shards",
        "parquet": write_parquet(folder / "parquet", table),
        "huggingface": write_arrow(folder / "arrow", table),
    }
    if not columns:
        found["megatron"] = write_megatron(folder / "megatron" / "text_document", documents)
    return found
