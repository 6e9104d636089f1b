"""One batch of records at a time: encode, count, append the end-of-document token, hand over to the shard writer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from seqmesh.tools.documents import BadRecord, Document, Record
from seqmesh.tools.engines import Engine, Ids
from seqmesh.tools.shard_writer import ShardWriter
from seqmesh.tools.tokenizer import TokenizerFile


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
    """Where documents go, and what has gone there so far."""

    tokenizer: TokenizerFile
    engine: Engine
    writer: ShardWriter
    tally: Tally = field(default_factory=Tally)

    def add(self, batch: Sequence[Record], *, refuse: Callable[[BadRecord], None], max_tokens: int | None) -> bool:
        """Count and write the records of a batch, in order; bad ones go to `refuse`.

        Returns True with the document that reaches `max_tokens`; the records after it do not count as read, so
        that the outcome does not depend on the size of batches.
        """
        encoded = iter(self.engine.encode([record.text for record in batch if _has_text(record)]))
        kept: list[Document] = []
        parts: list[Ids] = []
        full = False
        for record in batch:
            self.tally.documents_in += 1
            if isinstance(record, BadRecord):
                refuse(record)
                self.tally.refused += 1
            elif _has_text(record) and (ids := next(encoded)).size:
                kept.append(record)
                parts.append(ids)
                self.tally.keep(record, ids.size + (self.tokenizer.eod_id is not None))
                full = max_tokens is not None and self.tally.tokens >= max_tokens
                if full:
                    break
            else:
                self.tally.empty += 1
        self._write(kept, parts)
        return full

    def _write(self, documents: Sequence[Document], parts: Sequence[Ids]) -> None:
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        ids = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        _refuse_reserved(ids, lengths, documents, self.tokenizer)
        if self.tokenizer.eod_id is not None:
            ids = np.insert(ids, np.cumsum(lengths), self.tokenizer.eod_id)
            lengths = lengths + 1
        names = [document.doc_id for document in documents]
        self.writer.add(ids, lengths=lengths, doc_ids=names, sources=[document.source for document in documents])


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
        raise ValueError(
            f"the text of document {document.doc_id!r} encodes to the special token {token!r}: this tokenizer cannot "
            "tell such text from the token; take it out of the text or use another tokenizer"
        )
