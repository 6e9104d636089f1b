"""Writes documents as tables: Parquet files, or a dataset as Hugging Face's `save_to_disk` leaves it.

Columns: `input_ids` (lists of uint16 or uint32, by the vocabulary), `doc_id`, `source` (strings), and `targets` (lists
of int32, start and end of each span) where the set has supervised spans. Lists have 32-bit offsets, which every reader
of these formats knows; a batch holds few enough ids for them. A file ends with the document that reaches `file_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqmesh.loader.files import atomic_write, sync_file
from seqmesh.loader.formats.huggingface import STATE_NAME
from seqmesh.loader.manifest import token_dtype
from seqmesh.tools.sets.blocks import Block

MOST_TOKENS = (1 << 31) - 1  # of a document, for 32-bit offsets
INFO = {"citation": "", "description": "", "homepage": "", "license": ""}


class TableWriter:
    """Use it in a `with` block; leaving it completes the last file, and the folder. fingerprint: of the documents, for
    the cache of `datasets`. with_targets: whether to write that column."""

    def __init__(
        self,
        folder: Path,
        kind: Literal["parquet", "huggingface"],
        *,
        sources: Sequence[str],
        vocab_size: int,
        with_targets: bool,
        file_tokens: int,
        fingerprint: str,
    ) -> None:
        if file_tokens < 1:
            raise ValueError(f"shard_tokens is {file_tokens}: must be at least 1")
        self._folder, self._kind, self._file_tokens, self._fingerprint = folder, kind, file_tokens, fingerprint
        self._sources = pa.array(sources, pa.string())
        self._dtype = token_dtype(vocab_size)
        fields = {
            "input_ids": pa.list_(pa.from_numpy_dtype(self._dtype)),
            "doc_id": pa.string(),
            "source": pa.string(),
        }
        self._schema = pa.schema(fields | ({"targets": pa.list_(pa.int32())} if with_targets else {}))
        self._files: list[Path] = []
        self._open = ExitStack()
        self._writer: Any = None
        self._tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._open.close()
            return
        if not self._files:
            self._begin()
        self._end()
        if self._kind == "huggingface":
            self._describe()

    def add(self, block: Block) -> None:
        """Raises ValueError for a document that is too long for the format."""
        if (longest := int(block.lengths.max(initial=0))) > MOST_TOKENS:
            raise ValueError(f"a document has {longest:,} tokens: {self._kind} holds at most {MOST_TOKENS:,}")
        start = 0
        while start < len(block):
            if self._writer is None:
                self._begin()
            reached = np.cumsum(block.lengths[start:]) + self._tokens
            stop = start + min(int(np.searchsorted(reached, self._file_tokens)) + 1, len(reached))
            self._writer.write_batch(self._batch(block.rows(start, stop)))
            self._tokens = int(reached[stop - start - 1])
            if self._tokens >= self._file_tokens:
                self._end()
            start = stop

    def _batch(self, block: Block) -> pa.RecordBatch:
        offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(block.lengths, dtype=np.int32)))
        ids: Any = pa.array(np.ascontiguousarray(block.ids, self._dtype))
        columns: list[Any] = [
            pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), ids),
            block.doc_ids.cast(pa.string()),
            self._sources.take(pa.array(block.codes, pa.uint16())),
        ]
        if "targets" in self._schema.names:
            targets = pa.nulls(len(block), pa.list_(pa.int32())) if block.targets is None else block.targets
            columns.append(targets.cast(pa.list_(pa.int32())))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _begin(self) -> None:
        number = len(self._files)
        name = f"part-{number:05d}.parquet" if self._kind == "parquet" else f"data-{number:05d}.arrow"
        path = self._folder / name
        if self._kind == "parquet":
            self._writer = self._open.enter_context(pq.ParquetWriter(path, self._schema, compression="zstd"))
        else:
            sink = self._open.enter_context(pa.OSFile(str(path), "wb"))
            self._writer = self._open.enter_context(pa.ipc.new_stream(sink, self._schema))
        self._files.append(path)
        self._tokens = 0

    def _end(self) -> None:
        """Complete the file that is being written, if one is."""
        self._open.close()
        if self._writer is not None:
            sync_file(self._files[-1])
        self._writer = None

    def _describe(self) -> None:
        """Give the files their names, which say how many there are, and write the two files that name them."""
        names = []
        for number, path in enumerate(self._files):
            names.append(f"data-{number:05d}-of-{len(self._files):05d}.arrow")
            path.rename(self._folder / names[-1])
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": self._fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, content in (("dataset_info.json", INFO), (STATE_NAME, state)):
            atomic_write(self._folder / name, json.dumps(content, indent=2).encode())
