"""The engine tiktoken: a twin of a byte-level BPE tokenizer, several times as fast as the library that defines it.

It also needs less memory for very long documents (the reference takes some 400 bytes a token), because it may cut them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import orjson
from tokenizers import Tokenizer

from seqmesh.tools.tokenizers.byte_level import composes, matched_tokens, merge_ranks
from seqmesh.tools.tokenizers.engine import Engine, Ids, Lengths, TokenizersEngine, flat, usable_threads
from seqmesh.tools.tokenizers.file import TokenizerFile
from seqmesh.tools.tokenizers.patterns import PART_CHARACTERS, PIECE_CHARACTERS, SplitPattern, cut_text, pattern_of

if TYPE_CHECKING:
    import tiktoken

# tiktoken's regular expressions run out of stack (a million steps) on longer runs of spaces, and it slows down on long
# runs without any; pieces above this go to the reference.
LONGEST_CHARACTERS = 1 << 19


class TiktokenEngine(Engine):
    """The twin. The reference gets what it cannot do: parts of a text with a token of `matched`, overlong runs."""

    name = "tiktoken"

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        pattern: SplitPattern,
        compose: Callable[[str], str],
        matched: Sequence[str],
        reference: Engine,
        *,
        threads: int | None = None,
    ) -> None:
        self._encoding = encoding
        self._pattern = pattern
        self._compose = compose
        self._matched = matched
        self._reference = reference
        self._threads = usable_threads(threads)

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return flat(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._threads == 1:
            return [self._encode_one(text) for text in texts]
        with ThreadPoolExecutor(self._threads) as pool:  # the library releases the interpreter's lock
            return list(pool.map(self._encode_one, texts))

    def _encode_one(self, text: str) -> Ids:
        size = PART_CHARACTERS if self._holds_token(text) else PIECE_CHARACTERS
        parts = [self._encode_piece(piece) for piece in cut_text(text, self._pattern.cut, size)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_piece(self, piece: str) -> Ids:
        if len(piece) > LONGEST_CHARACTERS or self._holds_token(piece):
            return self._reference.encode([piece])[0]
        return self._encoding.encode_to_numpy(self._compose(piece), disallowed_special=())

    def _holds_token(self, text: str) -> bool:
        return any(token in text for token in self._matched)


def tiktoken_engine(file: TokenizerFile, *, threads: int | None = None) -> TiktokenEngine:
    """Build the twin of a byte-level BPE tokenizer. Raises ValueError, saying why, where its kind has none."""
    import tiktoken  # here: the twin is only built where no faster engine is proved

    if not isinstance(file.tokenizer, Tokenizer) or file.parse_special:
        raise ValueError("it is a SentencePiece model" if not file.parse_special else "special tokens are to be parsed")
    config = orjson.loads(file.data)
    composing, pattern = composes(config), pattern_of(config)
    encoding = tiktoken.Encoding(
        file.fingerprint, pat_str=pattern.fast, mergeable_ranks=merge_ranks(config), special_tokens={}
    )
    compose = _composer(file.tokenizer) if composing else str
    reference = TokenizersEngine(file.tokenizer)
    return TiktokenEngine(encoding, pattern, compose, matched_tokens(config), reference, threads=threads)


def _composer(tokenizer: Tokenizer) -> Callable[[str], str]:
    """The tokenizer's own step, which is slow, for those few texts that are not in composed form already."""
    step = tokenizer.normalizer

    def compose(text: str) -> str:
        return text if unicodedata.is_normalized("NFC", text) else step.normalize_str(text)

    return compose
