"""What a manifest calls the tokenizer of a set: its fingerprint and, where conversations were read, their template's.

The two stand side by side, so that either can be compared by itself: documents of text go with conversations of the
same tokenizer, conversations by different templates do not go together.
"""

from __future__ import annotations

from seqmesh.tools.chat.template import ChatTemplate

SEPARATOR = "+"


def recorded(tokenizer: str, template: ChatTemplate | None) -> str:
    """What is recorded of a tokenizer with this fingerprint. template: of conversations, None where they are none."""
    return tokenizer if template is None else f"{tokenizer}{SEPARATOR}{template.fingerprint}"


def tokenizer_part(name: str) -> str:
    """The fingerprint of the tokenizer itself."""
    return name.partition(SEPARATOR)[0]


def template_part(name: str) -> str | None:
    """The fingerprint of the template, None where there is none."""
    return name.partition(SEPARATOR)[2] or None
