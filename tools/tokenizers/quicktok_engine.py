"""The engine quicktok: hand-written scanners for a few split patterns, many times as fast as any regular expression.

The library is young: an extra (`pip install 'seqmesh[fast]'`), used only where it is proved equal.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from seqmesh.tools.tokenizers.byte_level import composes, merge_ranks
from seqmesh.tools.tokenizers.engine import Engine, Ids, Lengths, TokenizersEngine, flat, split_flat, usable_threads
from seqmesh.tools.tokenizers.file import TokenizerFile
from seqmesh.tools.tokenizers.patterns import CL100K, pattern_of, steps_of

_NAME = "seqmesh"


class QuicktokEngine(Engine):
    """The library's batch call. Texts that `apart` picks out go to the reference."""

    name = "quicktok"

    def __init__(
        self, library: Any, apart: Callable[[str], bool] | None, reference: Engine, *, threads: int | None = None
    ) -> None:
        self._library = library
        self._apart = apart
        self._reference = reference
        self._threads = usable_threads(threads)

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids, offsets = self._library.encode_batch(list(texts), self._threads)
        lengths = np.diff(offsets)
        apart = [i for i, text in enumerate(texts) if self._apart(text)] if self._apart else []
        if not apart:
            return ids, lengths
        arrays = split_flat(ids, lengths)
        for i, array in zip(apart, self._reference.encode([texts[i] for i in apart]), strict=True):
            arrays[i] = array
        return flat(arrays)


def quicktok_engine(file: TokenizerFile, *, threads: int | None = None) -> QuicktokEngine:
    """Give a byte-level BPE tokenizer to the library. Raises ValueError, saying why, where that cannot be."""
    try:
        import quicktok
    except ImportError as error:
        raise ValueError("quicktok is not installed (pip install 'seqmesh[fast]')") from error
    if not isinstance(file.tokenizer, Tokenizer) or file.parse_special:
        raise ValueError("it is a SentencePiece model" if not file.parse_special else "special tokens are to be parsed")
    config = json.loads(file.data)
    pattern = pattern_of(config)
    if pattern.quick is None:
        raise ValueError(f"it splits as {pattern.name}, which quicktok does not know")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_text(json.dumps(_plain(config, pattern.quick)))
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it reports there
                quicktok.import_tokenizer(str(path), _NAME, data_dir=folder)
        except ValueError as error:
            raise ValueError(f"quicktok refuses it: {error}") from error
        library = quicktok.Tokenizer(_NAME, folder)
    apart = _ends_blank if pattern is CL100K else None
    return QuicktokEngine(library, apart, TokenizersEngine(file.tokenizer), threads=threads)


def _plain(config: dict[str, Any], regex: str) -> dict[str, Any]:
    """The tokenizer without special tokens, which no text may produce, and with the split as the library spells it."""
    special = {token["content"] for token in config["added_tokens"]}
    merge_ranks(config)  # refuses what the library would take for something else
    model = config["model"]
    vocabulary = {token: id for token, id in model["vocab"].items() if token not in special}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if composes(config) else None,
        "pre_tokenizer": steps_of(regex),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {**model, "vocab": vocabulary, "unk_token": None},
    }


def _ends_blank(text: str) -> bool:
    """Where blanks other than line ends end a text, CL100K may differ from LLAMA3, which the library has."""
    return text[-1:].isspace() and text[-1] not in "\r\n"
