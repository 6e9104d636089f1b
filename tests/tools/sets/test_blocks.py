"""Blocks against lists of documents: whatever is cut, chosen or taken, every document keeps what belongs to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.chunks import SPAN_TYPE
from seqmesh.tools.sets.blocks import Block, Shelf

Document = tuple[list[int], str, int, list[int] | None]

documents = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), max_size=6),
        st.text("abc", max_size=2),
        st.integers(0, 5),
        st.one_of(st.none(), st.just([]), st.just([0, 1])),
    ),
    min_size=1,
    max_size=12,
)


def block_of(found: list[Document], first: int = 0, with_targets: bool = True) -> Block:
    return Block(
        first=first,
        ids=np.array([token for each in found for token in each[0]], np.int32),
        lengths=np.array([len(each[0]) for each in found], np.int64),
        doc_ids=pa.array([each[1] for each in found], pa.large_string()),
        codes=np.array([each[2] for each in found], np.uint16),
        targets=pa.array([each[3] for each in found], SPAN_TYPE) if with_targets else None,
    )


def documents_of(block: Block) -> list[Document]:
    found: list[Document] = []
    ends = np.cumsum(block.lengths)
    spans: list[Any] = [None] * len(block) if block.targets is None else block.targets.to_pylist()
    for row, length in enumerate(block.lengths.tolist()):
        ids = block.ids[ends[row] - length : ends[row]].tolist()
        found.append((ids, block.doc_ids[row].as_py(), int(block.codes[row]), spans[row]))
    return found


@given(given=documents, most=st.integers(1, 12))
def test_a_block_is_cut_into_ranges_of_at_most_so_many_tokens(given: list[Document], most: int) -> None:
    parts = list(block_of(given, 7).cut(most))
    assert [each for part in parts for each in documents_of(part)] == given
    assert all(part.lengths.sum() <= most or len(part) == 1 for part in parts)
    assert [part.first for part in parts] == (7 + np.cumsum([0, *map(len, parts)])[:-1]).tolist()
    assert [documents_of(one) for one in block_of(given).singles()] == [[each] for each in given]


@given(given=documents, data=st.data())
def test_rows_and_a_mask_choose_documents(given: list[Document], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(given)))
    stop = data.draw(st.integers(start, len(given)))
    assert documents_of(block_of(given).rows(start, stop)) == given[start:stop]
    mask = data.draw(st.lists(st.booleans(), min_size=len(given), max_size=len(given)))
    wanted = [each for each, kept in zip(given, mask, strict=True) if kept]
    assert documents_of(block_of(given).chosen(np.array(mask))) == wanted


@given(parts=st.lists(documents, min_size=1, max_size=4), data=st.data())
def test_documents_are_taken_in_any_order(parts: list[list[Document]], data: st.DataObject) -> None:
    blocks, first = [], 0
    for number, part in enumerate(parts):
        if number == 1:
            part[:] = [(*each[:3], None) for each in part]
        blocks.append(block_of(part, first, with_targets=number != 1))
        first += len(part)
    order = data.draw(st.lists(st.integers(0, first - 1), min_size=1, max_size=20))
    whole = [each for part in parts for each in part]
    assert documents_of(Shelf(blocks).take(np.array(order))) == [whole[place] for place in order]
