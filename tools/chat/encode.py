"""Conversations as ids and supervised spans.

Every segment of the rendered text is tokenised by itself, so that spans end where tokens do. Special tokens come from
the template alone: what spells one in a message is ordinary text. A conversation is refused where what its assistants
said would not be what is learned: where the template leaves some of it out, or the tokens do not decode to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from seqmesh.tools.chat.chatml import ASSISTANT
from seqmesh.tools.chat.messages import Message
from seqmesh.tools.chat.segments import ChatError, Segment
from seqmesh.tools.chat.template import ChatTemplate
from seqmesh.tools.tokenizers.engine import Engine, Ids
from seqmesh.tools.tokenizers.engines import reference_engine
from seqmesh.tools.tokenizers.file import TokenizerFile
from seqmesh.tools.tokenizers.sentencepiece_model import SentencePieceModel

SHOWN_CHARACTERS = 60  # of a text in a message


class EncodedChat(NamedTuple):
    """ids [T]; spans [S, 2], start and end of the token ranges that are learned, ascending, apart from each other."""

    ids: Ids
    spans: npt.NDArray[np.int64]


class ChatEncoder:
    """Encodes conversations with one tokenizer, template and engine."""

    def __init__(self, tokenizer: TokenizerFile, template: ChatTemplate, engine: Engine | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._engine = engine or reference_engine(tokenizer)
        self._specials = _special_tokens(tokenizer)

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[EncodedChat | ChatError]:
        """Each conversation's ids and spans, or why it has none. The engine sees all of them in one call."""
        rendered = [self._rendered(messages) for messages in conversations]
        texts = [
            segment.text
            for segments in rendered
            if not isinstance(segments, ChatError)
            for segment in segments
            if not segment.is_token
        ]
        encoded = iter(self._engine.encode(texts))
        return [found if isinstance(found, ChatError) else self._assembled(found, encoded) for found in rendered]

    def _rendered(self, messages: Sequence[Message]) -> list[Segment] | ChatError:
        try:
            segments = self._template.render(messages, self._specials)
            _check_nothing_lost(messages, segments)
            _check_encodable(segments)
        except ChatError as error:
            return error
        return segments

    def _assembled(self, segments: Sequence[Segment], encoded: Iterator[Ids]) -> EncodedChat | ChatError:
        texts = islice(encoded, sum(not segment.is_token for segment in segments))
        taken = list(texts)  # also where the conversation is refused: the next one's begin behind them
        parts = iter(taken)
        ids = [self._token(segment) if segment.is_token else next(parts) for segment in segments]
        try:
            for segment, part in zip(segments, ids, strict=True):
                self._check(segment, part)
        except ChatError as error:
            return error
        return EncodedChat(np.concatenate([np.zeros(0, np.uint32), *ids]), _spans(segments, ids))

    def _token(self, segment: Segment) -> Ids:
        return np.array([self._specials[segment.text]], np.uint32)

    def _check(self, segment: Segment, ids: Ids) -> None:
        if segment.is_token:
            return
        if (hits := self._tokenizer.reserved[ids]).any():
            token = self._tokenizer.tokenizer.id_to_token(int(ids[int(hits.argmax())]))
            raise ChatError(f"its text encodes to the special token {token!r}: this tokenizer cannot tell them apart")
        if not segment.learned:
            return
        back = self._tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        if back != segment.text:
            raise ChatError(f"what an assistant said does not survive the tokenizer: {_difference(segment.text, back)}")


def encode_chat(messages: Sequence[Message], tokenizer: TokenizerFile, template: ChatTemplate) -> EncodedChat:
    """One conversation. Raises ChatError with the reason where it has no ids."""
    (found,) = ChatEncoder(tokenizer, template).encode([messages])
    if isinstance(found, ChatError):
        raise found
    return found


def _special_tokens(file: TokenizerFile) -> dict[str, int]:
    if isinstance(file.tokenizer, SentencePieceModel):
        return file.tokenizer.special_tokens()
    added = file.tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}


def _check_nothing_lost(messages: Sequence[Message], segments: Sequence[Segment]) -> None:
    """All that assistants said is learned, in their order; templates may strip it."""
    learned = "\0".join(segment.text for segment in segments if segment.learned and not segment.is_token)
    done = 0
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        said = message["content"].strip()
        at = learned.find(said, done)
        if at < 0:
            raise ChatError(
                f"the template changes what the assistant said in message {number}, which begins "
                f"{said[:SHOWN_CHARACTERS]!r}: it is not whole in what would be learned"
            )
        done = at + len(said)


def _check_encodable(segments: Sequence[Segment]) -> None:
    for segment in segments:
        try:
            segment.text.encode()
        except UnicodeEncodeError as error:
            raise ChatError("a message holds a lone surrogate, which is no character") from error


def _spans(segments: Sequence[Segment], ids: Sequence[Ids]) -> npt.NDArray[np.int64]:
    """Learned segments as ranges of tokens, neighbours in one."""
    spans: list[list[int]] = []
    end = 0
    for segment, part in zip(segments, ids, strict=True):
        start, end = end, end + len(part)
        if not segment.learned or start == end:
            continue
        if spans and spans[-1][1] == start:
            spans[-1][1] = end
        else:
            spans.append([start, end])
    return np.array(spans, np.int64).reshape(-1, 2)


def _difference(text: str, back: str) -> str:
    """Both from where they differ on."""
    size = min(len(text), len(back))
    first = next((at for at in range(size) if text[at] != back[at]), size)
    return f"{text[first:][:SHOWN_CHARACTERS]!r} comes back as {back[first:][:SHOWN_CHARACTERS]!r}"
