"""`seqmesh pack`: how well each packing method does on the lengths of a shard set, and which document is in which bin.

Only lengths are read, no token. Methods are compared by the bins they need, by what they cut off, by the attention work
that is left and by how unequal the bins are in work. One method's bins can be written as an Arrow IPC file with the
columns `document`, `start`, `length` and `bin`, a row for each piece, bin after bin; at its end, with bin −1, come the
documents that were dropped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.console import Console

from seqmesh.loader.files import atomic_path, atomic_write
from seqmesh.loader.manifest import read_manifest
from seqmesh.loader.shards import ShardSet
from seqmesh.packer.bins import LOOKAHEAD, METHODS, Bins, longest_piece, pack
from seqmesh.packer.cost import MODEL_8B, attended_pairs
from seqmesh.packer.lengths import Int64Array, as_lengths
from seqmesh.tools.output import check_folders, identity, print_written
from seqmesh.tools.pack_report import Comparison, MethodResult, draw, print_comparison

METADATA_KEY = "seqmesh"
BATCH_ROWS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """What `pack` is asked for, whatever the method; see there."""

    capacity: int
    overlong: str = "error"
    multiple: int = 1
    max_documents: int | None = None
    bins_multiple: int = 1
    seed: int | None = None
    epoch: int = 0
    lookahead: int = LOOKAHEAD


def run(
    *,
    folder: Path,
    options: PackOptions,
    methods: Sequence[str] = (),
    rows_per_step: int | None = None,
    output: Path | None = None,
    json_path: Path | None = None,
    plot: Path | None = None,
    force: bool = False,
    console: Console | None = None,
) -> Comparison:
    """The whole command; no methods are all of them. Raises ValueError or OSError before anything is packed where the
    set, an option or the output is unfit."""
    console = console or Console()
    chosen = tuple(dict.fromkeys(methods)) or METHODS
    check_options(options, chosen, rows_per_step)
    check_output(output, chosen, force=force)
    check_folders(output, json_path, plot)
    shards = ShardSet(folder)
    check_lengths(shards, options, chosen)
    lengths = as_lengths(shards.lengths)
    data = identity(folder, read_manifest(folder))
    results = []
    for method in chosen:
        with console.status(f"{method} ..."):
            bins, result = measure(lengths, options, method, rows_per_step)
        results.append(result)
        if output is not None:
            write_assignment(output, assignment(bins, lengths), data | _description(options, bins, method))
    found = _comparison(lengths, options, rows_per_step, results)
    print_comparison(console, found, folder)
    if json_path is not None:
        atomic_write(json_path, to_json(data, options, found))
    if plot is not None:
        draw(found, plot)
    print_written(console, output, json_path, plot)
    return found


def check_options(options: PackOptions, methods: Sequence[str], rows_per_step: int | None) -> None:
    """Raises ValueError for what is wrong whatever the documents are: packing none of them tells."""
    for method in methods:
        _packed(np.zeros(0, np.int64), options, method)
    if rows_per_step is not None and rows_per_step < 1:
        raise ValueError(f"rows_per_step is {rows_per_step}: must be at least 1")


def check_output(output: Path | None, methods: Sequence[str], *, force: bool) -> None:
    """Raises ValueError or FileExistsError where the bins are not to be written there."""
    if output is None:
        return
    if len(methods) != 1:
        raise ValueError(f"--output holds the bins of one method, there are {len(methods)}: choose with one --method")
    if output.exists() and not force:
        raise FileExistsError(f"{output} is there already: give another name, or --force to replace it")


def check_lengths(shards: ShardSet, options: PackOptions, methods: Sequence[str]) -> None:
    """Raises ValueError for a document that a bin does not hold, naming where it is, unless something is to be done
    with such documents. `concat` cuts all documents where a bin ends."""
    longest = longest_piece(options.capacity, options.multiple)
    over = np.flatnonzero(shards.lengths > longest)
    if options.overlong != "error" or set(methods) == {"concat"} or not len(over):
        return
    first = int(over[0])
    row = first - int(shards.part_first[shards.part_of(first)])
    raise ValueError(
        f"{shards.file_of(first)}, row {row} (document {first} of the set) has {shards.lengths[first]} tokens: more "
        f"than a bin holds, {longest} ({len(over)} such documents); choose --overlong split, truncate or drop, or a "
        "larger --capacity"
    )


def measure(
    lengths: Int64Array, options: PackOptions, method: str, rows_per_step: int | None = None
) -> tuple[Bins, MethodResult]:
    """Pack by one method, and what comes of it. Compiling is not counted in the time."""
    _packed(np.ones(options.bins_multiple, np.int64), options, method)
    begin = time.process_time()
    bins = _packed(lengths, options, method)
    seconds = time.process_time() - begin
    held = bins.lengths[bins.bin_of >= 0]
    work = bin_work(bins)
    return bins, MethodResult(
        method=method,
        bins=bins.count,
        bound=bins.bound,
        fill=bins.fill,
        tokens=bins.tokens,
        cut_tokens=bins.cut_tokens,
        split_documents=int(np.count_nonzero(np.bincount(bins.document) > 1)),
        attention=_ratio(_pairs(held), _pairs(lengths)),
        imbalance=_ratio(float(work.max(initial=0.0)) * len(work), float(work.sum())),
        waiting=None if rows_per_step is None else waiting(work, rows_per_step),
        seconds=seconds,
    )


def bin_work(bins: Bins) -> npt.NDArray[np.float64]:
    """FLOPs of each bin for `MODEL_8B`: those of its tokens, and those of attention inside each of its pieces."""
    held = bins.bin_of >= 0
    lengths = bins.lengths[held]
    work = lengths * float(MODEL_8B.flops_per_token) + attended_pairs(lengths) * float(MODEL_8B.flops_per_pair)
    return np.asarray(np.bincount(bins.bin_of[held], weights=work, minlength=bins.count), np.float64)


def waiting(work: npt.NDArray[np.float64], rows_per_step: int) -> float:
    """Time over work where so many bins in a row make a step that lasts as long as its dearest; 1.0 where none waits.
    What the last step lacks in bins counts as waiting."""
    steps = np.zeros((-(-len(work) // rows_per_step), rows_per_step))
    steps.flat[: len(work)] = work
    return _ratio(float(steps.max(axis=1).sum()) * rows_per_step, float(work.sum()))


def assignment(bins: Bins, lengths: Int64Array) -> pa.Table:
    """A row for each piece, bin after bin, each bin's in the order in which they were met; then dropped documents."""
    order = bins.order
    dropped = np.setdiff1d(np.arange(len(lengths)), bins.document[order])
    columns = {
        "document": (bins.document[order], dropped),
        "start": (bins.start[order], np.zeros_like(dropped)),
        "length": (bins.lengths[order], lengths[dropped]),
        "bin": (bins.bin_of[order], np.full_like(dropped, -1)),
    }
    return pa.table({name: pa.array(np.concatenate(parts)) for name, parts in columns.items()})


def write_assignment(path: Path, table: pa.Table, metadata: dict[str, Any]) -> None:
    """Write an Arrow IPC file, whole or not at all; its schema's metadata has one key, a JSON object."""
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(metadata)})
    try:
        with atomic_path(path) as temporary, pa.ipc.new_file(str(temporary), table.schema) as file:
            file.write_table(table, max_chunksize=BATCH_ROWS)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def to_json(data: dict[str, Any], options: PackOptions, found: Comparison) -> bytes:
    """Everything that is in the table, and the options, as indented JSON."""
    report = {"data": data, "options": asdict(options), "comparison": asdict(found)}
    return json.dumps(report, indent=1).encode() + b"\n"


def _packed(lengths: Int64Array, options: PackOptions, method: str) -> Bins:
    """Packed, with the pieces of each bin listed."""
    bins = pack(lengths, method=method, **asdict(options))
    assert len(bins.offsets) == bins.count + 1
    return bins


def _comparison(
    lengths: Int64Array, options: PackOptions, rows_per_step: int | None, results: list[MethodResult]
) -> Comparison:
    longest = longest_piece(options.capacity, options.multiple)
    return Comparison(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        capacity=options.capacity,
        overlong=int(np.count_nonzero(lengths > longest)),
        policy=options.overlong,
        rows_per_step=rows_per_step,
        results=tuple(results),
    )


def _description(options: PackOptions, bins: Bins, method: str) -> dict[str, Any]:
    return {"method": method, **asdict(options), "bins": bins.count, "cut_tokens": bins.cut_tokens}


def _pairs(lengths: Int64Array) -> float:
    return float(attended_pairs(lengths).sum(dtype=np.float64))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
