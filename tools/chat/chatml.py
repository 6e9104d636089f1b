"""The built-in template, ChatML: `<|im_start|>role`, a line feed, the content, `<|im_end|>`, a line feed.

What assistants say is learned, with the mark at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from seqmesh.tools.chat.messages import Message
from seqmesh.tools.chat.segments import ChatError, Segment, joined

START, END = "<|im_start|>", "<|im_end|>"
ASSISTANT = "assistant"


def render(messages: Sequence[Message], specials: Collection[str]) -> list[Segment]:
    """The segments of a conversation. Raises ChatError where the tokenizer has not the marks."""
    if missing := [token for token in (START, END) if token not in specials]:
        raise ChatError(f"the tokenizer has no special token {missing[0]}, which the template chatml needs")
    return list(joined(segment for message in messages for segment in _turn(message)))


def _turn(message: Message) -> Iterator[Segment]:
    learned = message["role"] == ASSISTANT
    yield Segment(START, is_token=True)
    yield Segment(f"{message['role']}\n")
    yield Segment(message["content"], learned=learned)
    yield Segment(END, is_token=True, learned=learned)
    yield Segment("\n")
