"""Which template turns conversations into text: `chatml`, the tokenizer's own, or a file."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from seqmesh.tools.chat import chatml, jinja
from seqmesh.tools.chat.messages import Message
from seqmesh.tools.chat.segments import ChatError, Segment

CHATML = "chatml"
TOKENIZER = "tokenizer"
CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A template. source: in Jinja, None for the built-in one. variables: names of tokens, such as `bos_token`, that it
    may ask for. It can be sent to other processes."""

    source: str | None = None
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def fingerprint(self) -> str:
        """Differs where tokens may differ."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self.source, self.variables]).encode())

    def render(self, messages: Sequence[Message], specials: Collection[str]) -> list[Segment]:
        """The segments of a conversation, `specials` being the special tokens of the tokenizer. Raises ChatError."""
        if not messages:
            raise ChatError("the conversation has no messages")
        if self.source is None:
            return chatml.render(messages, specials)
        return jinja.render(self.source, dict(self.variables), messages, specials)


def load_template(spec: str, tokenizer: Path) -> ChatTemplate:
    """The template that `--chat-template` names. `tokenizer`: the path of the tokenizer, beside which
    `tokenizer_config.json` tells its names of tokens, and, for `tokenizer`, the template.

    Raises FileNotFoundError or ValueError naming the file, ImportError where a template needs jinja2.
    """
    if spec == CHATML:
        return ChatTemplate()
    config = _config(tokenizer.with_name(CONFIG_NAME))
    source = _own(config, tokenizer) if spec == TOKENIZER else _read(Path(spec))
    jinja.check(source, spec)
    return ChatTemplate(source=source, variables=tuple(sorted(_tokens(config))))


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"no such chat template: {path} (a file in Jinja, {TOKENIZER} or {CHATML})")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the chat template {path} is not UTF-8 at byte {error.start}") from error


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _own(config: dict[str, Any], tokenizer: Path) -> str:
    """The template of a tokenizer: a file beside it, or in its configuration, where it may be one of several."""
    beside = tokenizer.with_name(TEMPLATE_NAME)
    if beside.is_file():
        return _read(beside)
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise FileNotFoundError(
            f"no chat template beside {tokenizer}: neither {TEMPLATE_NAME} nor a chat_template in {CONFIG_NAME}; "
            f"name a file, or {CHATML}"
        )
    return found


def _tokens(config: dict[str, Any]) -> list[tuple[str, str]]:
    """`bos_token` and its like; older files write a token as an object."""
    found = []
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found.append((name, text))
    return found
