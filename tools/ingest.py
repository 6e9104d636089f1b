"""One batch of records at a time: encode, count, put the marks around, hand over to the shard writer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from seqmesh.loader.manifest import FileEntry
from seqmesh.tools.records import BadRecord, Cursor, Document, Record
from seqmesh.tools.shard_writer import ShardWriter
from seqmesh.tools.tokenizers.engine import Engine, Ids
from seqmesh.tools.tokenizers.file import TokenizerFile, add_marks

BATCH_BYTES = 4 << 20  # of text; a larger document is a batch of its own
BATCH_DOCUMENTS = 4096
SAMPLE_CHARACTERS = 1 << 20  # of text, on which an engine is proved


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running counts of a run. documents_in = documents_out + empty + refused."""

    documents_in: int = 0
    documents_out: int = 0
    empty: int = 0
    refused: int = 0
    tokens: int = 0
    text_bytes: int = 0  # UTF-8 bytes of the documents that were kept
    source_documents: Counter[str] = field(default_factory=Counter)
    source_tokens: Counter[str] = field(default_factory=Counter)

    def keep(self, document: Document, tokens: int) -> None:
        """Count one document that goes into the set."""
        self.documents_in += 1
        self.documents_out += 1
        self.tokens += tokens
        self.text_bytes += document.size
        self.source_documents[document.source] += 1
        self.source_tokens[document.source] += tokens

    def counts(self) -> dict[str, int]:
        """What the manifest records."""
        return {
            "documents_in": self.documents_in,
            "documents_out": self.documents_out,
            "empty": self.empty,
            "refused": self.refused,
            "text_bytes": self.text_bytes,
            "tokens_out": self.tokens,
        }


@dataclass(slots=True, kw_only=True)
class Ingest:
    """Where documents go, and what has gone there so far.

    `on_shard` hears of every shard that is full: its entry, and where the first document of the next one begins. The
    tally and the quarantine then stand exactly at that place, so that a later run may begin there.
    """

    tokenizer: TokenizerFile
    engine: Engine
    writer: ShardWriter
    refuse: Callable[[BadRecord], None]
    on_shard: Callable[[FileEntry, Cursor], None]
    tally: Tally = field(default_factory=Tally)

    def add(self, batch: Sequence[Record], *, max_tokens: int | None) -> bool:
        """Count and write the records of a batch, in order; bad ones go to `refuse`.

        Returns True with the document that reaches `max_tokens`; the records after it do not count as read, so
        that the outcome does not depend on the size of batches.
        """
        encoded = self._encoded(batch)
        sizes = [ids.size + self.tokenizer.marks for ids in encoded if ids is not None]
        cuts = set(self.writer.cuts(np.array(sizes, np.int64)))
        pending: list[tuple[Document, Ids]] = []
        number = 0  # of the next document among those of the batch that are kept
        for record, ids in zip(batch, encoded, strict=True):
            if isinstance(record, BadRecord) or ids is None:
                self._leave_out(record)
                continue
            if number in cuts:
                self._write(pending)
                pending = []
                self.on_shard(self.writer.end_shard(), record.place.cursor)
            pending.append((record, ids))
            self.tally.keep(record, sizes[number])
            number += 1
            if max_tokens is not None and self.tally.tokens >= max_tokens:
                break
        self._write(pending)
        return max_tokens is not None and self.tally.tokens >= max_tokens

    def _encoded(self, batch: Sequence[Record]) -> list[Ids | None]:
        """The ids of each record, None where it has no text or gives no token."""
        texts = {i: record.text for i, record in enumerate(batch) if _has_text(record)}
        ids: list[Ids | None] = [None] * len(batch)
        for i, array in zip(texts, self.engine.encode(list(texts.values())), strict=True):
            ids[i] = array if array.size else None
        return ids

    def _leave_out(self, record: Record) -> None:
        self.tally.documents_in += 1
        if isinstance(record, BadRecord):
            self.refuse(record)
            self.tally.refused += 1
        else:
            self.tally.empty += 1

    def _write(self, pending: Sequence[tuple[Document, Ids]]) -> None:
        documents = [document for document, _ in pending]
        parts = [ids for _, ids in pending]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        ids = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        _refuse_reserved(ids, lengths, documents, self.tokenizer)
        ids, lengths = add_marks(ids, lengths, self.tokenizer)
        names = [document.doc_id for document in documents]
        self.writer.add(ids, lengths=lengths, doc_ids=names, sources=[document.source for document in documents])


def batched(records: Iterable[Record]) -> Iterator[list[Record]]:
    """The records in batches of about BATCH_BYTES, each for one call of `Ingest.add`."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def sample(batch: Sequence[Record]) -> list[str]:
    """Texts from the start of the input, SAMPLE_CHARACTERS in all, the last one cut."""
    texts = [record.text for record in batch if isinstance(record, Document)]
    rooms = (SAMPLE_CHARACTERS - used for used in itertools.accumulate(map(len, texts), initial=0))
    return [text[:room] for text, room in zip(texts, rooms, strict=False) if room > 0]


def _has_text(record: Record) -> TypeGuard[Document]:
    """Whether there is anything to encode. White space alone is an empty document."""
    return isinstance(record, Document) and bool(record.text.strip())


def _refuse_reserved(
    ids: Ids, lengths: npt.NDArray[np.int64], documents: Sequence[Document], tokenizer: TokenizerFile
) -> None:
    """Special tokens are ours to place. Some models hold them as ordinary vocabulary, where text can reach them."""
    hits = tokenizer.reserved[ids]
    if hits.any():
        where = int(hits.argmax())
        document = documents[int(np.searchsorted(np.cumsum(lengths), where, side="right"))]
        token = tokenizer.tokenizer.id_to_token(int(ids[where]))
        advice = (
            "it would end or begin twice; take it out of the text, or do without that mark"
            if tokenizer.parse_special
            else "this tokenizer cannot tell such text from the token; take it out of the text or use another tokenizer"
        )
        raise ValueError(f"the text of document {document.doc_id!r} encodes to the special token {token!r}: {advice}")
