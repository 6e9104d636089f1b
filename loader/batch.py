"""`PackedBatch`: what one rank gets for one micro-batch, and `assemble`, which gathers it from the shards.

Boundaries travel explicitly (`cu_seqlens`); positions restart in every document. Labels are shifted inside the
document before it is split over ranks, so a rank never needs a neighbour's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from seqmesh.loader.planner import Step
from seqmesh.loader.shards import ShardSet
from seqmesh.packer.jit import array_at, jit, pointer
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import piece_ranges, piece_tokens

UNSUPERVISED = -100

A = TypeVar("A")  # numpy arrays in the loader, torch tensors in user code
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(Generic[A]):
    """T tokens of N segments, for one rank in one wave of one step.

    input_ids, labels, position_ids [T]: int32 on the wire; labels are shifted, -100 where nothing is to be learned;
    positions count from the document's start. cu_seqlens [N + 1] int32: segment i is rows cu_seqlens[i] to
    cu_seqlens[i + 1]; `pad` rows follow the last. Per segment [N], int64: document_ids (row of the set),
    document_offsets (tokens of that row before the document, not 0 only for pieces of an overlong one),
    document_lengths (tokens of the whole document, on all its ranks), ring_ids (-1: whole on this rank), ring_sizes,
    ring_indices; ring_ranks: the members of all segments' rings, one after the other (this rank itself for a document
    that is whole). A piece of a ring is its early chunk followed by its late one, see `packer.pieces`. waves: micro-
    batches that this rank has in this step; a rank without documents gets one batch of no tokens, so that every rank
    sees every step. supervised_tokens_in_step: divide the summed loss by it, on every rank. tokens_in_step,
    rings_in_step (documents spread over ranks), imbalance (makespan over the mean rank's work) and plan (digest)
    describe the whole step; next_plan is the digest of the step after, empty at the end.
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
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {name: convert(name, values[name]) for name in ARRAYS}
        return PackedBatch(**(values | arrays))


NumpyBatch = PackedBatch[npt.NDArray[Any]]

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


def assemble(shards: ShardSet, step: Step, rank: int, wave: int, *, next_plan: str = "") -> NumpyBatch:
    """Gather one micro-batch. Raises ShardError where a shard is damaged."""
    plan = step.plan
    pieces = plan.pieces(rank, wave)
    order, ring_size, ring_index = plan.document[pieces], plan.ring_size[pieces], plan.ring_index[pieces]
    documents, offsets, lengths = step.documents.document[order], step.documents.offset[order], plan.lengths[order]
    rows = piece_tokens(lengths, ring_size, ring_index)
    cu_seqlens = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(rows, out=cu_seqlens[1:])
    tokens = int(cu_seqlens[-1])
    input_ids, labels, position_ids = (np.empty(tokens, np.int32) for _ in range(3))
    addresses = shards.addresses(documents) + offsets * shards.token_dtype.itemsize
    early, late = piece_ranges(lengths, ring_size, ring_index)
    starts = cu_seqlens[:-1].astype(np.int64)
    for row, (first, last) in ((starts, early), (starts + early[1] - early[0], late)):
        _gather(addresses, row, first, last, lengths, shards.token_dtype, input_ids, labels, position_ids)
    members = [plan.ring_ranks[plan.ring_offsets[d] : plan.ring_offsets[d + 1]] for d in order]
    return PackedBatch(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        document_ids=documents,
        document_offsets=offsets,
        document_lengths=lengths,
        ring_ids=np.where(ring_size > 1, order, -1),
        ring_sizes=ring_size,
        ring_indices=ring_index,
        ring_ranks=np.concatenate([np.zeros(0, np.int64), *members]),
        max_seqlen=int(rows.max(initial=0)),
        pad=0,
        step=step.before.step,
        epoch=step.before.epoch,
        wave=wave,
        waves=max(int(plan.waves[rank]), 1),
        tokens=tokens,
        tokens_in_step=plan.tokens,
        supervised_tokens_in_step=plan.supervised_tokens,
        rings_in_step=plan.rings,
        imbalance=plan.imbalance,
        offload_ratio=0.0,
        plan=step.digest,
        next_plan=next_plan,
    )


@jit
def _gather(
    addresses: Int64Array,
    starts: Int64Array,
    first: Int64Array,
    last: Int64Array,
    lengths: Int64Array,
    dtype: Any,
    input_ids: npt.NDArray[np.int32],
    labels: npt.NDArray[np.int32],
    position_ids: npt.NDArray[np.int32],
) -> None:
    """Copy token ranges: tokens first[i] to last[i] of the document of lengths[i] tokens at addresses[i] go to rows
    from starts[i]. The label of a token is the next one of its document, none for the last."""
    for i in range(len(addresses)):
        tokens = array_at(pointer(addresses[i]), (lengths[i],), dtype)
        a, b, row = first[i], last[i], starts[i]
        labelled = max(min(b, lengths[i] - 1), a)
        input_ids[row : row + b - a] = tokens[a:b]
        labels[row : row + labelled - a] = tokens[a + 1 : labelled + 1]
        if labelled < b:
            labels[row + b - a - 1] = UNSUPERVISED
        for position in range(a, b):
            position_ids[row + position - a] = position
