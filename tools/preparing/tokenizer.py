"""The tokenizer of a run of `prepare`: the one that the options name, or one trained on the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from seqmesh.tools.claim import TOKENIZER_NAME
from seqmesh.tools.documents import read_records
from seqmesh.tools.inputs import InputFile
from seqmesh.tools.journal import Header
from seqmesh.tools.preparing.options import PrepareOptions
from seqmesh.tools.records import BadRecord
from seqmesh.tools.tokenizers.file import TokenizerFile, load_tokenizer, parse_tokenizer
from seqmesh.tools.tokenizers.training import TRAIN_BYTES, train_size, train_tokenizer


def given_tokenizer(options: PrepareOptions) -> TokenizerFile | None:
    """The tokenizer that the options name, None where one is to be trained."""
    if train_size(options.tokenizer) is not None:
        return None
    path = Path(options.tokenizer)
    return load_tokenizer(path, pattern=options.pattern, special=options.special, **_marks(options))


def trained_tokenizer(
    files: Sequence[InputFile], options: PrepareOptions, header: Header | None, say: Callable[[str], None]
) -> TokenizerFile:
    """The tokenizer that an unfinished run had trained, where it is still whole; else a new one."""
    saved = options.out / TOKENIZER_NAME
    if header and saved.is_file():
        with suppress(ValueError):  # damaged
            tokenizer = load_tokenizer(saved, **_marks(options))
            if tokenizer.fingerprint == header.fingerprint:
                return tokenizer
    size = train_size(options.tokenizer)
    assert size is not None
    say(f"training a tokenizer of {size} entries on the first {TRAIN_BYTES >> 20} MiB of text")
    data = train_tokenizer(_training_texts(files, options), size)
    return parse_tokenizer(data, name="the trained tokenizer", **_marks(options))


def _marks(options: PrepareOptions) -> dict[str, Any]:
    """What the options say about special tokens."""
    return {
        "eod_token": options.eod_token,
        "bod_token": options.bod_token,
        "parse_special": options.parse_special,
    }


def _training_texts(files: Sequence[InputFile], options: PrepareOptions) -> Iterator[str]:
    """Texts in input order until TRAIN_BYTES are reached."""
    used = 0
    for record in read_records(files, columns=options.columns, longest=options.longest_record):
        if isinstance(record, BadRecord):
            if options.on_error == "stop":
                raise ValueError(record.sentence())
            continue
        yield record.text
        used += record.size
        if used >= TRAIN_BYTES:
            return
