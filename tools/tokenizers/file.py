"""Tokenizer files: a tokenizer.json, tiktoken's ranks or a SentencePiece model, set up so that only we place marks.

Gives a `TokenizerFile`: a document's ids depend on its text alone (no truncation, no padding, no added marks; text that
spells a special token is ordinary text unless asked otherwise), plus what a shard set records about it, and the marks
that go around each document, exactly once, whatever the file's own template says. Which library runs it, and how fast,
is the subject of `seqmesh.tools.tokenizers.engines`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash
from tokenizers import Tokenizer

from seqmesh.loader.manifest import Manifest
from seqmesh.tools.claim import MODEL_NAME, TOKENIZER_NAME, TOKENIZER_NAMES
from seqmesh.tools.tokenizers import tiktoken_file
from seqmesh.tools.tokenizers.engine import Lengths
from seqmesh.tools.tokenizers.fingerprint import tokenizer_part
from seqmesh.tools.tokenizers.sentencepiece_model import SentencePieceModel
from seqmesh.tools.tokenizers.training import END_OF_DOCUMENT

UIntArray = npt.NDArray[np.unsignedinteger[Any]]

AUTO = "auto"
NONE = "none"

# Where `auto` looks for the end-of-document token, in this order.
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A tokenizer ready for use. `fingerprint` covers the file's bytes and every option that changes tokens.

    It can be sent to another process, which sets it up anew.
    """

    data: bytes  # the file, byte for byte; of tiktoken's ranks the tokenizer.json that they became
    tokenizer: Tokenizer | SentencePieceModel
    vocab_size: int  # largest id + 1
    bod_token: str | None
    bod_id: int | None
    eod_token: str | None
    eod_id: int | None
    parse_special: bool  # text that spells a special token gives that token
    reserved: npt.NDArray[np.bool_]  # [vocab_size] true for ids that no text may produce
    fingerprint: str

    @property
    def name(self) -> str:
        """What a set calls the file."""
        return TOKENIZER_NAME if isinstance(self.tokenizer, Tokenizer) else MODEL_NAME

    @property
    def marks(self) -> int:
        """How many tokens a document gets beside those of its text."""
        return (self.bod_id is not None) + (self.eod_id is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        # The library forgets, when pickled, that spelled special tokens are text.
        return _parse_again, (self.data, self.name, self.bod_token or NONE, self.eod_token or NONE, self.parse_special)


def load_tokenizer(
    path: Path,
    *,
    eod_token: str = AUTO,
    bod_token: str = NONE,
    parse_special: bool = False,
    pattern: str | None = None,
    special: Sequence[str] = (),
) -> TokenizerFile:
    """Read a tokenizer file; `parse_tokenizer` says what the options mean.

    tiktoken's ranks need a `pattern` and may be given `special` tokens (see `tiktoken_file.converted`), which other
    files hold themselves. Raises FileNotFoundError or ValueError with what is wrong and where.
    """
    if path.is_dir():
        raise ValueError(f"tokenizer {path} is a folder: give the file, such as {path / TOKENIZER_NAME}")
    if not path.is_file():
        raise FileNotFoundError(f"no such tokenizer file: {path} (a tokenizer.json, or train:VOCABULARY to make one)")
    data = path.read_bytes()
    if tiktoken_file.is_rank_file(data):
        if pattern is None:
            known = ", ".join(tiktoken_file.KNOWN)
            raise ValueError(
                f"{path} is a file of tiktoken's ranks: say by which pattern text is split ({known}, or a regular "
                "expression)"
            )
        data = tiktoken_file.converted(data, name=str(path), pattern=pattern, special=special)
    elif pattern is not None or special:
        raise ValueError(f"pattern and special belong to files of tiktoken's ranks, which {path} is not")
    return parse_tokenizer(data, name=str(path), eod_token=eod_token, bod_token=bod_token, parse_special=parse_special)


def load_recorded(folder: Path, manifest: Manifest) -> TokenizerFile:
    """The tokenizer that a set was made with, by the copy that it keeps, with the set's marks.

    Raises FileNotFoundError where there is none, ValueError where it is damaged or not the one recorded.
    """
    path = next((folder / name for name in TOKENIZER_NAMES if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {TOKENIZER_NAME}: its documents cannot be shown as text")
    return parse_recorded(path.read_bytes(), str(path), manifest)


def parse_recorded(data: bytes, name: str, manifest: Manifest) -> TokenizerFile:
    """The tokenizer in these bytes with the marks of a set made with it. Raises ValueError where the set was not."""
    plain = parse_tokenizer(data, name=name, eod_token=NONE).tokenizer
    begin, end = (None if id is None else plain.id_to_token(id) for id in (manifest.bod_id, manifest.eod_id))
    for parse_special in (False, True):  # the manifest does not say; the fingerprint does
        if _fingerprint(data, _options(begin, end, parse_special)) == tokenizer_part(manifest.tokenizer):
            return _parse_again(data, name, begin or NONE, end or NONE, parse_special)
    raise ValueError(f"{name} is not the tokenizer of this set: its fingerprint is not {manifest.tokenizer}")


def parse_tokenizer(
    data: bytes,
    *,
    name: str = TOKENIZER_NAME,
    eod_token: str = AUTO,
    bod_token: str = NONE,
    parse_special: bool = False,
) -> TokenizerFile:
    """Set up the tokenizer in these bytes, a tokenizer.json or a SentencePiece model.

    `eod_token` and `bod_token`, the marks behind and before each document, are special tokens of it, `none` or `auto`:
    for the end one of the usual names, for the beginning what the file's own template puts before a text, if anything.
    With `parse_special` text that spells another special token gives that token.

    Raises ValueError for bytes that are no tokenizer, a mark that is not a special token of it, or a model that draws
    random numbers.
    """
    if data[:1] == b"\n":  # the first field of a SentencePiece model
        return _parse_model(data, name, bod_token, eod_token, parse_special)
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{name} is not a tokenizer.json that the tokenizers library reads: {error}") from error
    model = orjson.loads(data)["model"]
    if model.get("dropout"):
        raise ValueError(
            f"{name} asks for BPE dropout ({model['dropout']}): ids would differ from run to run; remove it"
        )
    # A file may ask for these; they would cut documents short or fill them up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that spells a special token is text, unless the user wants it otherwise.
    tokenizer.encode_special_tokens = not parse_special
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    end = _end_token(special, eod_token, name)
    begin = _template_begin(tokenizer, name) if bod_token == AUTO else _named(special, bod_token, name)
    closed = {end, begin} - {None} if parse_special else set(special) - {_unknown_token(model)}
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    return TokenizerFile(
        data=data,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        bod_token=begin,
        bod_id=None if begin is None else special[begin],
        eod_token=end,
        eod_id=None if end is None else special[end],
        parse_special=parse_special,
        reserved=_table([special[token] for token in closed if token is not None], vocab_size),
        fingerprint=_fingerprint(data, _options(begin, end, parse_special)),
    )


def add_marks(ids: UIntArray, lengths: Lengths, file: TokenizerFile) -> tuple[UIntArray, Lengths]:
    """Put the marks around every document of a flat array: one of each that there is, and nothing else. ids: of a type
    that has room for the marks."""
    if not file.marks:
        return ids, lengths
    marked = lengths + file.marks
    ends = np.cumsum(marked)
    result = np.empty(ids.size + file.marks * lengths.size, ids.dtype)
    text = np.ones(result.size, np.bool_)
    for places, id in ((ends - marked, file.bod_id), (ends - 1, file.eod_id)):
        if id is not None:
            result[places] = id
            text[places] = False
    result[text] = ids
    return result, marked


def decode(file: TokenizerFile, ids: npt.NDArray[np.integer]) -> str:
    """The text of a document's ids, its marks left out."""
    first = int(bool(len(ids)) and file.bod_id is not None and ids[0] == file.bod_id)
    kept = ids[first:]
    kept = kept[:-1] if len(kept) and file.eod_id is not None and kept[-1] == file.eod_id else kept
    return file.tokenizer.decode(kept.tolist(), skip_special_tokens=False)


def _parse_again(data: bytes, name: str, bod_token: str, eod_token: str, parse_special: bool) -> TokenizerFile:
    return parse_tokenizer(data, name=name, bod_token=bod_token, eod_token=eod_token, parse_special=parse_special)


def _parse_model(data: bytes, name: str, bod_token: str, eod_token: str, parse_special: bool) -> TokenizerFile:
    if parse_special:
        raise ValueError(f"{name} is a SentencePiece model, which reads no special token from text: drop parse_special")
    model = SentencePieceModel(data, name=name)
    special = model.special_tokens()
    end = _end_token(special, eod_token, name)
    begin_id = model.begin_id() if bod_token == AUTO else special.get(_named(special, bod_token, name) or "")
    begin = None if begin_id is None else model.id_to_token(begin_id)
    return TokenizerFile(
        data=data,
        tokenizer=model,
        vocab_size=model.vocab_size,
        bod_token=begin,
        bod_id=begin_id,
        eod_token=end,
        eod_id=None if end is None else special[end],
        parse_special=False,
        reserved=_table(list(special.values()), model.vocab_size),
        fingerprint=_fingerprint(data, _options(begin, end, False)),
    )


def _end_token(special: dict[str, int], wanted: str, name: str) -> str | None:
    if wanted != AUTO:
        return _named(special, wanted, name)
    found = next((token for token in KNOWN_ENDS if token in special), None)
    if found is None:
        raise ValueError(
            f"{name} has no end-of-document token that is known: name one of its special tokens ({_listed(special)}) "
            f"or {NONE!r}"
        )
    return found


def _named(special: dict[str, int], wanted: str, name: str) -> str | None:
    if wanted == NONE:
        return None
    if wanted not in special:
        raise ValueError(
            f"{name} has no special token {wanted!r}: name one of its special tokens ({_listed(special)}) or {NONE!r}"
        )
    return wanted


def _listed(special: dict[str, int]) -> str:
    return ", ".join(sorted(special, key=lambda token: special[token])[:20]) or "none at all"


def _template_begin(tokenizer: Tokenizer, name: str) -> str | None:
    """The one special token that the file's own template puts before a text."""
    marked, plain = (tokenizer.encode("a", add_special_tokens=added).tokens for added in (True, False))
    first = next(i for i in range(len(marked)) if marked[i : i + len(plain)] == plain)
    if first > 1:
        raise ValueError(f"{name} puts {first} tokens before a text ({marked[:first]}): name the one that is wanted")
    return marked[0] if first else None


def _unknown_token(model: dict[str, object]) -> str | None:
    """The one special token that text may produce: what the model writes for characters it does not know."""
    token, index, vocabulary = model.get("unk_token"), model.get("unk_id"), model.get("vocab")
    if isinstance(index, int) and isinstance(vocabulary, list):  # a unigram model names it by position
        token = vocabulary[index][0]
    return token if isinstance(token, str) else None


def _table(ids: list[int], vocab_size: int) -> npt.NDArray[np.bool_]:
    table = np.zeros(vocab_size, np.bool_)
    table[ids] = True
    return table


def _options(bod_token: str | None, eod_token: str | None, parse_special: bool) -> dict[str, str | bool | None]:
    """The options that change tokens. What is not used is not named, as in sets that are older than the option."""
    begin = {} if bod_token is None else {"bod_token": bod_token}
    return {"eod_token": eod_token, **begin, **({"parse_special": True} if parse_special else {})}


def _fingerprint(data: bytes, options: dict[str, str | bool | None]) -> str:
    """xxh3-128 of the options and the file. The engine is not part of it: engines must give the same ids."""
    head = json.dumps(options, sort_keys=True).encode()
    return xxhash.xxh3_128_hexdigest(len(head).to_bytes(8, "little") + head + data)
