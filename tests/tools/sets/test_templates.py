"""Conversations by different templates are not put into one set; text goes with any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from seqmesh.loader.manifest import read_manifest
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.sets.append import append_sets
from seqmesh.tools.sets.merge import merge_sets
from seqmesh.tools.tokenizers.file import load_recorded, load_tokenizer
from seqmesh.tools.tokenizers.training import train_tokenizer
from tests.tools.sets.sets import assert_whole

OTHER = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.fixture
def sets(tmp_path: Path, texts: list[str]) -> dict[str, str]:
    """Conversations by two templates, and text, by one tokenizer."""
    trained = Tokenizer.from_str(train_tokenizer(texts[:20], 300).decode())
    trained.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (tmp_path / "tokenizer.json").write_text(trained.to_str())
    (tmp_path / "other.jinja").write_text(OTHER)
    made = {}
    for name, chat in (
        ("chatml", {"chat_column": "chat"}),
        ("jinja", {"chat_column": "chat", "chat_template": str(tmp_path / "other.jinja")}),
        ("text", {}),
    ):
        talk = [{"role": "user", "content": f"hello {name}"}, {"role": "assistant", "content": f"I am {name}"}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"chat": talk, "text": name}) + "\n")
        made[name] = str(tmp_path / name)
        inputs, tokenizer = (str(tmp_path / f"{name}.jsonl"),), str(tmp_path / "tokenizer.json")
        prepare(PrepareOptions(inputs=inputs, out=tmp_path / name, tokenizer=tokenizer, **chat))  # type: ignore[arg-type]  # strings all
    return made


def test_templates_are_recorded_and_must_agree(sets: dict[str, str], tmp_path: Path) -> None:
    recorded = {name: read_manifest(Path(folder)).tokenizer for name, folder in sets.items()}
    plain = load_tokenizer(tmp_path / "tokenizer.json").fingerprint
    assert recorded["text"] == plain
    assert len(set(recorded.values())) == 3 and all(name.startswith(plain) for name in recorded.values())
    refused = "chatml and .*jinja can not be one set: their conversations are written by different chat templates"
    for given in ([sets["chatml"], sets["jinja"]], [sets["text"], sets["chatml"], sets["jinja"]]):
        with pytest.raises(ValueError, match=refused):
            merge_sets(tmp_path / "refused", given)
    with pytest.raises(ValueError, match=refused):
        append_sets(Path(sets["chatml"]), [sets["jinja"]])
    merged = merge_sets(tmp_path / "merged", [sets["text"], sets["chatml"]])
    assert merged.tokenizer == recorded["chatml"]
    assert_whole(tmp_path / "merged")
    assert load_recorded(tmp_path / "merged", merged).fingerprint == plain
    with pytest.raises(ValueError, match="different chat templates"):
        append_sets(tmp_path / "merged", [sets["jinja"]])
    assert append_sets(Path(sets["text"]), [sets["jinja"]]).tokenizer == recorded["jinja"]
    assert_whole(Path(sets["text"]))
