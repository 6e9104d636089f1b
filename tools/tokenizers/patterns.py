"""Split patterns: the regular expressions that cut text into pieces before merging, which byte-level tokenizers share.

Each is known in several spellings: those that tokenizer.json files use, one that tiktoken runs quickly, and the one by
which quicktok recognises it. What is not in the table is left to the library that defines the file, because another one
may drop what a pattern does not match.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

PIECE_CHARACTERS = 1 << 18  # longer texts are cut, where a cut is certain to change nothing

# Where text may be cut: before a blank behind something else, since no piece of these patterns holds a blank behind
# anything but blanks. Only characters that every library takes for what they are count.
_BLANK = re.compile(r"(?<=[!-~\w])[ \n]")
# The same where punctuation takes the line ends behind it into its piece.
_BLANK_OR_LINE = re.compile(r"(?<=[!-~\w]) |(?<=[A-Za-z0-9])\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPattern:
    """One way to split, in all spellings. All of them give the same pieces of any text."""

    name: str
    written: str  # as a tokenizer.json spells it
    fast: str  # for tiktoken: possessive, so that it backtracks less
    quick: str | None  # as quicktok knows it; None where it does not
    cut: re.Pattern[str]  # before which of its matches a text may be cut
    also: tuple[str, ...] = ()  # further spellings in the files of others


_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FAST_LETTERS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++"
_FAST_REST = r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s"
_OLD_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITAL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_LETTERS}|\p{{N}}|{_REST}"
_O200K = rf"{_CASED}{_ENDING}|{_CAPITAL}{_ENDING}|\p{{N}}{{1,3}}|{_CASED_REST}"
_TEKKEN = rf"{_CASED}|{_CAPITAL}|\p{{N}}|{_CASED_REST}"

GPT2 = SplitPattern(
    name="gpt2",
    written=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    fast=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    quick=None,
    cut=_BLANK,
)
LLAMA3 = SplitPattern(
    name="llama3",
    written=_LLAMA3,
    fast=rf"{_FAST_LETTERS}|\p{{N}}{{1,3}}+|{_FAST_REST}",
    quick=_LLAMA3,
    cut=_BLANK_OR_LINE,
    also=(_OLD_CL100K,),
)
QWEN2 = SplitPattern(
    name="qwen2", written=_QWEN2, fast=rf"{_FAST_LETTERS}|\p{{N}}|{_FAST_REST}", quick=_QWEN2, cut=_BLANK_OR_LINE
)
# As LLAMA3, but blanks at a text's end are one piece, line ends among them or not.
CL100K = SplitPattern(
    name="cl100k",
    written=(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    fast=(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    quick=_LLAMA3,
    cut=_BLANK_OR_LINE,
)
O200K = SplitPattern(name="o200k", written=_O200K, fast=_O200K, quick=_O200K, cut=_BLANK_OR_LINE)
TEKKEN = SplitPattern(name="tekken", written=_TEKKEN, fast=_TEKKEN, quick=_TEKKEN, cut=_BLANK_OR_LINE)
# GPT-2's behind a step that sets digits apart, one by one or in runs; blanks before them then end their piece.
_DIGITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}++|{digits}| ?[^\s\p{{L}}\p{{N}}]++|\s++$|\s++(?=\p{{N}})|\s+(?!\S)|\s"
_SINGLE_DIGITS = SplitPattern(
    name="gpt2, single digits", written="", fast=_DIGITS.format(digits=r"\p{N}"), quick=None, cut=_BLANK
)
_DIGIT_RUNS = SplitPattern(
    name="gpt2, digits apart", written="", fast=_DIGITS.format(digits=r"\p{N}++"), quick=None, cut=_BLANK
)

PATTERNS = (GPT2, LLAMA3, QWEN2, CL100K, O200K, TEKKEN)
_BY_SPELLING = {spelling: p for p in PATTERNS for spelling in (p.written, *p.also)}


def pattern_of(config: dict[str, Any]) -> SplitPattern:
    """The pattern of a tokenizer.json. Raises ValueError, saying why, where it splits in another way."""
    step = config.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", []) if step.get("type") == "Sequence" else [step]
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1].get("add_prefix_space"):
        raise ValueError("its split is not a known one that ends in bytes")
    built_in = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and built_in:
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and built_in:
        return _SINGLE_DIGITS if steps[0].get("individual_digits") else _DIGIT_RUNS
    if kinds == ["Split", "ByteLevel"] and not built_in and _keeps_matches(steps[0]):
        regex = steps[0].get("pattern", {}).get("Regex")
        if regex in _BY_SPELLING:
            return _BY_SPELLING[regex]
        raise ValueError(f"its split is not a known one: {regex}")
    raise ValueError(f"its split is not a known one: {', '.join(map(str, kinds))}")


def steps_of(regex: str) -> dict[str, Any]:
    """The pre_tokenizer of a tokenizer.json that splits by `regex`."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, step]}


def cut_text(text: str, cut: re.Pattern[str], size: int = PIECE_CHARACTERS) -> list[str]:
    """Cut text before matches of `cut`, so that its pieces, encoded one by one, give the ids of the whole.

    Pieces have about `size` characters, and more where nothing allows a cut.
    """
    pieces = []
    start = 0
    while len(text) - start > size and (found := cut.search(text, start + size)):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


def _keeps_matches(split: dict[str, Any]) -> bool:
    """Whether a Split step makes every match a piece. Where matches cover all of a text, the two ways are one."""
    return (split.get("behavior"), bool(split.get("invert"))) in (("Isolated", False), ("Removed", True))
