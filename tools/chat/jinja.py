"""Templates in Jinja, by the conventions of transformers: sandboxed, `{% generation %}` around what is learned.

A template without such blocks is rendered once more up to each message of an assistant: what it adds for the message is
learned then, up to the last special token in it. That needs a template that renders the beginning of a conversation to
the beginning of the whole.

The marks of a template are told from data that spells them by characters that Unicode keeps for such uses: what looks
like a special token in a message is replaced while the template runs, and put back when the text is cut into segments.
Templates get no clock: a set would depend on the day it was made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from seqmesh.tools.chat.chatml import ASSISTANT
from seqmesh.tools.chat.messages import Message
from seqmesh.tools.chat.segments import ChatError, Segment, joined

NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
# In rendered text: what is learned, a token that data spells, an end of data.
BEGIN, END, HIDDEN, EDGE = (NONCHARACTERS[number] for number in range(4))
_HIDDEN = re.compile(f"{HIDDEN}(\\d+){HIDDEN}")
_MARKS = re.compile(f"[{NONCHARACTERS}]")
_ESCAPED_MARK = re.compile(r"\\ufd[de][0-9a-f]", re.IGNORECASE)
_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Render = Callable[[Sequence[Message], bool], str]  # messages, whether an assistant's turn is to begin at the end


def render(
    source: str, variables: Mapping[str, str], messages: Sequence[Message], specials: Collection[str]
) -> list[Segment]:
    """The segments of a conversation. Raises ChatError where the template refuses it, or what it makes of it cannot be
    told to be what the assistants said."""
    tokens = sorted(filter(None, specials), key=lambda token: (-len(token), token))
    hidden = [_hidden_message(message, tokens) for message in messages]

    def call(part: Sequence[Message], prompted: bool) -> str:
        return _call(source, messages=part, add_generation_prompt=prompted, **variables)

    text = call(hidden, False) if _BLOCK.search(source) else _by_prefixes(call, hidden, tokens)
    return list(joined(_segments(text, tokens)))


def _by_prefixes(call: Render, messages: Sequence[Message], tokens: Sequence[str]) -> str:
    """The rendered conversation with marks around what each assistant adds to it."""
    whole = call(messages, False)
    parts, done = [], 0
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = call(messages[:number], True)
        after = call(messages[: number + 1], False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            raise ChatError(
                f"the template does not render the messages up to {number} to the beginning of the whole conversation, "
                "so what the assistant said cannot be told: mark it in the template with {% generation %}"
            )
        end = _end_of_turn(after, len(before), tokens)
        parts += [whole[done : len(before)], BEGIN, whole[len(before) : end], END]
        done = end
    return "".join([*parts, whole[done:]])


def _end_of_turn(text: str, start: int, tokens: Sequence[str]) -> int:
    """Where a turn that begins at `start` ends: white space behind its last special token is not part of it."""
    end = len(text.rstrip())
    return end if end > start and text[:end].endswith(tuple(tokens)) else len(text)


def _segments(text: str, tokens: Sequence[str]) -> Iterator[Segment]:
    alternatives = "|".join(map(re.escape, tokens))
    pieces = re.split(f"({BEGIN}|{END}{'|' if alternatives else ''}{alternatives})", text)
    learned = False
    for number, piece in enumerate(pieces):
        if piece in (BEGIN, END):
            learned = piece == BEGIN
        elif number % 2:
            yield Segment(piece, is_token=True, learned=learned)
        else:
            yield Segment(_shown(piece, tokens), learned=learned)


def _hidden_message(message: Message, tokens: Sequence[str]) -> Message:
    """A message in which nothing spells a special token, nor could be part of one together with the template."""
    if any(token in message["role"] for token in tokens):
        raise ChatError(f"the role {message['role']!r} spells a special token")
    content = _hidden_text(message["content"], tokens)
    if any(content.strip() in token for token in tokens):  # a template could make it one by what it puts around it
        content = content.replace(content.strip(), f"{EDGE}{content.strip()}{EDGE}") if content.strip() else content
    return {**_hidden(message, tokens), "role": message["role"], "content": content}


def _hidden(value: Any, tokens: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _hidden_text(value, tokens)
    if isinstance(value, Mapping):
        return {_key(name, tokens): _hidden(field, tokens) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item, tokens) for item in value]
    return value


def _key(name: str, tokens: Sequence[str]) -> str:
    if _MARKS.search(name) or any(token in name for token in tokens):
        raise ChatError(f"the name of the field {name!r} spells a special token")
    return name


def _hidden_text(text: str, tokens: Sequence[str]) -> str:
    if mark := _MARKS.search(text):
        raise ChatError(f"a message holds U+{ord(mark[0]):X}, which is no character but a mark of programs' own")
    if _ESCAPED_MARK.search(text):
        raise ChatError("a message spells the escape of a character that is used as a mark here")
    core = text.strip()
    if not core or not tokens:
        return text
    first = EDGE if any(core[:size] == token[-size:] for token in tokens for size in range(1, len(token))) else ""
    last = EDGE if any(core[-size:] == token[:size] for token in tokens for size in range(1, len(token))) else ""
    pattern = "|".join(map(re.escape, tokens))
    hidden = re.sub(pattern, lambda found: f"{HIDDEN}{tokens.index(found[0])}{HIDDEN}", core)
    start = text.index(core)
    return f"{text[:start]}{first}{hidden}{last}{text[start + len(core) :]}"


def _shown(text: str, tokens: Sequence[str]) -> str:
    """Text as it was before it was hidden."""
    shown = _HIDDEN.sub(lambda found: tokens[int(found[1])], text).replace(EDGE, "")
    if _MARKS.search(shown) or _ESCAPED_MARK.search(shown):
        raise ChatError("the template cuts up or escapes what spells a special token in a message")
    return shown


def _call(source: str, **variables: Any) -> str:
    import jinja2

    try:
        return str(_compiled(source).render(tools=None, documents=None, **variables))
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ChatError(f"the template refuses it: {error}") from error


@lru_cache(maxsize=4)
def _compiled(source: str) -> Any:
    """Raises ImportError where jinja2 is not installed."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Puts marks around what a block `{% generation %}` gives."""

        tags = {"generation"}  # noqa: RUF012  # as the class it extends has it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def _as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def check(source: str, name: str) -> None:
    """Raises ValueError where a template is none, or holds characters that are used as marks."""
    import jinja2

    if _MARKS.search(source):
        raise ValueError(f"the chat template {name} holds characters of U+FDD0 to U+FDEF, which mark segments here")
    try:
        _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template {name}, line {error.lineno}: {error}") from error
