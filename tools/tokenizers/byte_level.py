"""Byte-level BPE in a tokenizer.json: its merges as ranks of byte strings, the form that faster libraries want.

Those libraries merge whichever neighbours make up the token with the lowest id. A tokenizer.json lists its merges
instead. The two are the same for vocabularies that training made, as far as structure can tell; texts have to prove it.
"""

from __future__ import annotations

import itertools
from typing import Any


def merge_ranks(config: dict[str, Any]) -> dict[bytes, int]:
    """Token bytes → id, added tokens left out. Raises ValueError, saying why, for what has no such form."""
    model = config["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError("it is not byte-level BPE")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ValueError("it marks pieces with a prefix or suffix")
    added = {token["content"] for token in config["added_tokens"]}
    vocabulary: dict[str, int] = {token: id for token, id in model["vocab"].items() if token not in added}
    merged = merge_results(model["merges"])
    order = [vocabulary.get(token, -1) for token in merged]
    if any(left > right for left, right in itertools.pairwise(order)):
        raise ValueError("its ids are not in the order of its merges")
    alphabet = byte_alphabet()
    made = set(merged) | set(alphabet)
    # With ignore_merges a piece that is a token is taken whole, as the faster libraries always do.
    if not (made <= set(vocabulary) if model.get("ignore_merges") else made == set(vocabulary)):
        raise ValueError("its vocabulary is not the 256 bytes and the results of its merges")
    try:
        return {bytes(alphabet[character] for character in token): id for token, id in vocabulary.items()}
    except KeyError as error:
        raise ValueError(f"its vocabulary holds {error}, which stands for no byte") from error


def matched_tokens(config: dict[str, Any]) -> tuple[str, ...]:
    """Added tokens that are no special ones: text that spells one gives it. Raises ValueError where the match of one
    depends on what is around it, or takes some of that."""
    tokens = [token for token in config["added_tokens"] if not token["special"]]
    for token in tokens:
        flags = any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip"))
        blank = any(character.isspace() for character in token["content"])
        if flags or blank or (token.get("normalized") and composes(config)):
            raise ValueError(f"it has added tokens matched in text by rules of their own: {token['content']!r}")
    return tuple(token["content"] for token in tokens)


def composes(config: dict[str, Any]) -> bool:
    """Whether text is brought into composed form (NFC) first. Raises ValueError where it is changed in other ways."""
    normalizer = config.get("normalizer")
    if not normalizer or (normalizer.get("type") == "Sequence" and not normalizer.get("normalizers")):
        return False
    if normalizer.get("type") == "NFC":
        return True
    raise ValueError(f"it normalises text ({normalizer.get('type')})")


def merge_results(merges: list[Any]) -> list[str]:
    """What each merge gives. Older files write a merge as one string "left right", newer ones as a pair."""
    return ["".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, as character → byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
