"""Engines: the fast one is used where it is proved equal, and never elsewhere."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.tools.tokenizers import engine as engine_module
from seqmesh.tools.tokenizers import patterns
from seqmesh.tools.tokenizers.engines import build_engine, choose_engine, reference_engine
from seqmesh.tools.tokenizers.file import TokenizerFile, load_tokenizer, parse_tokenizer
from seqmesh.tools.tokenizers.hard_texts import HARD_TEXTS
from seqmesh.tools.tokenizers.patterns import GPT2, cut_text
from seqmesh.tools.tokenizers.tiktoken_engine import TiktokenEngine
from seqmesh.tools.tokenizers.tiktoken_engine import tiktoken_engine as tiktoken_twin


@pytest.fixture(scope="module")
def file(tokenizer_path: Path) -> TokenizerFile:
    """One that splits as GPT-2's, which quicktok does not know."""
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return with_fields(tokenizer_path, pre_tokenizer=step)


@pytest.fixture(scope="module")
def twin(file: TokenizerFile) -> TiktokenEngine:
    return tiktoken_twin(file)


def with_fields(path: Path, **fields: Any) -> TokenizerFile:
    return parse_tokenizer(json.dumps({**json.loads(path.read_bytes()), **fields}).encode())


def test_both_engines_give_the_same_ids(file: TokenizerFile, twin: TiktokenEngine, texts: list[str]) -> None:
    sample = [*HARD_TEXTS, *texts]
    for text, ours, theirs in zip(sample, twin.encode(sample), reference_engine(file).encode(sample), strict=True):
        assert np.array_equal(ours, theirs), text[:80]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=200))
def test_both_engines_give_the_same_ids_on_any_text(text: str, file: TokenizerFile, twin: TiktokenEngine) -> None:
    assert np.array_equal(twin.encode([text])[0], reference_engine(file).encode([text])[0])


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=" \n\ta'sB9.é日\u3000", min_size=1, max_size=120), size=st.integers(1, 20))
def test_cut_text_encodes_as_the_whole(text: str, size: int, file: TokenizerFile) -> None:
    pieces = cut_text(text, GPT2.cut, size)
    assert "".join(pieces) == text
    reference = reference_engine(file)
    assert np.array_equal(np.concatenate(reference.encode(pieces)), reference.encode([text])[0])


@pytest.mark.parametrize("text", ["x" + " " * 700_000 + "y", "ab" * 300_000, "word and word\n" * 40_000])
def test_very_long_documents_neither_overflow_nor_differ(text: str, file: TokenizerFile, twin: TiktokenEngine) -> None:
    assert np.array_equal(twin.encode([text])[0], reference_engine(file).encode([text])[0])


def test_a_trained_tokenizer_runs_on_the_fastest_engine(tokenizer_path: Path, texts: list[str]) -> None:
    trained = load_tokenizer(tokenizer_path)
    fastest = "quicktok" if find_spec("quicktok") else "tiktoken"
    engine = choose_engine(trained, texts).engine
    assert engine.name == fastest
    for text, ids in zip(HARD_TEXTS, engine.encode(HARD_TEXTS), strict=True):
        assert trained.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text


def test_auto_takes_the_twin_where_it_is_proved(file: TokenizerFile, texts: list[str]) -> None:
    assert choose_engine(file, texts).engine.name == "tiktoken"
    assert choose_engine(file, texts, "tokenizers").engine.name == "tokenizers"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalises"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, "split"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "split"),
    ],
)
def test_a_tokenizer_without_a_twin_runs_on_the_reference(
    tokenizer_path: Path, fields: dict[str, Any], reason: str
) -> None:
    other = with_fields(tokenizer_path, **fields)
    choice = choose_engine(other, ["some text"])
    assert choice.engine.name == "tokenizers"
    assert reason in choice.reason
    with pytest.raises(ValueError, match=f"cannot stand in for this tokenizer.*{reason}"):
        choose_engine(other, ["some text"], "tiktoken")


def test_ids_out_of_merge_order_have_no_twin(tokenizer_path: Path) -> None:
    model = json.loads(tokenizer_path.read_bytes())["model"]
    first, second = ("".join(merge) for merge in model["merges"][:2])
    vocabulary = model["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    with pytest.raises(ValueError, match="order of its merges"):
        tiktoken_twin(with_fields(tokenizer_path, model=model))


def test_a_token_that_merges_do_not_reach_rules_the_twin_out(tokenizer_path: Path) -> None:
    model = json.loads(tokenizer_path.read_bytes())["model"]
    # "qqjj" is made from "qq" and "jj", but "qj" comes first: the twin takes the piece whole, the reference does not.
    size = len(model["vocab"])
    for offset, merge in enumerate((("q", "j"), ("q", "q"), ("j", "j"), ("qq", "jj"))):
        model["vocab"]["".join(merge)] = size + offset
        model["merges"].append(list(merge))
    choice = choose_engine(with_fields(tokenizer_path, model=model), ["no such word"])
    assert choice.engine.name == "tokenizers"
    assert "the ids differ on the text that begins 'qqjj'" in choice.reason


def test_added_tokens_that_take_blanks_with_them_have_no_twin(tokenizer_path: Path) -> None:
    config = json.loads(tokenizer_path.read_bytes())
    tab = {**config["added_tokens"][0], "id": 400, "content": "<tab>", "special": False, "rstrip": True}
    with pytest.raises(ValueError, match="matched in text by rules"):
        tiktoken_twin(with_fields(tokenizer_path, added_tokens=[*config["added_tokens"], tab]))


def test_a_difference_found_in_the_sample_rules_the_twin_out(
    file: TokenizerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "GPT2", dataclasses.replace(GPT2, fast=r"\w+|\W+"))
    assert choose_engine(file, ["x"]).engine.name == "tokenizers"


def test_a_difference_found_later_stops_the_job(file: TokenizerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "GPT2", dataclasses.replace(GPT2, fast=r"\w+|\W+"))
    with pytest.raises(ValueError, match=r"disagree on the text that begins 'def  f.*engine tokenizers"):
        build_engine(file, "tiktoken").encode(["def  f(self):\n        return self.text_and_more"])


def test_an_unknown_engine_is_refused(file: TokenizerFile) -> None:
    with pytest.raises(ValueError, match="must be one of auto, quicktok, tiktoken"):
        choose_engine(file, [], "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tokenizers", "tiktoken"])
def test_flat_and_single_arrays_agree_whatever_the_threads(
    file: TokenizerFile, name: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):  # which an engine sets
        monkeypatch.setenv(variable, "1")
    expected = reference_engine(file).encode(texts)
    for threads in (1, 3, None):
        engine = build_engine(file, name, threads=threads)
        ids, lengths = engine.encode_flat(texts)
        assert (ids.dtype, lengths.dtype) == (np.dtype(np.uint32), np.dtype(np.int64))
        assert ids.tolist() == np.concatenate(expected).tolist()
        assert lengths.tolist() == list(map(len, expected))
        assert all(map(np.array_equal, engine.encode(texts), expected))
        assert engine.encode_flat([])[0].size == 0


def test_unfit_threads_and_unknown_names_are_refused(file: TokenizerFile) -> None:
    with pytest.raises(ValueError, match="threads is 0: must be at least 1"):
        build_engine(file, "tiktoken", threads=0)
    with pytest.raises(ValueError, match="the engine sentencepiece cannot run this tokenizer: it is run by tokenizers"):
        build_engine(file, "sentencepiece")


def test_special_tokens_that_are_parsed_are_left_to_the_reference(tokenizer_path: Path) -> None:
    choice = choose_engine(load_tokenizer(tokenizer_path, parse_special=True), ["text"])
    assert choice.engine.name == "tokenizers"
    assert "special tokens are to be parsed" in choice.reason


@pytest.mark.parametrize("limit", [1, 50, 700])
def test_encoding_in_groups_changes_nothing(
    file: TokenizerFile, texts: list[str], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = ["", *texts[:6], "", texts[6] * 3, ""]
    expected = [ids.tolist() for ids in reference_engine(file).encode(sample)]
    monkeypatch.setattr(engine_module, "GROUP_CHARACTERS", limit)
    assert [ids.tolist() for ids in reference_engine(file).encode(sample)] == expected
