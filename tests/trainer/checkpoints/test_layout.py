"""Whatever boxes tensors are cut into, they are written once and read back into any others; nothing is left out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqmesh.trainer.checkpoints import read
from seqmesh.trainer.checkpoints.cover import uncovered
from seqmesh.trainer.checkpoints.files import write_file
from seqmesh.trainer.checkpoints.index import Entry, index_bytes, read_index
from seqmesh.trainer.checkpoints.layout import rank_file, written
from seqmesh.trainer.checkpoints.manifest import TENSORS
from seqmesh.trainer.checkpoints.save import stage
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Part, Saved, whole
from tests.checkpoints import ALONE

PROCESSES = 5
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Draw = Callable[[st.SearchStrategy[Any]], Any]
Box = tuple[tuple[int, int], ...]  # begin and end in each dimension


def cut(shape: Sequence[int], draw: Draw) -> list[Box]:
    """At most PROCESSES boxes that make the whole."""
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, PROCESSES - 1)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        begin, end = box[dim]
        middle = draw(st.integers(begin, end))
        boxes += [(*box[:dim], half, *box[dim + 1 :]) for half in ((begin, middle), (middle, end))]
    mixed: list[Box] = draw(st.permutations(boxes))
    return mixed


def part_of(tensor: Tensor, box: Box, *, spare: bool = False) -> Part:
    local = tensor[tuple(slice(*each) for each in box)].clone()
    return Part(local=local, shape=tensor.shape, offsets=tuple(begin for begin, _ in box), spare=spare)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=3))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=3, max_size=3))
    return {str(n): torch.randn(shape).to(dtype) for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))}


def spread(content: dict[str, Tensor], draw: Draw) -> list[Saved]:
    """What each process holds: a box of a tensor, a spare one or nothing; or all of it, shared by all."""
    held: list[Saved] = [{} for _ in range(PROCESSES)]
    for name, tensor in content.items():
        if draw(st.booleans()):
            for each in held:
                each[name] = whole(tensor.clone())
            continue
        boxes = cut(tensor.shape, draw)
        for each, box in zip(held, boxes, strict=False):
            each[name] = part_of(tensor, box)
        for each in held[len(boxes) :]:
            if draw(st.booleans()):
                each[name] = part_of(tensor, draw(st.sampled_from(boxes)), spare=True)
    return held


@given(data=st.data(), content=tensors(), long=st.sampled_from((1, 8, 4096)))
@settings(max_examples=50)
def test_any_cut_is_read_into_any_other(data: st.DataObject, content: dict[str, Tensor], long: int) -> None:
    files = []
    with TemporaryDirectory() as name, patch.object(read, "LONG", long):
        folder = Path(name)
        for rank, held in enumerate(spread(content, data.draw)):
            own = written(held, Ranks(rank, PROCESSES, ALONE.device))
            file = rank_file(rank, own)
            buffer = torch.zeros(file.size, dtype=torch.uint8)
            stage(file, own, buffer)
            write_file(folder / file.name, [file.header, buffer.numpy().data])
            files.append(file)
        entries = [entry for file in files for entry in file.entries]
        assert not any(uncovered([e for e in entries if e.name == name]) for name in content)
        (folder / TENSORS).write_bytes(index_bytes(files))
        for held in spread({name: torch.zeros_like(tensor) for name, tensor in content.items()}, data.draw):
            count = read.read_into(folder, read_index(folder), held)
            for name, part in held.items():
                assert torch.equal(part.local, content[name][part.place])
            wanted = sum(part.local.nbytes for part in held.values())
            assert count == wanted if long == 1 and all(t.ndim < 3 for t in content.values()) else count >= wanted


@given(data=st.data(), shape=st.lists(st.integers(1, 4), max_size=3))
@settings(max_examples=100)
def test_what_is_missing_or_twice_is_found(data: st.DataObject, shape: list[int]) -> None:
    """Beside counting every element."""
    boxes = cut(shape, data.draw)
    if data.draw(st.booleans()):
        boxes = boxes[1:] or boxes * 2
    if data.draw(st.booleans()):
        boxes.append(data.draw(st.sampled_from(boxes)))
    holders = np.zeros(shape, int)
    for box in boxes:
        holders[tuple(slice(*each) for each in box)] += 1
    entries = [_entry(box, shape) for box in boxes if all(begin < end for begin, end in box)]
    if entries:
        problem = uncovered(entries)
        assert bool(problem) == bool((holders != 1).any())
        assert ("same elements" in problem) == bool(holders.max() > 1)


def test_a_part_of_another_tensor_is_found() -> None:
    for entries in ([_entry([(0, 2)], [3]), _entry([(2, 3)], [4])], [_entry([(0, 4)], [3])]):
        assert uncovered(entries) == "w: the ranks have parts of tensors of several shapes, [3] one of them"


def _entry(box: Sequence[tuple[int, int]], shape: list[int]) -> Entry:
    begins, sizes = torch.Size(begin for begin, _ in box), torch.Size(end - begin for begin, end in box)
    return Entry(name="w", dtype=torch.float32, shape=torch.Size(shape), offsets=begins, sizes=sizes, begin=0, end=0)
