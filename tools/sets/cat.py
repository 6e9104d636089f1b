"""`seqmesh cat`: documents of a set as text, as ids or as JSON lines, all of them or by id or row.

Ids are looked up by reading the column of names of all shards, once for all that are asked for; the tokens of other
documents are not touched. An id that several documents have gives all of them. JSON lines hold `id`, `source`, `text`
(or `ids`) and, where there are spans, `targets`; `prepare` reads them again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqmesh.loader.catalog import COLUMN, Reading
from seqmesh.tools.claim import TOKENIZER_NAME
from seqmesh.tools.inspect_set import printable
from seqmesh.tools.sets.blocks import Block
from seqmesh.tools.sets.reading import InputSet


@dataclass(frozen=True, slots=True, kw_only=True)
class CatOptions:
    """doc_ids, rows: the documents, in this order, ids first; all where none are named. ids: show token ids. json: as
    JSON lines. limit: most documents. column, vocab_size: of data that does not say them."""

    doc_ids: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    ids: bool = False
    json: bool = False
    limit: int | None = None
    column: str = COLUMN
    vocab_size: int | None = None


def shown(data: str, options: CatOptions) -> Iterator[str]:
    """A text for each document. Raises ValueError for an id or row that the set has not, before anything else;
    FileNotFoundError where text is asked for and the set has no tokenizer."""
    if options.limit is not None and options.limit < 0:
        raise ValueError(f"limit is {options.limit}: must not be negative")
    given = InputSet(data, Reading(column=options.column, vocab_size=options.vocab_size))
    text = None if options.ids else decoder(given)
    form = _as_json if options.json else _as_text
    left = len(given) if options.limit is None else options.limit
    for block in _asked(given, options):
        for one in block.rows(0, min(len(block), left)).singles():
            yield form(given, one, text)
        left -= len(block)
        if left <= 0:
            return


def find_rows(given: InputSet, doc_ids: Sequence[str]) -> list[int]:
    """The rows of the documents that have these ids, in the order of the ids. Raises ValueError naming ids that no
    document has."""
    wanted = pa.array(dict.fromkeys(doc_ids), pa.large_string())
    found: dict[int, list[int]] = {place: [] for place in range(len(wanted))}
    for number in range(len(given.catalog.parts)):
        for block in given.part(number, checked=False):
            places = pc.index_in(block.doc_ids, value_set=wanted)
            for row in np.flatnonzero(places.is_valid().to_numpy(zero_copy_only=False)).tolist():
                found[places[row].as_py()].append(block.first + row)
    if missing := [wanted[place].as_py() for place, rows in found.items() if not rows]:
        listed = ", ".join(map(repr, missing[:5]))
        more = f" and {len(missing) - 5} others" if len(missing) > 5 else ""
        raise ValueError(f"{given.data} has no document with the id {listed}{more}")
    return [row for rows in found.values() for row in rows]


def decoder(given: InputSet) -> Callable[[Any], str]:
    """From ids to text, by the set's own tokenizer. Raises FileNotFoundError where it has none, ValueError where that
    is not the one recorded."""
    from seqmesh.tools.tokenizers.file import decode, parse_recorded  # slow to import

    found = given.tokenizer() if given.catalog.format == "seqmesh" else None
    if found is None:
        raise FileNotFoundError(f"{given.data} has no {TOKENIZER_NAME}: show its documents as ids (--ids)")
    name, data = found
    file = parse_recorded(data, f"{given.data}/{name}", given.manifest)
    return lambda ids: decode(file, ids)


def run(*, data: str, options: CatOptions, out: TextIO | None = None) -> None:
    """The whole command. A reader that goes away (`| head`) ends it quietly."""
    out = out or sys.stdout
    try:
        for text in shown(data, options):
            out.write(printable(text) if out.isatty() else text)
            out.write("\n")
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # what is still buffered goes nowhere


def _asked(given: InputSet, options: CatOptions) -> Iterator[Block]:
    if not options.doc_ids and not options.rows:
        yield from given.blocks()
        return
    for row in options.rows:
        if not 0 <= row < len(given):
            raise ValueError(f"{given.data} has no document {row}: it holds {len(given)}, counted from 0")
    rows = find_rows(given, options.doc_ids) if options.doc_ids else []
    held: tuple[int, list[Block]] = (-1, [])
    for row in (*rows, *options.rows):
        number = int(np.searchsorted(given.catalog.part_first, row, side="right")) - 1
        if held[0] != number:
            held = (number, given.part(number))
        block = next(block for block in held[1] if row < block.first + len(block))
        yield block.rows(row - block.first, row - block.first + 1)


def _as_text(_given: InputSet, one: Block, text: Callable[[Any], str] | None) -> str:
    return text(one.ids) if text else " ".join(map(str, one.ids.tolist()))


def _as_json(given: InputSet, one: Block, text: Callable[[Any], str] | None) -> str:
    fields: dict[str, Any] = {"id": one.doc_ids[0].as_py(), "source": given.catalog.sources[int(one.codes[0])]}
    fields |= {"text": text(one.ids)} if text else {"ids": one.ids.tolist()}
    spans = one.spans()
    if spans is not None and spans[0] is not None:
        fields["targets"] = spans[0].tolist()
    return json.dumps(fields, ensure_ascii=False)
