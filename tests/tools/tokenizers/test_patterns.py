"""Split patterns: every spelling of one gives the same ids, and texts are cut only where that changes nothing."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seqmesh.tools.tokenizers.engine import Engine
from seqmesh.tools.tokenizers.engines import build_engine, choose_engine, reference_engine
from seqmesh.tools.tokenizers.file import TokenizerFile, parse_tokenizer
from seqmesh.tools.tokenizers.hard_texts import HARD_TEXTS
from seqmesh.tools.tokenizers.patterns import cut_text, pattern_of
from tests.tools.tokenizers.samples import SPLITS, trained

NFC = {"type": "NFC"}
# What the patterns tell apart, dense enough that short texts meet every alternative.
TRICKY = st.text(alphabet="aZsSdé\u0301\u017f日ʰǅ19½٣'\u2019.,/-_ \n\r\t\u00a0\u3000\x1c\u200d👩\u1ad5", max_size=40)
QUICK = ("llama3", "qwen2", "cl100k", "o200k", "tekken")


@cache
def tokenizer(split: str) -> TokenizerFile:
    return parse_tokenizer(trained([*HARD_TEXTS, *SAMPLE] * 3, split, normalizer=NFC if split == "qwen2" else None))


SAMPLE = (
    "the cat isn't on 12 mats, they've 3456 of them\n\n  if x_1 >= 10:\n\treturn f(x)\n",
    "MixedCase WORDS d'été 日本語",
)


@pytest.mark.parametrize("split", sorted(SPLITS))
def test_tiktoken_stands_in_for_every_known_split(split: str) -> None:
    assert choose_engine(tokenizer(split), SAMPLE, "tiktoken", threads=1).engine.name == "tiktoken"


@pytest.mark.parametrize("split", QUICK)
def test_quicktok_stands_in_for_the_splits_that_it_knows(split: str) -> None:
    pytest.importorskip("quicktok")
    choice = choose_engine(tokenizer(split), SAMPLE)
    assert choice.engine.name == "quicktok"
    assert choice.reason == "gave the ids of tokenizers on 2 texts of the input"


@pytest.mark.parametrize("name", ["tiktoken", "quicktok"])
@settings(max_examples=120, deadline=None)
@given(text=TRICKY | st.text(max_size=40), split=st.sampled_from(sorted(SPLITS)))
def test_engines_give_the_ids_of_the_reference_on_any_text(name: str, text: str, split: str) -> None:
    if name == "quicktok":
        assume(split in QUICK)
    expected = reference_engine(tokenizer(split)).encode([text])[0].tolist()
    assert engine(split, name).encode([text])[0].tolist() == expected


@cache
def engine(split: str, name: str) -> Engine:
    if name == "quicktok":
        pytest.importorskip("quicktok")
    return build_engine(tokenizer(split), name, threads=1)


@pytest.mark.parametrize("name", ["tiktoken", "quicktok"])
def test_characters_of_every_kind_and_age_are_split_alike(name: str) -> None:
    codes = [*range(0, 0x3000, 7), 0x1AD5, 0x1AEB, *range(0x3000, 0xD800, 211), *range(0xE000, 0x20000, 37)]
    texts = [f"{(c := chr(code))}-A-{c}x,{c}1 {c} {c},\n{c}\n/{c}{c}AbA{c}bA{c}B7{c}" for code in codes]
    expected = reference_engine(tokenizer("o200k")).encode(texts)
    for text, ours, theirs in zip(texts, engine("o200k", name).encode(texts), expected, strict=True):
        assert np.array_equal(ours, theirs), ascii(text)


@settings(max_examples=150, deadline=None)
@given(text=TRICKY, split=st.sampled_from(sorted(SPLITS)), size=st.integers(1, 12))
def test_a_cut_text_encodes_as_the_whole(text: str, split: str, size: int) -> None:
    file = tokenizer(split)
    pieces = cut_text(text, CUTS[split], size)
    assert "".join(pieces) == text
    if split != "qwen2":  # which composes the text first
        reference = reference_engine(file)
        assert np.concatenate(reference.encode(pieces)).tolist() == reference.encode([text])[0].tolist()


CUTS = {split: pattern_of({"pre_tokenizer": steps}).cut for split, steps in SPLITS.items()}


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (None, "not a known one"),
        ({"type": "Whitespace"}, "not a known one"),
        ({"type": "ByteLevel", "add_prefix_space": True}, "not a known one"),
        ({"type": "Sequence", "pretokenizers": [SPLITS["built in"], SPLITS["built in"]]}, "ByteLevel, ByteLevel"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False},
                    {**SPLITS["built in"], "use_regex": False},
                ],
            },
            r"not a known one: \\w\+",
        ),
    ],
)
def test_other_splits_are_left_to_the_reference(steps: dict[str, object] | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pattern_of({"pre_tokenizer": steps})
