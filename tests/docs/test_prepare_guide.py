"""Every recipe of the guide to preparing data, as it stands there, on small inputs of the names that it has.

Commands run in this process. What other programs of a pipe would give is given as standard input, since `jq` and
`zstdcat` may not be here; buckets are in memory.
"""

import base64
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from seqmesh.loader.manifest import read_manifest
from seqmesh.tools.cli import app
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.tokenizers.training import train_tokenizer
from seqmesh.tools.verify import verify_set

GUIDE = Path(__file__).parents[2] / "docs" / "prepare.md"
SETS = ("shards", "web", "books", "code", "more")  # what the part on finished sets has


def recipes() -> Iterator[str]:
    """The commands of the guide, those in pipes with what precedes them."""
    for block in re.findall(r"^```\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()


def is_prepare(recipe: str) -> bool:
    return "seqmesh prepare " in recipe


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = np.random.default_rng(5)
    words = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "ing", "or", "un")]
    return [" ".join(rng.choice(words, int(n))) for n in rng.integers(20, 120, 120)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """All that the recipes on text read."""
    folder = tmp_path_factory.mktemp("inputs")
    write_texts(folder, texts)
    write_tokenizers(folder, texts)
    return folder


def write_texts(folder: Path, texts: list[str]) -> None:
    (folder / "corpus.jsonl").write_text(lines(texts))
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text(texts[0])
    (folder / "books" / "two.jsonl").write_text(lines(texts[1:3]))
    pages: dict[str, list[Any]] = {
        "content": texts,
        "url": [f"https://example.org/{number}" for number in range(len(texts))],
        "domain": ["example.org", "example.com"] * (len(texts) // 2),
        "license": ["CC0"] * len(texts),
    }
    pq.write_table(pa.table(pages), folder / "pages.parquet")
    talks = [[{"role": "user", "content": "which?"}, {"role": "assistant", "content": text}] for text in texts]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))


def write_tokenizers(folder: Path, texts: list[str]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    trained = Tokenizer.from_str(train_tokenizer(texts, 320).decode())
    trained.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (folder / "tokenizer.json").write_text(trained.to_str())
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer.json").write_text(trained.to_str())
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% endfor %}"
    )
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "cl100k_base.tiktoken").write_text(ranks)
    (folder / "my.tiktoken").write_text(ranks)
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=writer, vocab_size=300, byte_fallback=True, minloglevel=2
    )
    (folder / "tokenizer.model").write_bytes(writer.getvalue())


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Path:
    """All that the recipes on finished sets read."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copy(inputs / "tokenizer.json", folder)
    for number, name in enumerate(SETS):
        corpus = inputs / "corpus.jsonl"
        if number:
            corpus = folder / f"{name}.jsonl"
            corpus.write_text(lines([f"{name} {text}" for text in ("one", "two", "three")]))
        prepare(PrepareOptions(inputs=(str(corpus),), out=folder / name, tokenizer=str(inputs / "tokenizer.json")))
    run(f"seqmesh convert {folder}/web {folder}/old --to megatron")
    for path in (folder / "old").iterdir():
        path.rename(path.with_name("text_document" + path.suffix))
    return folder


def run(recipe: str, data: bytes | None = None) -> str:
    """What a command says; raises what it raises."""
    words = shlex.split(recipe, comments=True)
    assert words[0] == "seqmesh"
    result = CliRunner().invoke(app, words[1:], input=data, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def bucket(texts: list[str]) -> Iterator[str]:
    """The address of what the guide has in a bucket."""
    packed = pa.compress(lines(texts).encode(), codec="zstd", asbytes=True)
    fsspec.filesystem("memory").pipe({f"/corpus/2026/{part}.jsonl.zst": packed for part in "ab"})
    yield "memory://corpus"
    fsspec.filesystem("memory").rm("/corpus", recursive=True)


@pytest.mark.parametrize("recipe", [recipe for recipe in recipes() if is_prepare(recipe)])
def test_a_recipe_makes_a_whole_set(
    recipe: str, inputs: Path, tmp_path: Path, texts: list[str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    *piped, command = recipe.split(" | ")
    run(command.replace("s3://corpus", bucket), lines(texts).encode() if piped else None)
    assert verify_set(Path("shards")) == []
    manifest = read_manifest(Path("shards"))
    expected = {"s3://corpus": 2 * len(texts) + 3, "--sample": 12}
    assert manifest.documents == next((count for word, count in expected.items() if word in recipe), len(texts))
    assert manifest.counts["documents_in"] >= manifest.documents
    (shard, *_) = manifest.shards
    columns = pa.ipc.open_file(str(Path("shards") / shard.file)).schema.names
    assert ("targets" in columns) == ("--chat-column" in recipe)
    assert ("metadata" in columns) == ("--keep" in recipe)


@pytest.mark.parametrize("recipe", [recipe for recipe in recipes() if not is_prepare(recipe)])
def test_a_recipe_on_a_finished_set(
    recipe: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    if "convert old/" in recipe:  # into a new set, which that before it has been read from in the guide
        shutil.rmtree("shards")
    vocabulary = str(read_manifest(Path("web")).vocab_size)
    assert run(recipe.replace("50304", vocabulary)).strip()
    made = [path for path in tmp_path.rglob("manifest.json") if path.parent not in before or "convert old/" in recipe]
    for path in [*made, Path("shards/manifest.json")]:
        assert verify_set(path.parent) == []
    makes = {"merge": 1, "split shards train": 2, "by-source": 1, "reshard": 1, "convert old/": 1}
    assert any(word in recipe for word in makes) == bool(made)
