"""What a bin may hold, and the choices that some packing methods leave open."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from seqmesh.packer.lengths import LARGEST, Int64Array, as_integer, as_lengths
from seqmesh.packer.totals import total

NO_LIMIT = LARGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits of a bin: `capacity` tokens, `max_documents`, and `extra_capacity` of a second resource, of which document
    i needs `extra[i]` (no entries: there is none). `lookahead` documents are seen beyond the first that is unplaced;
    `key` decides whatever is drawn, and `drawn` says whether the order in which documents are met is."""

    capacity: int
    max_documents: int = NO_LIMIT
    extra: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    extra_capacity: int = NO_LIMIT
    lookahead: int = NO_LIMIT
    key: int = 0
    drawn: bool = False

    def of(self, chosen: Int64Array) -> Rules:
        """The same rules for some of the documents."""
        return replace(self, extra=self.extra[chosen]) if len(self.extra) else self


def make_rules(
    documents: int,
    *,
    capacity: int,
    max_documents: int | None,
    extra: npt.ArrayLike | None,
    extra_capacity: int | None,
    lookahead: int,
    key: int,
    drawn: bool,
) -> Rules:
    """Rules from what a user gave. Raises ValueError for a limit below 1, and for an `extra` that has not one entry for
    each document or no capacity."""
    if (extra is None) != (extra_capacity is None):
        raise ValueError("extra and extra_capacity belong together: give both or neither")
    second = as_lengths([] if extra is None else extra, name="extra")
    if extra is not None and len(second) != documents:
        raise ValueError(f"extra has {len(second)} entries for {documents} documents: must have one for each")
    total(second, "extra")
    return Rules(
        capacity=as_integer("capacity", capacity, 1),
        max_documents=NO_LIMIT if max_documents is None else as_integer("max_documents", max_documents, 1),
        extra=second,
        extra_capacity=NO_LIMIT if extra_capacity is None else as_integer("extra_capacity", extra_capacity, 1),
        lookahead=as_integer("lookahead", lookahead, 0),
        key=key,
        drawn=drawn,
    )
