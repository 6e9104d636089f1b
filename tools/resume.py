"""Picking up an unfinished `prepare`: which of its shards are whole, and what a run has to know to go on after them.

A shard is trusted once its size and checksum are what the journal says. The first that is not, and all after it, are
made again. Everything else follows: counts from the marks, lengths and sources from the shards themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import FileEntry
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools import journal
from seqmesh.tools.claim import LOCK_NAME, QUARANTINE_NAME, TOKENIZER_NAMES, clear
from seqmesh.tools.columns import array_of
from seqmesh.tools.ingest import Tally
from seqmesh.tools.journal import Header, Mark, Recipe
from seqmesh.tools.quarantine import OnError, quarantined
from seqmesh.tools.records import START, Cursor
from seqmesh.tools.shard_writer import Finished
from seqmesh.tools.targets import all_labels, supervised_in
from seqmesh.tools.units.seen import SEEN_NAME, remembered, restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run begins: what is finished, what was counted, and where the next document is."""

    marks: tuple[Mark, ...] = ()
    finished: Finished = field(default_factory=Finished)
    tally: Tally = field(default_factory=Tally)
    next: Cursor = START
    quarantine: int = 0
    hashes: bytes = b""  # of the texts, where duplicates are looked for


def unfinished(
    out: Path, recipe: Recipe, on_error: OnError, say: Callable[[str], None]
) -> tuple[Header, list[Mark]] | None:
    """The journal that this run may continue. None where it starts over; leftovers are then removed.

    Raises ValueError naming every difference where the shards in the folder were made from something else.
    """
    found = journal.read(out)
    differing = _refusals(found[0].recipe, recipe, found[1], on_error) if found else []
    if found and found[1] and differing:
        raise ValueError(
            f"{out} holds an unfinished set that is made differently: {'; '.join(differing)}. Give what it was begun "
            "with to continue it, delete the folder to start over, or choose another"
        )
    if found and not differing:
        return found
    if leftovers := clear(out):
        say(f"{out} holds {leftovers} files of an unfinished run: starting over")
    return None


def position_of(out: Path, marks: Sequence[Mark], say: Callable[[str], None]) -> Position:
    """Check the finished shards, remove everything after the last that is whole, and gather what is known there."""
    if marks:
        say(f"{out} holds an unfinished set: checking its {len(marks)} shards")
    hashes = remembered(out, [(mark.shard.rows, mark.texts) for mark in marks if mark.texts])
    whole = _whole(out, marks, quarantined(out), len(hashes), say)
    kept = {mark.shard.file for mark in whole} | {*TOKENIZER_NAMES, journal.JOURNAL_NAME, LOCK_NAME}
    kept |= {QUARANTINE_NAME, QUARANTINE_NAME + ".tmp"} | ({SEEN_NAME} if whole and hashes else set())
    clear(out, keep=frozenset(kept))
    if not whole:
        return Position()
    if hashes:
        restart(out, hashes[: len(whole)])
    columns = [_columns(out / mark.shard.file) for mark in whole]
    last = whole[-1]
    return Position(
        marks=tuple(whole),
        finished=Finished(
            shards=tuple(mark.shard for mark in whole),
            lengths=tuple(lengths for lengths, _, _ in columns),
            codes=tuple(codes for _, codes, _ in columns),
            supervised=tuple(supervised for _, _, supervised in columns),
            sources=tuple(name for mark in whole for name in mark.sources),
        ),
        tally=_tally(whole),
        next=last.next,
        quarantine=last.quarantine,
        hashes=b"".join(hashes[: len(whole)]),
    )


def _refusals(old: Recipe, new: Recipe, marks: Sequence[Mark], on_error: OnError) -> list[str]:
    differing = journal.differences(old, new)
    # How to meet bad records may change as long as none has been met.
    refused = sum(counts.get("refused", 0) for mark in marks for counts in mark.left_out.values())
    if on_error == "stop" and refused:
        differing.append(f"on_error was skip, which put {refused} bad records into quarantine, now stop")
    return differing


def _whole(out: Path, marks: Sequence[Mark], quarantine: int, known: int, say: Callable[[str], None]) -> list[Mark]:
    whole: list[Mark] = []
    for number, mark in enumerate(marks):
        if not _is_whole(out / mark.shard.file, mark.shard):
            say(f"{mark.shard.file} is missing or damaged: making it and what follows again")
            break
        if mark.quarantine > quarantine:
            say(f"records are missing from the quarantine: making {mark.shard.file} and what follows again")
            break
        if mark.texts and number >= known:
            say(f"{SEEN_NAME} is damaged: making {mark.shard.file} and what follows again")
            break
        whole.append(mark)
    return whole


def _is_whole(path: Path, entry: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.bytes and checksum(path) == entry.xxh3


def _columns(path: Path) -> tuple[Int64Array, npt.NDArray[np.uint16], Int64Array]:
    """Lengths, source codes and supervised tokens of the documents of a shard of ours, which is one record batch."""
    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    ids: Any = batch.column("input_ids")
    lengths = np.diff(array_of(ids.offsets))
    with_spans = "targets" in batch.schema.names
    supervised = supervised_in(batch.column("targets"), lengths) if with_spans else all_labels(lengths)
    return lengths, array_of(batch.column("source")).copy(), supervised


def _tally(marks: Sequence[Mark]) -> Tally:
    tally = Tally(
        documents_out=sum(mark.shard.rows for mark in marks),
        tokens=sum(mark.shard.tokens for mark in marks),
        text_bytes=marks[-1].text_bytes,
    )
    for mark in marks:
        for source, counts in mark.left_out.items():
            for fate, count in counts.items():
                tally.add_left_out(source, fate, count)
    return tally
