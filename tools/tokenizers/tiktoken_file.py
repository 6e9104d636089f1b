"""tiktoken's files of ranks: read, and turned into a tokenizer.json that gives the same ids.

Such a file holds tokens and their ids, nothing else: one a line, base64 and a number. How text is split, and what the
special tokens are, is told beside it, by the name of a known encoding or in full. A set so has one kind of tokenizer,
which other programs read, too.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from seqmesh.tools.tokenizers.byte_level import byte_alphabet
from seqmesh.tools.tokenizers.engine import TokenizersEngine
from seqmesh.tools.tokenizers.hard_texts import HARD_TEXTS
from seqmesh.tools.tokenizers.patterns import CL100K, GPT2, LLAMA3, O200K, PATTERNS, steps_of

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")
KNOWN = {pattern.name: pattern for pattern in (GPT2, CL100K, O200K, LLAMA3)}
_SPECIAL = {
    "gpt2": {"<|endoftext|>": 50256},
    "cl100k": {
        "<|endoftext|>": 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    },
    "o200k": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    "llama3": {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eot_id|>": 128009,
    },
}


def is_rank_file(data: bytes) -> bool:
    """Whether these bytes begin as a file of ranks does."""
    return _LINE.fullmatch(data[:4096].split(b"\n", 1)[0].rstrip(b"\r")) is not None


def converted(data: bytes, *, name: str, pattern: str, special: Sequence[str] = ()) -> bytes:
    """The tokenizer.json of a file of ranks.

    `pattern` is gpt2, cl100k, o200k or llama3, or a regular expression; `special` are tokens as TOKEN=ID, by default
    those of the known pattern. Raises ValueError for lines, tokens or ids that do not fit, and where the result does
    not give tiktoken's ids on texts chosen to be hard.
    """
    ranks = _read_ranks(data, name)
    known = KNOWN.get(pattern)
    tokens = dict(map(_special_token, special)) or dict(_SPECIAL.get(pattern, {}))
    _refuse_taken(tokens, ranks, name)
    written = _written(pattern)
    config = json.dumps(_config(ranks, written, tokens), ensure_ascii=False).encode() + b"\n"
    _prove(config, ranks, known.fast if known else pattern, name)
    return config


def _read_ranks(data: bytes, name: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{name}, line {number} is not a token in base64 and its rank: {line[:60]!r}") from error
    if len(set(ranks.values())) != len(ranks) or min(ranks.values(), default=0) < 0:
        raise ValueError(f"{name} gives one rank to several tokens")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{name} lacks {len(missing)} of the 256 single bytes, such as {missing[0]}")
    return ranks


def _special_token(text: str) -> tuple[str, int]:
    token, _, id = text.rpartition("=")
    if not token or not id.isdecimal():
        raise ValueError(f"special is {text!r}: must be a token and its id, such as '<|endoftext|>=50256'")
    return token, int(id)


def _refuse_taken(tokens: dict[str, int], ranks: dict[bytes, int], name: str) -> None:
    taken = set(ranks.values())
    if clash := next((token for token, id in tokens.items() if id in taken), None):
        raise ValueError(
            f"{name} gives the id {tokens[clash]} of the special token {clash!r} to a piece of text: this is another "
            "vocabulary than the pattern's; name its special tokens as TOKEN=ID"
        )
    if len(set(tokens.values())) != len(tokens):
        raise ValueError("two special tokens have the same id")


def _written(pattern: str) -> str | None:
    """The regular expression for the file, None for the split that byte-level tokenizers have built in."""
    named = KNOWN.get(pattern) or next((p for p in PATTERNS if pattern in (p.fast, p.written, *p.also)), None)
    if named is GPT2:
        return None
    return named.written if named else pattern


def _config(ranks: dict[bytes, int], regex: str | None, special: dict[str, int]) -> dict[str, Any]:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ordered = sorted(ranks, key=ranks.__getitem__)
    # Special tokens are in the vocabulary, too: the library numbers others anew where ids have gaps.
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": token, **flags} for token, id in _by_id(special)],
        "normalizer": None,
        "pre_tokenizer": bytes_step if regex is None else steps_of(regex),
        "post_processor": None,
        "decoder": bytes_step,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {**{spelled[token]: ranks[token] for token in ordered}, **dict(_by_id(special))},
            "merges": [[spelled[left], spelled[right]] for left, right in _merges(ordered, ranks)],
        },
    }


def _by_id(special: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(special.items(), key=lambda item: item[1])


def _merges(ordered: Sequence[bytes], ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that makes up a token, as tiktoken merges whatever makes up one, in the order of ranks."""
    for token in ordered:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _prove(config: bytes, ranks: dict[bytes, int], regex: str, name: str) -> None:
    import tiktoken  # here: other tokenizer files do without it

    try:
        encoding = tiktoken.Encoding(name, pat_str=regex, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise ValueError(f"pattern is {regex!r}: not a regular expression that tiktoken reads: {error}") from error
    try:
        tokenizer = Tokenizer.from_str(config.decode())
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"pattern is {regex!r}: not one that a tokenizer.json can hold: {error}") from error
    tokenizer.encode_special_tokens = True
    for text, ids in zip(HARD_TEXTS, TokenizersEngine(tokenizer).encode(HARD_TEXTS), strict=True):
        if ids.tolist() != encoding.encode_ordinary(text):
            raise ValueError(
                f"{name} with the pattern {regex!r} cannot be written as a tokenizer.json: the ids differ on the text "
                f"that begins {text[:60]!r}"
            )
