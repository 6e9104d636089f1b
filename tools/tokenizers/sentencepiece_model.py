"""SentencePiece models (`.model`), run by the library itself, so that they mean what they mean there.

An extra (`pip install 'seqmesh[sentencepiece]'`), imported when a model is opened. Control symbols are never read from
text; what a model does to text before it cuts it (blanks put together, forms composed) is part of the model and shows
in the decoded text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from seqmesh.tools.tokenizers.engine import Engine, Ids, Lengths, flat, usable_threads


class SentencePieceModel:
    """An opened model, by the names that the library of tokenizer.json uses. Raises ValueError for other bytes."""

    def __init__(self, data: bytes, *, name: str) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ValueError(
                f"{name} is a SentencePiece model, and sentencepiece is not installed "
                "(pip install 'seqmesh[sentencepiece]')"
            ) from error
        self.library: Any = sentencepiece.SentencePieceProcessor()
        try:
            self.library.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise ValueError(f"{name} is not a SentencePiece model that the library reads: {error}") from error

    @property
    def vocab_size(self) -> int:
        return int(self.library.vocab_size())

    def special_tokens(self) -> dict[str, int]:
        """The control symbols, which no text can produce."""
        ids = [id for id in range(self.vocab_size) if self.library.is_control(id)]
        return {self.id_to_token(id): id for id in ids}

    def begin_id(self) -> int | None:
        """The begin symbol, where the model has one."""
        id = int(self.library.bos_id())
        return id if id >= 0 else None

    def id_to_token(self, id: int) -> str:
        return str(self.library.id_to_piece(id))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of these ids. Control symbols have none, whether they are skipped or not."""
        del skip_special_tokens
        return str(self.library.decode(list(ids)))


class SentencePieceEngine(Engine):
    """The reference for models of its own kind."""

    name = "sentencepiece"

    def __init__(self, model: SentencePieceModel, *, threads: int | None = None) -> None:
        self._library = model.library
        self._threads = usable_threads(threads)

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        lists = self._library.encode(list(texts), out_type=int, num_threads=self._threads)
        return flat([np.array(ids, np.uint32) for ids in lists])
