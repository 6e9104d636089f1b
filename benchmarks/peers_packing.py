"""Packers that others publish, each behind its fastest interface for a list of lengths.

A peer is imported when it is first measured. What turns lengths into its kind of input is done beforehand and not
timed, nor is what turns its answer into numbers that can be compared. Versions known to work: lightbinpack 0.1.1,
seqpacker 0.1, trl 1.16, grain 0.2.18, prtpy 0.8.3, binpacking 2.0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np

from seqmesh.packer.lengths import Int64Array

GRAIN_BINS = 64  # that it fills at a time

Packed = tuple[Int64Array, Int64Array]  # lengths of the packed documents, bin after bin; documents in each bin


@dataclass(frozen=True, slots=True)
class Prepared:
    """A packer with its input ready. call(): what is timed. packed(answer): what it says, in numbers."""

    call: Callable[[], Any]
    packed: Callable[[Any], Packed]


Adapter = Callable[[Int64Array, int], Prepared]  # lengths, capacity


def check(packed: Packed, lengths: Int64Array, capacity: int) -> dict[str, int]:
    """bins; overfull: bins over the capacity; missing: documents of whose length there are fewer in the bins than
    there should be."""
    found, documents = packed
    sums = np.append(0, np.cumsum(found))
    ends = np.append(0, np.cumsum(documents))
    loads = np.diff(sums[ends])
    size = 1 + max(int(lengths.max()), int(found.max()))
    lost = np.bincount(lengths, minlength=size) - np.bincount(found, minlength=size)
    return {
        "bins": len(documents),
        "overfull": int((loads > capacity).sum()),
        "missing": int(np.maximum(lost, 0).sum()),
    }


def lightbinpack(lengths: Int64Array, capacity: int) -> Prepared:
    """Best-fit decreasing with a counting sort, in C++. Takes and gives lists; an array would slow it by a quarter."""
    best_fit, sizes = import_module("lightbinpack").obfd, lengths.tolist()
    return Prepared(lambda: best_fit(sizes, capacity), lambda bins: _of_indices(bins, lengths))


def seqpacker(lengths: Int64Array, capacity: int) -> Prepared:
    """Best-fit decreasing in Rust. Flat arrays in and out: the documents, and the places where to split them."""
    packer = import_module("seqpacker").Packer(capacity, strategy="obfd")

    def packed(answer: tuple[Any, Any]) -> Packed:
        order, splits = (np.asarray(part).astype(np.int64) for part in answer)
        return lengths[order], np.diff(splits, prepend=0, append=len(order))

    return Prepared(lambda: packer.pack_flat(lengths), packed)


def trl(lengths: Int64Array, capacity: int) -> Prepared:
    """What `trl.pack_dataset(strategy="bfd")` calls for a batch, on one batch of all documents; tokens that take no
    memory, so that none is moved."""
    arrow, pack_table = import_module("pyarrow"), import_module("trl.data_utils")._pack_bfd
    offsets = np.append(0, np.cumsum(lengths))
    documents = arrow.LargeListArray.from_arrays(arrow.array(offsets), arrow.nulls(int(offsets[-1])))
    table = arrow.table({"input_ids": documents})
    return Prepared(lambda: pack_table(table, capacity), _of_table)


def grain(lengths: Int64Array, capacity: int) -> Prepared:
    """First fit in the order of the input, 64 bins at a time, read to the end. It moves tokens: one byte each, the
    least there is. It has no interface for lengths alone."""
    library, tokens = import_module("grain"), np.zeros(capacity, np.int8)
    documents = [{"tokens": tokens[:length], "document": i} for i, length in enumerate(lengths.tolist())]
    source = library.MapDataset.source(documents).to_iter_dataset(library.ReadOptions(num_threads=0))
    packing = import_module("grain.experimental").FirstFitPackIterDataset(
        source,
        length_struct={"tokens": capacity},
        num_packing_bins=GRAIN_BINS,
        shuffle_bins=False,
        meta_features=("document",),
    )
    return Prepared(
        lambda: [each["document"] for each in packing],
        lambda bins: _of_indices(bins, lengths),
    )


def prtpy(lengths: Int64Array, capacity: int) -> Prepared:
    """Best-fit decreasing in Python, which tries every bin."""
    pack, best_fit = import_module("prtpy").pack, import_module("prtpy.packing.best_fit").decreasing
    sizes = lengths.tolist()
    return Prepared(lambda: pack(algorithm=best_fit, binsize=capacity, items=sizes), _of_lengths)


def binpacking(lengths: Int64Array, capacity: int) -> Prepared:
    """Its greedy packing into bins of constant volume, in Python, which tries every bin."""
    pack, sizes = import_module("binpacking").to_constant_volume, lengths.tolist()
    return Prepared(lambda: pack(sizes, capacity), _of_lengths)


FAST: dict[str, Adapter] = {"lightbinpack": lightbinpack, "seqpacker": seqpacker}
SLOW: dict[str, Adapter] = {"trl": trl, "grain": grain, "prtpy": prtpy, "binpacking": binpacking}
"""Those that take seconds for tens of thousands of documents; they are given ten thousand or fewer."""

ADAPTERS = FAST | SLOW


def _of_lengths(bins: Sequence[Iterable[Any]]) -> Packed:
    contents = [list(each) for each in bins]
    documents = np.fromiter(map(len, contents), np.int64, len(contents))
    return np.fromiter(chain.from_iterable(contents), np.int64, int(documents.sum())), documents


def _of_indices(bins: Sequence[Iterable[Any]], lengths: Int64Array) -> Packed:
    indices, documents = _of_lengths(bins)
    return lengths[indices], documents


def _of_table(table: Any) -> Packed:
    held = table["seq_lengths"].combine_chunks()
    return held.flatten().to_numpy().astype(np.int64), held.value_lengths().to_numpy().astype(np.int64)
