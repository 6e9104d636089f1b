"""Conversations as data has them: a list of messages, each with a role and a content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]  # "role", "content", and whatever else the template reads


def messages_of(value: Any) -> tuple[Message, ...]:
    """The messages of a field. Raises ValueError, naming the message, for what is no list of roles and contents.

    A content is a string, or a list of parts `{"type": "text", "text": ...}`, which are joined. It may be missing or
    null in a message that has something else, such as calls of tools. Nulls, which tables write for fields that a
    message has not, are left out.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError("it is not a list of messages")
    return tuple(_message(number, message) for number, message in enumerate(value))


def text_of(messages: Sequence[Message]) -> str:
    """The contents, for counting and sampling."""
    return "\n".join(content for message in messages if (content := message["content"]))


def _message(number: int, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError(f"message {number} is not an object with a role and a content")
    fields = {name: field for name, field in value.items() if field is not None}
    if not isinstance(fields.get("role"), str):
        raise ValueError(f"message {number} has no role")
    return {**fields, "content": _content(number, fields)}


def _content(number: int, fields: Mapping[str, Any]) -> str:
    content = fields.get("content")
    if content is None and len(fields) > 1:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        return "".join(_part(number, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no content that is a string")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"message {number} holds a lone surrogate at character {error.start}") from error
    return content


def _part(number: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"message {number} has a part that is no text")
    return text
