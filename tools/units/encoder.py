"""One unit in, its tokens out: what a worker does.

An `Encoder` reads a unit, encodes its texts and says of every record what became of it. What only the whole run can
know (line numbers before the unit, duplicates, where shards end) is added by `seqmesh.tools.ingest`. Memory: the
unit's texts, its ids, and what the engine needs for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seqmesh.loader.manifest import token_dtype
from seqmesh.tools.chat.encode import ChatEncoder, EncodedChat
from seqmesh.tools.chat.marks import within_marks
from seqmesh.tools.chat.segments import ChatError
from seqmesh.tools.chat.template import ChatTemplate
from seqmesh.tools.records import BadRecord, bad_record
from seqmesh.tools.tokenizers.engine import Engine, Ids, Lengths, flat
from seqmesh.tools.tokenizers.file import TokenizerFile, UIntArray, add_marks
from seqmesh.tools.units.cut import Unit
from seqmesh.tools.units.filters import (
    EMPTY,
    KEPT,
    REFUSED,
    SAMPLED_OUT,
    TOO_LONG,
    TOO_SHORT,
    Filters,
    drawn,
    text_hash,
)
from seqmesh.tools.units.page import Page, page_of

Int64Array = npt.NDArray[np.int64]  # not the packer's: workers do without the compiler that comes with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A unit's R records and its K documents that stay so far, in order.

    files, records, offsets: where each record is, as in `Place`; the records of the unit's first file are counted from
    the unit's beginning where its reading `continues`. ids: the documents' tokens one after the other, marks
    included, `lengths` of each. doc_ids: None for a document that is called by its line, where that is not known.
    hashes: of the texts, where duplicates are to be found. reserved: the first document whose text reaches a special
    token, and that token. metadata, targets: as `ShardWriter.add` takes them.
    """

    fates: npt.NDArray[np.uint8]  # [R]
    files: Int64Array  # [R]
    records: Int64Array  # [R]
    offsets: Int64Array  # [R]
    sources: list[str]  # [R]
    records_in_last: int
    bad: tuple[BadRecord, ...]
    ids: UIntArray
    lengths: Lengths  # [K]
    sizes: Int64Array  # [K] UTF-8 bytes
    doc_ids: list[str | None]  # [K]
    hashes: bytes
    reserved: tuple[int, int] | None
    metadata: list[str | None]  # [K]
    targets: list[Int64Array | None]  # [K] spans, [S, 2]
    stages: dict[str, float]  # seconds spent on each


class Encoder:
    """Encodes units, one at a time, by one engine. template: for conversations, where records are such."""

    def __init__(
        self, tokenizer: TokenizerFile, engine: Engine, filters: Filters, template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._filters = filters
        self._chats = ChatEncoder(tokenizer, template, engine) if template else None
        self._special = np.flatnonzero(tokenizer.reserved).astype(np.uint32)

    def encode(self, unit: Unit) -> Encoded:
        """Raises ValueError where a file cannot be read or the engine finds itself wrong."""
        started = time.perf_counter()
        page = page_of(unit)
        read = time.perf_counter()
        fates = self._before(page, unit)
        chosen, ids, lengths, spans = self._tokens(page, fates)
        fates[chosen] = self._by_length(lengths)
        stay = fates[chosen] == KEPT
        if not stay.all():
            ids, lengths = ids[np.repeat(stay, lengths)], lengths[stay]
        reserved = None if self._chats else self._reserved(ids, lengths)  # a template places special tokens
        ids, lengths = add_marks(self._narrow(ids), lengths, self._tokenizer)
        kept = chosen[stay]
        numbers = kept.tolist()
        return Encoded(
            fates=fates,
            files=np.array(page.files, np.int64),
            records=np.array(page.records, np.int64),
            offsets=np.array(page.offsets, np.int64),
            sources=page.sources,
            records_in_last=page.records_in_last,
            bad=tuple(page.bad),
            ids=ids,
            lengths=lengths,
            sizes=np.fromiter((_size(page.texts[i] or "") for i in numbers), np.int64, len(numbers)),
            doc_ids=[page.doc_ids[i] for i in numbers],
            hashes=b"".join(text_hash(_told_apart(page, i)) for i in numbers) if self._filters.dedup else b"",
            reserved=reserved,
            metadata=[page.metadata[i] for i in numbers],
            targets=[spans[i] for i in np.flatnonzero(stay).tolist()],
            stages={"reading": read - started, "encoding": time.perf_counter() - read},
        )

    def _tokens(
        self, page: Page, fates: npt.NDArray[np.uint8]
    ) -> tuple[Int64Array, Ids, Lengths, Sequence[Int64Array | None]]:
        """The documents that stay so far, by their numbers: ids and length of each, and spans where it is a
        conversation. Conversations that have no ids are refused here."""
        if self._chats is None:
            chosen = np.flatnonzero(fates == KEPT)
            return chosen, *self._encoded([page.texts[i] or "" for i in chosen.tolist()]), [None] * len(chosen)
        chats = _refuse_unfit(page, fates, self._chats)
        found = [within_marks(chats[i], self._tokenizer) for i in sorted(chats)]
        return np.flatnonzero(fates == KEPT), *flat([chat.ids for chat in found]), [chat.spans for chat in found]

    def _before(self, page: Page, unit: Unit) -> npt.NDArray[np.uint8]:
        """What is decided without tokens."""
        fates = np.fromiter((_fate(text) for text in page.texts), np.uint8, len(page.texts))
        if self._filters.sample is not None:
            names = {reading.start.file: reading.file.name for reading in unit.readings}
            inside = drawn((names[file] for file in page.files), np.array(page.keys, np.int64), self._filters)
            fates[(fates != REFUSED) & ~inside] = SAMPLED_OUT
        return fates

    def _encoded(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """One call for all, of which engines prove a part."""
        return self._engine.encode_flat(texts) if texts else (np.zeros(0, np.uint32), np.zeros(0, np.int64))

    def _by_length(self, lengths: Lengths) -> npt.NDArray[np.uint8]:
        """What is decided by the number of tokens, before the marks are put around them."""
        limits, marked = self._filters, lengths + self._tokenizer.marks
        fates = np.full(len(lengths), KEPT, np.uint8)
        if limits.min_tokens is not None:
            fates[marked < limits.min_tokens] = TOO_SHORT
        if limits.max_tokens is not None:
            fates[marked > limits.max_tokens] = TOO_LONG
        fates[lengths == 0] = EMPTY
        return fates

    def _narrow(self, ids: Ids) -> UIntArray:
        """The ids as a set stores them, half to be sent where the vocabulary is small. One outside of it stays what it
        is: whoever writes will tell."""
        fits = not ids.size or int(ids.max()) < self._tokenizer.vocab_size
        return ids.astype(token_dtype(self._tokenizer.vocab_size), copy=False) if fits else ids

    def _reserved(self, ids: Ids, lengths: Lengths) -> tuple[int, int] | None:
        """Special tokens are ours to place. Some models hold them as ordinary vocabulary, where text can reach them."""
        if not self._special.size or not _meets(ids, self._special[0], self._special[-1]):
            return None  # nearly always, and much cheaper than to look up each
        hits = self._tokenizer.reserved[ids]
        if not hits.any():
            return None
        where = int(hits.argmax())
        return int(np.searchsorted(np.cumsum(lengths), where, side="right")), int(ids[where])


def _refuse_unfit(page: Page, fates: npt.NDArray[np.uint8], encoder: ChatEncoder) -> dict[int, EncodedChat]:
    """The conversations that are kept, by their numbers. Those that have no ids become bad records of the page."""
    numbers = np.flatnonzero(fates == KEPT).tolist()
    found = dict(zip(numbers, encoder.encode([page.chats[i].messages for i in numbers]), strict=True))
    bad = dict(zip(np.flatnonzero(fates == REFUSED).tolist(), page.bad, strict=True))
    for number, chat in found.items():
        if isinstance(chat, ChatError):
            bad[number] = bad_record(page.chats[number].place, chat, _told_apart(page, number).encode())
            fates[number] = REFUSED
    page.bad = [bad[number] for number in sorted(bad)]
    return {number: chat for number, chat in found.items() if not isinstance(chat, ChatError)}


def _told_apart(page: Page, number: int) -> str:
    """What two records share where they are the same document."""
    if number in page.chats:
        return json.dumps(page.chats[number].messages, sort_keys=True, default=str)
    return page.texts[number] or ""


def _meets(ids: Ids, low: np.uint32, high: np.uint32) -> bool:
    """Whether an id is in the range: by the least and the largest of all, which need no memory, where these can tell,
    else by one comparison of each; smaller ones wrap round to large numbers."""
    if not ids.size or ids.min() > high or ids.max() < low:
        return False
    return bool((ids - low <= high - low).any())


def _fate(text: str | None) -> int:
    """White space alone is an empty document."""
    if text is None:
        return REFUSED
    return EMPTY if not text or text.isspace() else KEPT


def _size(text: str) -> int:
    """UTF-8 bytes. To be asked once engines have had the text: strings keep the UTF-8 that was made of them."""
    return len(text) if text.isascii() else len(text.encode())
