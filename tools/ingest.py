"""One unit at a time, in order: complete what its worker could not know, count, hand over to the shard writer."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from seqmesh.loader.manifest import FileEntry
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.records import BadRecord, Cursor, Document, Reading, Record, numbered_id
from seqmesh.tools.shard_writer import ShardWriter
from seqmesh.tools.tokenizers.file import TokenizerFile
from seqmesh.tools.units.cut import Unit
from seqmesh.tools.units.encoder import Encoded
from seqmesh.tools.units.filters import DUPLICATE, FATES, FILTERED, HASH_BYTES, KEPT, REFUSED
from seqmesh.tools.units.seen import Seen

SAMPLE_CHARACTERS = 1 << 18  # of text, on which an engine is proved


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running counts of a run. documents_in = documents_out + empty + refused + those that each filter left out.

    The source of a record that is refused is its file's: what it says of itself is not known.
    """

    documents_out: int = 0
    tokens: int = 0
    text_bytes: int = 0  # UTF-8 bytes of the documents that were kept
    left_out: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # of each source, by fate
    _fates: Counter[str] = field(default_factory=Counter)  # of all sources

    @property
    def documents_in(self) -> int:
        return self.documents_out + self._fates.total()

    def leave_out(self, fates: npt.NDArray[np.uint8], sources: Sequence[str]) -> None:
        """Count records that do not go into the set; others may be among them."""
        gone = np.flatnonzero(fates != KEPT)
        found = Counter(zip(map(sources.__getitem__, gone.tolist()), fates[gone].tolist(), strict=True))
        for (source, fate), count in found.items():
            self.add_left_out(source, FATES[fate], count)

    def add_left_out(self, source: str, fate: str, count: int) -> None:
        """Count records of one source and fate."""
        self.left_out[source][fate] += count
        self._fates[fate] += count

    def keep(self, lengths: Int64Array, sizes: Int64Array) -> None:
        """Count documents that go into the set."""
        self.documents_out += len(lengths)
        self.tokens += int(lengths.sum())
        self.text_bytes += int(sizes.sum())

    def counts(self) -> dict[str, int]:
        """What the manifest records: of the filters, those that left something out."""
        return {
            "documents_in": self.documents_in,
            "documents_out": self.documents_out,
            "empty": self._fates["empty"],
            "refused": self._fates["refused"],
            **{name: count for name in FILTERED if (count := self._fates[name])},
            "text_bytes": self.text_bytes,
            "tokens_out": self.tokens,
        }


@dataclass(slots=True, kw_only=True)
class Ingest:
    """Where documents go, and what has gone there so far.

    `on_shard` hears of every shard that is full: its entry, where the first document of the next one begins, and the
    hashes of its texts where duplicates are looked for. The tally and the quarantine then stand exactly at that place,
    so that a later run may begin there.
    """

    tokenizer: TokenizerFile
    writer: ShardWriter
    refuse: Callable[[BadRecord], None]
    on_shard: Callable[[FileEntry, Cursor, bytes], None]
    seen: Seen | None = None  # None: duplicates stay
    max_tokens: int | None = None
    tally: Tally = field(default_factory=Tally)
    stages: dict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # seconds of processes spent on each, in this run
    _records: int = 0  # of the file in which the last unit ended, before its end
    _hashes: list[bytes] = field(default_factory=list)  # of the shard that is under way

    def add(self, unit: Unit, encoded: Encoded) -> bool:
        """Count and write a unit's records, in order; bad ones go to `refuse`.

        Returns True with the document that reaches `max_tokens`; the records after it do not count as read, so that
        the outcome does not depend on the size of units.
        """
        started = time.perf_counter()
        encoded = self._completed(unit, encoded)
        kept = np.flatnonzero(encoded.fates == KEPT)
        last = self._limit(encoded.lengths)
        cuts = self.writer.cuts(encoded.lengths[:last])
        end = len(encoded.fates) if last is None else int(kept[last - 1]) + 1
        bounds = [0, *kept[cuts].tolist(), end]
        documents = [0, *cuts, len(kept) if last is None else last]
        bad = iter(encoded.bad)
        for number, ((first, stop), (one, other)) in enumerate(
            zip(itertools.pairwise(bounds), itertools.pairwise(documents), strict=True)
        ):
            if number:
                self._end_shard(_cursor(encoded, first))
            self.tally.leave_out(encoded.fates[first:stop], encoded.sources[first:stop])
            for record in itertools.islice(bad, int((encoded.fates[first:stop] == REFUSED).sum())):
                self.refuse(record)
            self._keep(encoded, kept, one, other)
        for stage, seconds in {**encoded.stages, "writing": time.perf_counter() - started}.items():
            self.stages[stage] += seconds
        return last is not None

    def _completed(self, unit: Unit, encoded: Encoded) -> Encoded:
        """The unit with records counted from the beginning of their file, and without duplicates."""
        first = unit.readings[0]
        before = self._records if first.continues else 0
        self._records = encoded.records_in_last + before * (len(unit.readings) == 1)
        return self._without_duplicates(_counted(encoded, first, before) if first.continues else encoded)

    def _without_duplicates(self, encoded: Encoded) -> Encoded:
        if self.seen is None:
            return encoded
        new = self.seen.new(encoded.hashes)
        return encoded if new.all() else _without(encoded, ~new)

    def _limit(self, lengths: Int64Array) -> int | None:
        """How many of these documents are taken until `max_tokens` are reached, None where all are, and more."""
        if self.max_tokens is None:
            return None
        enough = int(np.searchsorted(np.cumsum(lengths), self.max_tokens - self.tally.tokens))
        return enough + 1 if enough < len(lengths) else None

    def _end_shard(self, next: Cursor) -> None:
        hashes = b"".join(self._hashes)
        self._hashes.clear()
        self.on_shard(self.writer.end_shard(), next, hashes)

    def _keep(self, encoded: Encoded, kept: Int64Array, first: int, stop: int) -> None:
        """Write and count documents from `first` to `stop` of those that stay, which are the records `kept`."""
        if encoded.reserved and first <= encoded.reserved[0] < stop:
            raise self._reserved(encoded, *encoded.reserved)
        begin, end = (int(encoded.lengths[:number].sum()) for number in (first, stop))
        names = [name or "" for name in encoded.doc_ids[first:stop]]
        lengths = encoded.lengths[first:stop]
        self.writer.add(
            encoded.ids[begin:end],
            lengths=lengths,
            doc_ids=names,
            sources=[encoded.sources[i] for i in kept[first:stop].tolist()],
            targets=encoded.targets[first:stop],
            metadata=encoded.metadata[first:stop],
        )
        self.tally.keep(lengths, encoded.sizes[first:stop])
        self._hashes.append(encoded.hashes[first * HASH_BYTES : stop * HASH_BYTES])

    def _reserved(self, encoded: Encoded, number: int, id: int) -> ValueError:
        token = self.tokenizer.tokenizer.id_to_token(id)
        advice = (
            "it would end or begin twice; take it out of the text, or do without that mark"
            if self.tokenizer.parse_special
            else "this tokenizer cannot tell such text from the token; take it out of the text or use another tokenizer"
        )
        return ValueError(
            f"the text of document {encoded.doc_ids[number]!r} encodes to the special token {token!r}: {advice}"
        )


def sample(records: Iterable[Record]) -> list[str]:
    """Texts from the start of the input, SAMPLE_CHARACTERS in all, the last one cut."""
    texts: list[str] = []
    room = SAMPLE_CHARACTERS
    for record in records:
        if isinstance(record, Document):
            texts.append(record.text[:room])
            room -= len(texts[-1])
        if not room:
            break
    return [text for text in texts if text]


def _counted(encoded: Encoded, first: Reading, before: int) -> Encoded:
    """A unit whose first reading continues a file with so many lines before it."""
    mine = encoded.files == first.start.file
    records = encoded.records + before * mine
    numbers = records[encoded.fates == KEPT] + 1
    return replace(
        encoded,
        records=records,
        doc_ids=[
            numbered_id(first.file, number) if name is None else name
            for name, number in zip(encoded.doc_ids, numbers.tolist(), strict=True)
        ],
        bad=tuple(
            record.after(before) if record.place.reading.start.file == first.start.file else record
            for record in encoded.bad
        ),
    )


def _without(encoded: Encoded, duplicate: npt.NDArray[np.bool_]) -> Encoded:
    """A unit without those of its documents."""
    fates = encoded.fates.copy()
    fates[np.flatnonzero(fates == KEPT)[duplicate]] = DUPLICATE
    stay = np.flatnonzero(~duplicate)
    hashes = encoded.hashes
    reserved = encoded.reserved  # is the first document with its text: else it had been met before
    return replace(
        encoded,
        fates=fates,
        ids=encoded.ids[np.repeat(~duplicate, encoded.lengths)],
        lengths=encoded.lengths[stay],
        sizes=encoded.sizes[stay],
        doc_ids=[encoded.doc_ids[i] for i in stay.tolist()],
        metadata=[encoded.metadata[i] for i in stay.tolist()],
        targets=[encoded.targets[i] for i in stay.tolist()],
        hashes=b"".join(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in stay.tolist()),
        reserved=reserved and (reserved[0] - int(duplicate[: reserved[0]].sum()), reserved[1]),
    )


def _cursor(encoded: Encoded, record: int) -> Cursor:
    file, line, offset = (int(column[record]) for column in (encoded.files, encoded.records, encoded.offsets))
    return Cursor(file=file, record=line, offset=offset)
