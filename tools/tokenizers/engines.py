"""Engines: which library turns text into ids, chosen by proof.

`tokenizers` runs any tokenizer.json and is the reference, as `sentencepiece` is for its own models. `tiktoken` and
`quicktok` are many times as fast; each is used only where it gives the reference's ids on a sample of the documents at
hand, on texts chosen to be hard and on tokens of the vocabulary, and goes on checking itself with one document a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer

from seqmesh.tools.tokenizers.engine import Engine, TokenizersEngine
from seqmesh.tools.tokenizers.file import TokenizerFile
from seqmesh.tools.tokenizers.hard_texts import HARD_TEXTS
from seqmesh.tools.tokenizers.proof import CheckedEngine, prove_equal
from seqmesh.tools.tokenizers.quicktok_engine import quicktok_engine
from seqmesh.tools.tokenizers.sentencepiece_model import SentencePieceEngine
from seqmesh.tools.tokenizers.tiktoken_engine import tiktoken_engine

EngineName = Literal["auto", "quicktok", "tiktoken", "tokenizers", "sentencepiece"]
ENGINES: tuple[EngineName, ...] = ("auto", "quicktok", "tiktoken", "tokenizers", "sentencepiece")
SPELLED_TOKENS = 4096  # of the vocabulary, on which an engine is proved
_FAST = {"quicktok": quicktok_engine, "tiktoken": tiktoken_engine}  # fastest first


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine, and in a few words why it was taken."""

    engine: Engine
    reason: str


def choose_engine(
    file: TokenizerFile, sample: Sequence[str], wanted: EngineName = "auto", *, threads: int | None = None
) -> EngineChoice:
    """Pick an engine for this tokenizer and these documents.

    `sample` are texts, or parts of them, of the documents to come; `threads` is how many the engine may use, all of the
    machine's where None. Raises ValueError where an engine is demanded that cannot reproduce the tokenizer, with the
    reason.
    """
    if wanted not in ENGINES:
        raise ValueError(f"engine is {wanted!r}: must be one of {', '.join(ENGINES)}")
    reference = reference_engine(file, threads=threads)
    if wanted == reference.name:
        return EngineChoice(engine=reference, reason="as asked")
    if wanted not in ("auto", *_FAST):
        raise ValueError(f"the engine {wanted} cannot run this tokenizer: it is run by {reference.name}")
    if wanted == "auto" and reference.name != "tokenizers":
        return EngineChoice(engine=reference, reason="runs its own models")
    refusals = []
    for name in _FAST if wanted == "auto" else (wanted,):
        try:
            engine = build_engine(file, name, threads=threads)
            prove_equal(engine, reference, (*HARD_TEXTS, *_spelled_tokens(file), *sample))
        except ValueError as error:
            if wanted == name:
                raise ValueError(f"the engine {name} cannot stand in for this tokenizer: {error}") from error
            refusals.append(f"{name} cannot stand in: {error}")
        else:
            proof = f"gave the ids of {reference.name} on {len(sample)} texts of the input"
            return EngineChoice(engine=engine, reason="; ".join([proof, *refusals]))
    return EngineChoice(engine=reference, reason="; ".join(refusals))


def build_engine(file: TokenizerFile, name: str, *, threads: int | None = None) -> Engine:
    """An engine by its name, which `choose_engine` has proved, in this process or another. It checks itself.

    Raises ValueError, saying why, where the tokenizer has none of that name.
    """
    reference = reference_engine(file, threads=threads)
    if name == reference.name:
        return reference
    if name not in _FAST:
        raise ValueError(f"the engine {name} cannot run this tokenizer: it is run by {reference.name}")
    return CheckedEngine(_FAST[name](file, threads=threads), reference)


def reference_engine(file: TokenizerFile, *, threads: int | None = None) -> Engine:
    """The engine that defines what the file means."""
    if isinstance(file.tokenizer, Tokenizer):
        return TokenizersEngine(file.tokenizer, threads=threads)
    return SentencePieceEngine(file.tokenizer, threads=threads)


def _spelled_tokens(file: TokenizerFile) -> list[str]:
    """Tokens from all over the vocabulary as texts: not every library takes a piece that is a token for that token."""
    ids = range(0, file.vocab_size, max(1, file.vocab_size // SPELLED_TOKENS))
    return [file.tokenizer.decode([id], skip_special_tokens=False) for id in ids]
