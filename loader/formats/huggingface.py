"""Hugging Face datasets as `Dataset.save_to_disk` leaves them: Arrow files in the stream format, and `state.json`.

The stream format has no index at its end, so a file that was cut short looks whole: its end mark is asked for.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pyarrow as pa

from seqmesh.loader.catalog import COLUMN, Chunk, Reading
from seqmesh.loader.chunks import chunk_of
from seqmesh.loader.errors import ShardError
from seqmesh.loader.files import END_OF_STREAM
from seqmesh.loader.formats.scanned import Files
from seqmesh.loader.storage.location import Location

STATE_NAME = "state.json"
SPLITS_NAME = "dataset_dict.json"


def files_of(location: Location, sizes: dict[str, int], reading: Reading) -> Files:
    """The files of a saved dataset, in its order. Raises ShardError where one is missing, ValueError for an unfit
    state.json."""
    try:
        names = [str(entry["filename"]) for entry in json.loads(location.read(STATE_NAME))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{location.child(STATE_NAME)} is not that of a saved dataset: {error!r}") from error
    if missing := [name for name in names if name not in sizes]:
        raise ShardError(f"{location.child(missing[0])}: is missing; {STATE_NAME} lists it")
    return Files(
        location=location,
        format="huggingface",
        sizes={name: sizes[name] for name in names},
        opened=partial(chunks, column=reading.column),
        bring=None if location.is_local else location.fetch,
    )


def chunks(path: Path, where: str, column: str = COLUMN) -> list[Chunk]:
    """The documents of a file. Raises ShardError where it is damaged or cut short."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - len(END_OF_STREAM), 0))
            if file.read() != END_OF_STREAM:
                raise ShardError(f"{where}: is cut short: it has no end mark; save or copy it again")
        with pa.ipc.open_stream(pa.memory_map(str(path))) as reader:
            batches = list(reader)
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardError(f"{where}: can not be read as an Arrow stream: {error}") from error
    return [chunk_of(batch, column, where) for batch in batches if batch.num_rows]
