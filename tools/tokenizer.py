"""Tokenizer files: load a `tokenizer.json`, or train a byte-level BPE one.

Gives a `TokenizerFile`: the library's tokenizer set up so that a document's ids depend on its text alone (no
truncation, no padding, no added marks; text that spells a special token is ordinary text), plus what a shard set
records about it. Which library runs it, and how fast, is the subject of `seqmesh.tools.engines`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
AUTO = "auto"
NONE = "none"
TRAIN_PREFIX = "train:"
TRAIN_BYTES = 32 << 20  # training reads this much text, in input order, to keep its time bounded
SMALLEST_VOCABULARY = 257  # 256 bytes and the end-of-document token

# Where `auto` looks for the end-of-document token, in this order.
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A tokenizer ready for use. `fingerprint` covers the file's bytes and every option that changes tokens."""

    data: bytes  # the file, byte for byte
    tokenizer: Tokenizer
    vocab_size: int  # largest id + 1
    eod_token: str | None
    eod_id: int | None
    reserved: npt.NDArray[np.bool_]  # [vocab_size] true for ids that no text may produce
    fingerprint: str


def train_size(spec: str) -> int | None:
    """The vocabulary size in `train:SIZE`, or None where `spec` is a path. Raises ValueError for an unfit size."""
    if not spec.startswith(TRAIN_PREFIX):
        return None
    number = spec.removeprefix(TRAIN_PREFIX)
    if not number.isdecimal() or int(number) < SMALLEST_VOCABULARY:
        raise ValueError(f"tokenizer is {spec!r}: train: wants a vocabulary size of at least {SMALLEST_VOCABULARY}")
    return int(number)


def load_tokenizer(path: Path, *, eod_token: str = AUTO) -> TokenizerFile:
    """Read a `tokenizer.json`. Raises FileNotFoundError or ValueError with what is wrong and where."""
    if path.is_dir():
        raise ValueError(f"tokenizer {path} is a folder: give the file, such as {path / 'tokenizer.json'}")
    if not path.is_file():
        raise FileNotFoundError(f"no such tokenizer file: {path} (a tokenizer.json, or train:VOCABULARY to make one)")
    return parse_tokenizer(path.read_bytes(), name=str(path), eod_token=eod_token)


def load_recorded(path: Path, eod_id: int | None) -> TokenizerFile:
    """A set's own tokenizer.json, with the end of document of its manifest. Raises what `load_tokenizer` raises."""
    file = load_tokenizer(path, eod_token=NONE)
    if eod_id is None:
        return file
    return load_tokenizer(path, eod_token=file.tokenizer.id_to_token(eod_id) or NONE)


def parse_tokenizer(data: bytes, *, name: str = "tokenizer.json", eod_token: str = AUTO) -> TokenizerFile:
    """Set up the tokenizer in these bytes. `eod_token` is a special token of it, `auto` or `none`.

    Raises ValueError for bytes that are no tokenizer, an end-of-document token that is not a special token of it, or
    a model that draws random numbers.
    """
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{name} is not a tokenizer.json that the tokenizers library reads: {error}") from error
    model = json.loads(data)["model"]
    if model.get("dropout"):
        raise ValueError(
            f"{name} asks for BPE dropout ({model['dropout']}): ids would differ from run to run; remove it"
        )
    # A file may ask for these; they would cut documents short or fill them up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that spells a special token is text: only this program may place a special token.
    tokenizer.encode_special_tokens = True
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    end = _end_token(special, eod_token, name)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    return TokenizerFile(
        data=data,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eod_token=end,
        eod_id=None if end is None else special[end],
        reserved=_reserved(special, _unknown_token(model), vocab_size),
        fingerprint=_fingerprint(data, {"eod_token": end}),
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train byte-level BPE on `texts` and return the `tokenizer.json`: the same bytes for the same texts in order.

    Any text can be encoded and decodes to itself. Scarce text gives fewer than `vocab_size` entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode() + b"\n"


def decode(file: TokenizerFile, ids: npt.NDArray[np.integer]) -> str:
    """The text of a document's ids, its end-of-document token left out."""
    kept = ids[:-1] if len(ids) and file.eod_id is not None and ids[-1] == file.eod_id else ids
    return file.tokenizer.decode(kept.tolist(), skip_special_tokens=False)


def _end_token(special: dict[str, int], wanted: str, name: str) -> str | None:
    if wanted == NONE:
        return None
    candidates = KNOWN_ENDS if wanted == AUTO else (wanted,)
    found = next((token for token in candidates if token in special), None)
    if found is None:
        listed = ", ".join(sorted(special, key=lambda token: special[token])[:20]) or "none at all"
        what = "no end-of-document token that is known" if wanted == AUTO else f"no special token {wanted!r}"
        raise ValueError(f"{name} has {what}: name one of its special tokens ({listed}) or {NONE!r}")
    return found


def _unknown_token(model: dict[str, object]) -> str | None:
    """The one special token that text may produce: what the model writes for characters it does not know."""
    token, index, vocabulary = model.get("unk_token"), model.get("unk_id"), model.get("vocab")
    if isinstance(index, int) and isinstance(vocabulary, list):  # a unigram model names it by position
        token = vocabulary[index][0]
    return token if isinstance(token, str) else None


def _reserved(special: dict[str, int], unknown: str | None, vocab_size: int) -> npt.NDArray[np.bool_]:
    table = np.zeros(vocab_size, np.bool_)
    table[[id for token, id in special.items() if token != unknown]] = True
    return table


def _fingerprint(data: bytes, options: dict[str, str | None]) -> str:
    """xxh3-128 of the options and the file. The engine is not part of it: engines must give the same ids."""
    head = json.dumps(options, sort_keys=True).encode()
    return xxhash.xxh3_128_hexdigest(len(head).to_bytes(8, "little") + head + data)
