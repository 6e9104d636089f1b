"""The engine quicktok: hand-written scanners for a few split patterns, many times as fast as any regular expression.

The library is young: an extra (`pip install 'seqmesh[fast]'`), used only where it is proved equal. Its own way to
import a tokenizer.json proves it, too, and takes seconds; we write the files that it reads and prove in our way.
"""

from __future__ import annotations

import sys
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from seqmesh.tools.tokenizers.byte_level import composes, matched_tokens, merge_ranks
from seqmesh.tools.tokenizers.engine import Engine, Ids, Lengths, TokenizersEngine, flat, split_flat, usable_threads
from seqmesh.tools.tokenizers.file import TokenizerFile
from seqmesh.tools.tokenizers.patterns import CL100K, PART_CHARACTERS, SplitPattern, cut_text, pattern_of

_NAME = "seqmesh"
LONG_S = ord("\u017f")


class QuicktokEngine(Engine):
    """The library's batch call. What it may not encode alike is left to the reference, in parts as short as can be.

    The library numbers tokens without gaps; `table` holds their ids, None where these have none either.
    """

    name = "quicktok"

    def __init__(
        self,
        library: Any,
        table: Ids | None,
        pattern: SplitPattern,
        matched: Sequence[str],
        reference: Engine,
        *,
        threads: int | None = None,
    ) -> None:
        self._library = library
        self._table = table
        self._cut = pattern.cut
        self._unsure = _unsure_at_end if pattern is CL100K else _DOUBTS.any_in
        self._matched = matched
        self._reference = reference
        self._threads = usable_threads(threads)

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return self._encode(texts, self._encode_in_parts)

    def _encode_in_parts(self, texts: Sequence[str]) -> list[Ids]:
        """Doubtful texts cut into short parts, of which the reference gets those that it must."""
        parts = (cut_text(text, self._cut, PART_CHARACTERS) for text in texts)
        return [self._encode(some, self._reference.encode)[0] for some in parts]

    def _is_doubtful(self, text: str) -> bool:
        return self._unsure(text) or any(token in text for token in self._matched)

    def _encode(self, texts: Sequence[str], other: Callable[[Sequence[str]], list[Ids]]) -> tuple[Ids, Lengths]:
        """By the library what it is sure to encode alike, by `other` the rest."""
        doubtful = [i for i, text in enumerate(texts) if self._is_doubtful(text)]
        texts = list(texts)
        rest = [texts[i] for i in doubtful]
        for i in doubtful:
            texts[i] = ""
        ids, offsets = self._library.encode_batch(texts, self._threads)
        ids, lengths = ids if self._table is None else self._table[ids], np.diff(offsets)
        if not doubtful:
            return ids, lengths
        arrays = split_flat(ids, lengths)
        for i, array in zip(doubtful, other(rest), strict=True):
            arrays[i] = array
        return flat(arrays)


def quicktok_engine(file: TokenizerFile, *, threads: int | None = None) -> QuicktokEngine:
    """Give a byte-level BPE tokenizer to the library. Raises ValueError, saying why, where that cannot be."""
    if not isinstance(file.tokenizer, Tokenizer) or file.parse_special:
        raise ValueError("it is a SentencePiece model" if not file.parse_special else "special tokens are to be parsed")
    config = orjson.loads(file.data)
    pattern = pattern_of(config)
    if pattern.quick is None:
        raise ValueError(f"it splits as {pattern.name}, which quicktok does not know")
    ranks = merge_ranks(config)
    table = np.sort(np.fromiter(ranks.values(), np.uint32, len(ranks)))
    dense = {token: number for number, token in enumerate(sorted(ranks, key=ranks.__getitem__))}
    gapless = int(table[-1]) - int(table[0]) == len(table) - 1
    library = _library(dense, pattern.quick, composes(config), first=int(table[0]) if gapless else 0)
    return QuicktokEngine(
        library,
        None if gapless else table,
        pattern,
        matched_tokens(config),
        TokenizersEngine(file.tokenizer),
        threads=threads,
    )


def _library(ranks: dict[bytes, int], regex: str, composing: bool, first: int) -> Any:
    """The library's tokenizer, whose ids begin with `first`, without special tokens, since no text may produce one."""
    try:
        import quicktok
        from quicktok import _import_core as core
    except ImportError as error:
        raise ValueError("quicktok is not installed (pip install 'seqmesh[fast]')") from error
    tables = Path(core.__file__).parent / "data"
    with tempfile.TemporaryDirectory() as folder:
        try:
            scanner = core.KNOWN_PATTERNS[regex]
            core.write_files(folder, _NAME, ranks, {}, scanner, composing, first)
            core.ensure_tables(folder, str(tables), scanner, composing)
            return quicktok.Tokenizer(_NAME, folder)  # which reads them all
        except (AttributeError, KeyError, TypeError, RuntimeError) as error:
            version = getattr(quicktok, "__version__", "unknown")
            raise ValueError(f"version {version} of quicktok does not take it: {error!r}") from error


class _Doubts:
    """Characters on whose kind libraries differ: those that Unicode has named only lately, if at all, and the long s,
    an s in contractions. Looked up block by block as they are met: for all of Unicode it takes a tenth of a second."""

    BLOCK, UNKNOWN = 1 << 8, 2

    def __init__(self) -> None:
        self._found = np.full(sys.maxunicode + 1, self.UNKNOWN, np.uint8)  # by code point, 1 where it is doubtful

    def any_in(self, text: str) -> bool:
        if text.isascii():
            return False
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        codes = codes[codes >= LONG_S]  # all before it are old and well known
        found = self._found[codes]
        if found.max(initial=0) == self.UNKNOWN:
            for block in set((codes[found == self.UNKNOWN] // self.BLOCK).tolist()):
                self._look_up(range(block * self.BLOCK, (block + 1) * self.BLOCK))
            found = self._found[codes]
        return bool(found.any())

    def _look_up(self, codes: range) -> None:
        category = unicodedata.category
        self._found[codes.start : codes.stop] = [category(chr(code)) == "Cn" or code == LONG_S for code in codes]


_DOUBTS = _Doubts()


def _unsure_at_end(text: str) -> bool:
    """Where blanks other than line ends end a text, CL100K may differ, too, from LLAMA3, which the library has."""
    return (text[-1:].isspace() and text[-1] not in "\r\n") or _DOUBTS.any_in(text)
