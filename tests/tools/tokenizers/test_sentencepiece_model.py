"""SentencePiece models: run by their own library, from text to set and back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from seqmesh.tools.inspect_set import decoded, read_document
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.tokenizers.engines import choose_engine, reference_engine
from seqmesh.tools.tokenizers.file import TokenizerFile, load_tokenizer, parse_tokenizer
from seqmesh.tools.verify import verify_set

sentencepiece = pytest.importorskip("sentencepiece")

TEXTS = (
    "  two  blanks\n\ttab ",
    "日本語 é\u0301 👩‍👩‍👧 \x01",
    "</s><s> <unk> literal",
    "x" * 300,
    "plain words, 12 of them",
)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request: Any, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With bytes for what it does not know, and nothing done to the text."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.split("\n")),
        model_writer=writer,
        model_type=request.param,
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    path.write_bytes(writer.getvalue())
    return path


@pytest.fixture
def file(model: Path) -> TokenizerFile:
    return load_tokenizer(model, bod_token="auto")


def test_a_set_keeps_the_model_and_gives_the_text_back(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = tmp_path / "out"
    options = PrepareOptions(inputs=(str(tmp_path / "in.jsonl"),), out=out, tokenizer=str(model), bod_token="auto")
    report = prepare(options)
    assert (report.engine, report.engine_reason) == ("sentencepiece", "runs its own models")
    assert (out / "tokenizer.model").read_bytes() == model.read_bytes()
    assert not (out / "tokenizer.json").exists()
    assert (report.manifest.bod_id, report.manifest.eod_id) == (1, 2)
    for index, text in enumerate(TEXTS):
        document = read_document(out, index)
        assert decoded(out, document) == text
        ids = document.ids.tolist()
        assert (ids.count(1), ids.count(2), ids[0], ids[-1]) == (1, 1, 1, 2)
    assert list(verify_set(out)) == []


def test_ids_are_those_of_the_library_whatever_the_threads(model: Path, file: TokenizerFile) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    expected = [library.encode(text) for text in TEXTS]
    for threads in (1, 2, None):
        ids, lengths = reference_engine(file, threads=threads).encode_flat(TEXTS)
        assert ids.tolist() == [id for row in expected for id in row]
        assert lengths.tolist() == [len(row) for row in expected]


def test_only_its_own_engine_runs_a_model(file: TokenizerFile) -> None:
    assert choose_engine(file, TEXTS, "sentencepiece").reason == "as asked"
    with pytest.raises(ValueError, match="the engine tokenizers cannot run this tokenizer: it is run by sentencepiece"):
        choose_engine(file, TEXTS, "tokenizers")
    with pytest.raises(ValueError, match="tiktoken cannot stand in for this tokenizer: it is a SentencePiece model"):
        choose_engine(file, TEXTS, "tiktoken")


def test_unfit_models_and_options_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="junk is not a SentencePiece model that the library reads"):
        parse_tokenizer(b"\n\xff\xffjunk", name="junk")
    with pytest.raises(ValueError, match="reads no special token from text"):
        load_tokenizer(model, parse_special=True)
    with pytest.raises(ValueError, match=r"no special token '<pad>'.*<s>, </s>"):
        load_tokenizer(model, eod_token="<pad>")
