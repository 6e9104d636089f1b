"""Tokenizers of every split, trained small, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from seqmesh.tools.tokenizers.patterns import PATTERNS, steps_of
from seqmesh.tools.tokenizers.training import END_OF_DOCUMENT

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
SPLITS: dict[str, Any] = {
    **{pattern.name: steps_of(pattern.written) for pattern in PATTERNS},
    "built in": {**_BYTES, "use_regex": True},
    "single digits": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    },
    "digit runs": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": False}, {**_BYTES, "use_regex": True}],
    },
}


def trained(texts: Iterable[str], split: str, *, vocab_size: int = 600, normalizer: Any = None) -> bytes:
    """A tokenizer.json that splits in this way, trained on pieces of that kind."""
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    tokenizer = Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": SPLITS[split], "normalizer": normalizer}))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return json.dumps({**json.loads(tokenizer.to_str()), "decoder": {**_BYTES, "use_regex": True}}).encode()
