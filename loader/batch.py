"""`PackedBatch`: what one rank gets for one micro-batch; `outline` and `fill`, which gather it from the shards.

A batch's arrays lie in one block of memory, in the layout of `block_layout`, so that wherever a block lies or goes, the
number of items of each array is all that is needed to find them. `outline` tells the size before memory is taken,
`fill` writes. Boundaries travel explicitly (`cu_seqlens`); positions restart in every document. Labels are shifted
inside the document before it is split over ranks, so a rank never needs a neighbour's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from seqmesh.loader.errors import ShardError
from seqmesh.loader.gather import DOCUMENT, outline_segments, write_block
from seqmesh.loader.planner import Step
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.spans import mask_labels
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.offload import WHOLE
from seqmesh.packer.plan import StepPlan

ALIGNMENT = 64  # bytes, of each array in a block: a cache line

A = TypeVar("A")  # numpy arrays in the loader, torch tensors in user code
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(Generic[A]):
    """`tokens` tokens of N segments in T rows, for one rank in one wave of one step.

    input_ids, labels, position_ids [T]: int32 on the wire; labels are shifted, -100 where nothing is to be learned;
    positions count from the document's start. labels and position_ids have no items where the setting `fields` leaves
    them out. cu_seqlens [N + 1] int32: segment i is rows cu_seqlens[i] to cu_seqlens[i + 1]; `pad` rows of id 0, label
    -100, position 0 follow the last, none unless the setting `pad_to` asks for them. Per segment [N], int64:
    document_ids (row of the set), document_offsets (tokens of that row before the document, not 0 only for pieces of an
    overlong one), document_lengths (tokens of the whole document, on all its ranks), ring_ids (-1: whole on this rank),
    ring_sizes, ring_indices; ring_ranks: the members of all segments' rings, one after the other (this rank itself for
    a document that is whole). A piece of a ring is its early chunk followed by its late one, see `packer.pieces`.
    waves: micro- batches that this rank has in this step; a rank without documents gets one batch of no tokens, so that
    every rank sees every step. offload_ratio: the share of this batch's activations that has to be on the host between
    forward and backward, in all layers but the last `packer.offload.KEPT_LAYERS`, so that it counts as no more tokens
    than the capacity; 0.0 for none. supervised_tokens_in_step: divide the summed loss by it, on every rank.
    tokens_in_step, rings_in_step (documents spread over ranks), imbalance (makespan over the mean rank's work) and plan
    (digest) describe the whole step; next_plan is the digest of the step after, empty at the end.
    """

    input_ids: A
    labels: A
    position_ids: A
    cu_seqlens: A
    document_ids: A
    document_offsets: A
    document_lengths: A
    ring_ids: A
    ring_sizes: A
    ring_indices: A
    ring_ranks: A
    max_seqlen: int
    pad: int
    step: int
    epoch: int
    wave: int
    waves: int
    tokens: int
    tokens_in_step: int
    supervised_tokens_in_step: int
    rings_in_step: int
    imbalance: float
    offload_ratio: float
    plan: str
    next_plan: str

    @property
    def last_in_step(self) -> bool:
        """Whether the gradients of the step are complete on this rank after this batch."""
        return self.wave + 1 == self.waves

    def map(self, convert: Callable[[str, A], B]) -> PackedBatch[B]:
        """The same batch with every array converted by `convert(name, array)`."""
        values: dict[str, Any] = {name: convert(name, getattr(self, name)) for name in ARRAYS}
        values |= {name: getattr(self, name) for name in SCALARS}
        return PackedBatch(**values)


NumpyBatch = PackedBatch[npt.NDArray[Any]]
Block = npt.NDArray[np.uint8] | memoryview | bytes  # of bytes, in one dimension

ARRAYS = {
    "input_ids": "int32",
    "labels": "int32",
    "position_ids": "int32",
    "cu_seqlens": "int32",
    "document_ids": "int64",
    "document_offsets": "int64",
    "document_lengths": "int64",
    "ring_ids": "int64",
    "ring_sizes": "int64",
    "ring_indices": "int64",
    "ring_ranks": "int64",
}
_DTYPES = tuple(np.dtype(dtype) for dtype in ARRAYS.values())
_LABELS = tuple(ARRAYS).index("labels")
_WIDTHS = tuple(dtype.itemsize for dtype in _DTYPES)
_COUNTS = ("max_seqlen", "pad", "step", "epoch", "wave", "waves", "tokens", "tokens_in_step")
SCALARS: dict[str, type] = {
    **dict.fromkeys((*_COUNTS, "supervised_tokens_in_step", "rings_in_step"), int),
    "imbalance": float,
    "offload_ratio": float,
    "plan": str,
    "next_plan": str,
}


def batch_digest(batch: PackedBatch[Any]) -> str:
    """xxh3-128 of the content and the place of a batch, in hexadecimal: equal for equal batches, wherever served."""
    hasher = xxhash.xxh3_128(f"{batch.step}/{batch.wave}/{batch.waves}/{batch.supervised_tokens_in_step}".encode())
    for name, dtype in ARRAYS.items():
        array = np.ascontiguousarray(getattr(batch, name), dtype)  # takes torch's CPU tensors as well
        hasher.update(array.data)
    return hasher.hexdigest()


def step_digest(batches: Iterable[str]) -> str:
    """One digest for the digests of all batches that a rank got in a step, in order."""
    return xxhash.xxh3_128("".join(batches).encode()).hexdigest()


def block_layout(lengths: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Where each of ARRAYS, with so many items, begins in a block of memory, and the size of the block.

    All in bytes and multiples of 64, so that blocks may lie one after the other. Raises ValueError for another number
    of lengths.
    """
    starts, end = [], 0
    for items, width in zip(lengths, _WIDTHS, strict=True):
        starts.append(end)
        end += (items * width + ALIGNMENT - 1) & -ALIGNMENT
    return tuple(starts), end


def arrays_in(block: Block, lengths: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """The ARRAYS that lie in a block, as views. Raises ValueError where the block is smaller than they need."""
    starts, size = block_layout(lengths)
    if (given := len(block)) < size:
        raise ValueError(f"the block has {given} bytes: its arrays need {size}")
    return arrays_at(block, lengths, starts)


def arrays_at(block: Block, lengths: Sequence[int], starts: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """The same where the layout is known, and the block has been found large enough."""
    return {
        name: np.ndarray(items, dtype, block, start)
        for name, dtype, items, start in zip(ARRAYS, _DTYPES, lengths, starts, strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """All of a micro-batch but its tokens: known before memory is taken for it.

    segments [6, N], members: what `gather.outline_segments` gives. lengths: items of each of ARRAYS; starts, nbytes:
    their `block_layout`. scalars: SCALARS.
    """

    segments: Int64Array
    members: Int64Array
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int
    scalars: dict[str, int | float | str]


def outline(step: Step, rank: int, wave: int, settings: LoaderSettings, *, next_plan: str = "") -> Outline:
    """What the plan says of one micro-batch. Reads no shard."""
    plan, drawn = step.plan, step.documents
    segments, members, tokens, longest = outline_segments(
        rank,
        wave,
        plan.rank,
        plan.wave,
        plan.document,
        plan.ring_size,
        plan.ring_index,
        plan.lengths,
        plan.ring_offsets,
        plan.ring_ranks,
        drawn.document,
        drawn.offset,
    )
    rows = settings.padded(tokens)
    count = segments.shape[1]
    labels, position_ids = (rows * (name in settings.fields) for name in ("labels", "position_ids"))
    lengths = rows, labels, position_ids, count + 1, *[count] * 6, len(members)
    starts, nbytes = block_layout(lengths)
    return Outline(
        segments=segments,
        members=members,
        lengths=lengths,
        starts=starts,
        nbytes=nbytes,
        scalars=step.scalars
        | {
            "max_seqlen": longest,
            "pad": rows - tokens,
            "wave": wave,
            "waves": max(int(plan.waves[rank]), 1),
            "tokens": tokens,
            "offload_ratio": 0.0 if settings.offload is None else offload_ratio(plan, rank, wave),
            "next_plan": next_plan,
        },
    )


def offload_ratio(plan: StepPlan, rank: int, wave: int) -> float:
    """The share that one micro-batch offloads: all its pieces have the same one."""
    pieces = plan.pieces(rank, wave)
    return int(plan.offload[pieces[0]]) / WHOLE if len(pieces) else 0.0


def fill(shards: ShardSet, outline: Outline, block: npt.NDArray[np.uint8] | None = None) -> NumpyBatch:
    """Gather a micro-batch from the shards into `block`: at least `outline.nbytes` bytes, by default new ones. The
    batch's arrays are views of it. Raises as `write` does."""
    block = np.empty(outline.nbytes, np.uint8) if block is None else block
    write(shards, outline, block)
    fields: dict[str, Any] = arrays_at(block, outline.lengths, outline.starts) | outline.scalars
    return PackedBatch(**fields)


def write(shards: ShardSet, outline: Outline, block: npt.NDArray[np.uint8]) -> None:
    """Gather the arrays of a micro-batch into `block`. Raises ShardError where a shard is damaged, ValueError where the
    block is too small."""
    if len(block) < outline.nbytes:
        raise ValueError(f"the block has {len(block)} bytes: its arrays need {outline.nbytes}")
    documents = outline.segments[DOCUMENT]
    places = shards.places(documents)
    bad = write_block(outline.segments, outline.members, places, block, outline.starts, outline.lengths)
    if bad >= 0:
        raise ShardError(
            f"{shards.file_of(int(documents[bad]))}: document {documents[bad]} holds an id that is not below the "
            f"vocabulary's size, {shards.vocab_size}; the file is damaged"
        )
    if outline.lengths[_LABELS] and (spans := shards.spans(documents)) is not None:
        labels = arrays_at(block, outline.lengths, outline.starts)["labels"]
        mask_labels(outline.segments, spans.address, spans.count, labels)
