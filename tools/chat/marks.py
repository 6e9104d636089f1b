"""What a template and `prepare` both put around a document is put there once."""

from __future__ import annotations

from seqmesh.tools.chat.encode import EncodedChat
from seqmesh.tools.tokenizers.file import TokenizerFile


def within_marks(chat: EncodedChat, file: TokenizerFile) -> EncodedChat:
    """A conversation without the marks that `add_marks` will put around it; the spans count as they will then be."""
    ids, spans = chat
    first = int(len(ids) > 0 and file.bod_id is not None and ids[0] == file.bod_id)
    last = int(len(ids) > first and file.eod_id is not None and ids[-1] == file.eod_id)
    shift = int(file.bod_id is not None) - first
    return EncodedChat(ids[first : len(ids) - last], spans + shift)
