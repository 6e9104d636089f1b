"""How torch.distributed.checkpoint sees the tensors of a checkpoint: it plans who writes and who reads what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from seqmesh.trainer.part import Part, Saved


class Rows:
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
        """One chunk, none for a rank without rows."""
        part = self.part
        if part.local.numel() == 0:
            return []
        start = (part.start, *(0 for _ in part.shape[1:])) if part.shape else ()
        return [ChunkStorageMetadata(offsets=torch.Size(start), sizes=part.local.shape)]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.part.local


def planned(tensors: Saved) -> dict[str, Any]:
    """The tensors as the planner takes them."""
    return {name: Rows(value) if isinstance(value, Part) else value for name, value in tensors.items()}


def local_of(value: Tensor | DTensor | Part) -> Tensor:
    """The storage of what this rank has."""
    if isinstance(value, Part):
        return value.local.detach()
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def dtype_of(value: Tensor | DTensor | Part) -> torch.dtype:
    return value.local.dtype if isinstance(value, Part) else value.dtype
