"""Engines: which library turns text into ids, chosen by proof.

`tokenizers` runs any tokenizer.json and is the reference. `tiktoken` is about twice as fast or more, and a twin of a
byte-level BPE tokenizer can be built for it; it is used only where it gives the reference's ids on a sample of the
documents at hand and on texts chosen to be hard. It goes on checking itself with one document a batch. It also needs
less memory for very long documents (the reference takes some 400 bytes a token), because it may cut them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import tiktoken
from tokenizers import Tokenizer

from seqmesh.tools.tokenizer import TokenizerFile

EngineName = Literal["auto", "tokenizers", "tiktoken"]
Ids = npt.NDArray[np.uint32]
ENGINES: tuple[EngineName, ...] = ("auto", "tokenizers", "tiktoken")

PIECE_CHARACTERS = 1 << 18  # longer texts are cut, where a cut is certain to change nothing
# tiktoken's regular expressions run out of stack (a million steps) on longer runs of spaces, and it slows down on long
# runs without any; pieces above this go to the reference.
LONGEST_CHARACTERS = 1 << 19
SPOT_CHECK_CHARACTERS = 1 << 14  # of each batch, the first document up to this size is encoded by both

# The byte-level split of GPT-2, written with possessive quantifiers: same pieces, less backtracking.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# No piece of that split holds a blank behind anything else, so text may be cut there. Only characters that every
# library takes for what they are count.
_CUT = re.compile(r"(?<=[!-~\w])[ \n]")

HARD_TEXTS = (
    "",
    " ",
    "a  b   c\t\td\n\n\ne \r\n f\n",
    "   leading and trailing   ",
    "I'm we're they'd you'll he's can't I've 'S 'LL ''s",
    "x = 12345678901234567890 + 3.14e-10 ½ ² Ⅷ ٣",
    "<|endoftext|></s><s>[CLS]<|im_start|>",
    "naïve café e\u0301 Å\u030a ﬁ ß İi̇ ǆ",
    "日本語テキスト 中文 한국어 ไทย हिन्दी العربية עברית",
    "👩‍👩‍👧‍👦🏳️‍🌈 \u200b\u200d\ufeff\u00ad",
    "\u0085\u00a0\u1680\u180e\u2000\u2028\u2029\u202f\u205f\u3000 \x1c\x1d\x1e\x1f\x0b\x0c",
    "\x00\x01\x7f\ufffd\ufffe\U0010ffff\U000e0001",
    "=" * 300 + " " * 300 + "\n" * 50 + "a" * 300,
)


class Engine(Protocol):
    """Turns texts into ids, one array per text, without any mark that is not in the text."""

    @property
    def name(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> list[Ids]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine, and in a few words why it was taken."""

    engine: Engine
    reason: str


class TokenizersEngine:
    """The reference: the library that defines what the file means. Threads are its own (RAYON_NUM_THREADS)."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


class TiktokenEngine:
    """The twin, on one thread. Raises ValueError as soon as a spot check finds a document encoded differently."""

    name = "tiktoken"

    def __init__(self, encoding: tiktoken.Encoding, reference: TokenizersEngine) -> None:
        self._encoding = encoding
        self._reference = reference

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        result = [self._encode_one(text) for text in texts]
        checked = next((i for i, text in enumerate(texts) if len(text) <= SPOT_CHECK_CHARACTERS), None)
        if checked is not None and not np.array_equal(self._reference.encode([texts[checked]])[0], result[checked]):
            raise ValueError(
                f"tiktoken and tokenizers disagree on the text that begins {texts[checked][:60]!r}, which the sample "
                "at the start did not show: run again with the engine tokenizers"
            )
        return result

    def _encode_one(self, text: str) -> Ids:
        pieces = cut_text(text)
        parts = [self._encode_piece(piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_piece(self, piece: str) -> Ids:
        if len(piece) > LONGEST_CHARACTERS:
            return self._reference.encode([piece])[0]
        return np.array(self._encoding.encode_ordinary(piece), np.uint32)


def cut_text(text: str, size: int = PIECE_CHARACTERS) -> list[str]:
    """Cut text so that its pieces, encoded one by one with the split of GPT-2, give the ids of the whole.

    Pieces have about `size` characters, and more where no blank allows a cut.
    """
    pieces = []
    start = 0
    while len(text) - start > size and (cut := _CUT.search(text, start + size)):
        pieces.append(text[start : cut.start()])
        start = cut.start()
    return [*pieces, text[start:]]


def choose_engine(file: TokenizerFile, sample: Sequence[str], wanted: EngineName = "auto") -> EngineChoice:
    """Pick an engine for this tokenizer and these documents.

    `sample` are texts, or parts of them, of the documents to come. Raises ValueError where tiktoken is demanded and
    cannot reproduce the tokenizer, with the reason.
    """
    if wanted not in ENGINES:
        raise ValueError(f"engine is {wanted!r}: must be one of {', '.join(ENGINES)}")
    reference = TokenizersEngine(file.tokenizer)
    if wanted == "tokenizers":
        return EngineChoice(engine=reference, reason="as asked")
    try:
        twin = tiktoken_twin(file)
        _prove_equal(twin, reference, (*HARD_TEXTS, *sample))
    except ValueError as error:
        if wanted == "tiktoken":
            raise ValueError(f"the engine tiktoken cannot stand in for this tokenizer: {error}") from error
        return EngineChoice(engine=reference, reason=f"tiktoken cannot stand in: {error}")
    return EngineChoice(engine=twin, reason=f"gave the ids of tokenizers on {len(sample)} texts of the input")


def tiktoken_twin(file: TokenizerFile) -> TiktokenEngine:
    """Build the twin of a byte-level BPE tokenizer. Raises ValueError, saying why, where its kind has none."""
    config: dict[str, Any] = json.loads(file.data)
    ranks = _ranks(config)
    encoding = tiktoken.Encoding(
        file.fingerprint, pat_str=_split_pattern(config), mergeable_ranks=ranks, special_tokens={}
    )
    return TiktokenEngine(encoding, TokenizersEngine(file.tokenizer))


def _prove_equal(twin: TiktokenEngine, reference: TokenizersEngine, texts: Sequence[str]) -> None:
    for text, ours, theirs in zip(texts, twin.encode(texts), reference.encode(texts), strict=True):
        if not np.array_equal(ours, theirs):
            raise ValueError(f"the ids differ on the text that begins {text[:60]!r}")


def _ranks(config: dict[str, Any]) -> dict[bytes, int]:
    """Token bytes → id. tiktoken merges in the order of ids, so ids must rise in the order of merges."""
    model = config["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError("it is not byte-level BPE")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ValueError("it marks pieces with a prefix or suffix")
    if not all(token["special"] for token in config["added_tokens"]):
        raise ValueError("it has added tokens that are matched in text")
    special = {token["content"] for token in config["added_tokens"]}
    vocabulary: dict[str, int] = {token: id for token, id in model["vocab"].items() if token not in special}
    # Older files write a merge as one string "left right", newer ones as a pair.
    merged = ["".join(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    order = [vocabulary.get(token, -1) for token in merged]
    if any(left > right for left, right in itertools.pairwise(order)):
        raise ValueError("its ids are not in the order of its merges")
    alphabet = byte_alphabet()
    if set(vocabulary) != set(merged) | set(alphabet):
        raise ValueError("its vocabulary is not the 256 bytes and the results of its merges")
    return {bytes(alphabet[character] for character in token): id for token, id in vocabulary.items()}


def _split_pattern(config: dict[str, Any]) -> str:
    """The regular expression that cuts text into pieces before merging."""
    if config.get("normalizer"):
        raise ValueError("it normalises text")
    step = config.get("pre_tokenizer") or {}
    if step.get("type") != "ByteLevel" or step.get("add_prefix_space") or not step.get("use_regex", True):
        raise ValueError("its split is not the one of GPT-2")
    return GPT2_SPLIT


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, as character → byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
