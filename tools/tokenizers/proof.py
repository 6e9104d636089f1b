"""Proof that an engine gives the reference's ids: on hard texts and a sample before it is used, and while it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqmesh.tools.tokenizers.engine import Engine, Ids, Lengths

# Of each call, the first document up to this size is encoded by both. The reference needs 1 ms for that, at most, the
# fastest engine 40 ms for a unit.
SPOT_CHECK_CHARACTERS = 1 << 11


class CheckedEngine(Engine):
    """An engine that checks itself. Raises ValueError as soon as it gives other ids than the reference."""

    def __init__(self, engine: Engine, reference: Engine) -> None:
        self._engine = engine
        self._reference = reference

    @property
    def name(self) -> str:
        return self._engine.name

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        ids, lengths = self._engine.encode_flat(texts)
        checked = next((i for i, text in enumerate(texts) if 0 < len(text) <= SPOT_CHECK_CHARACTERS), None)
        if checked is not None:
            start = int(lengths[:checked].sum())
            self._compare(texts[checked], ids[start : start + lengths[checked]])
        return ids, lengths

    def _compare(self, text: str, ids: Ids) -> None:
        if not np.array_equal(self._reference.encode([text])[0], ids):
            raise ValueError(
                f"{self.name} and {self._reference.name} disagree on the text that begins {text[:60]!r}, which the "
                f"sample at the start did not show: run again with the engine {self._reference.name}"
            )


def prove_equal(engine: Engine, reference: Engine, texts: Sequence[str]) -> None:
    """Raises ValueError with the first text on which the two differ."""
    for text, ours, theirs in zip(texts, engine.encode(texts), reference.encode(texts), strict=True):
        if not np.array_equal(ours, theirs):
            raise ValueError(f"the ids differ on the text that begins {text[:60]!r}")
