"""How torch.distributed.checkpoint sees the tensors of a checkpoint: it plans who reads what, and checks who writes."""

from __future__ import annotations

from heapq import heapreplace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from seqmesh.trainer.part import Part, Saved


class Box:
    """A `Part` as `torch.distributed._checkpointable._Checkpointable`."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def size(self) -> torch.Size:
        return self.part.shape

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.part.local.dtype), size=self.part.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """One chunk, none where the part holds nothing."""
        part = self.part
        if part.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=part.local.shape)]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.part.local


def planned(tensors: Saved) -> dict[str, Any]:
    """The tensors as the planner takes them."""
    return {name: Box(part) for name, part in tensors.items()}


def share_out(tensors: Saved, replicas: int) -> dict[str, int]:
    """For each shared tensor the replica that reads or writes it for all, so that each has about as many bytes. The
    same on all replicas, without a word between them."""
    shared = {name: part.local.nbytes for name, part in tensors.items() if part.shared}
    loads = [(0, replica) for replica in range(replicas)]
    chosen: dict[str, int] = {}
    for name in sorted(shared, key=lambda name: (-shared[name], name)):
        load, chosen[name] = loads[0]
        heapreplace(loads, (load + shared[name], chosen[name]))
    return chosen
