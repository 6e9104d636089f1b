"""`LoaderSettings`: everything that decides which batches a job gets, in one frozen description.

The settings are split by what they decide: the *order* (data, seed, shuffle, tokens_per_step, ...) defines the global
batches and knows nothing of ranks; the *mesh* (ranks, capacity, cost) decides how a global batch is spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.explain import explain
from seqmesh.packer.cost import CostModel
from seqmesh.packer.pieces import largest_document
from seqmesh.packer.plan import Mesh, Mode

MAX_SETTING = 1 << 40  # far above any use, far below where 64-bit sums end

MAX_WAITING = 1 << 8  # documents that are held back at a time: their places travel with every batch

Overlong = Literal["error", "truncate", "split", "drop"]
TokenField = Literal["labels", "position_ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Documents of at least thresholds[i] tokens, and fewer than the next threshold, wait until there are `release` of
    them; see `delay`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    thresholds: tuple[int, ...]
    release: int

    def __post_init__(self) -> None:
        if not self.thresholds or self.thresholds[0] < 1 or any(a >= b for a, b in pairwise(self.thresholds)):
            raise ValueError(f"thresholds are {list(self.thresholds)}: must be at least 1, and ascend")
        most = MAX_WAITING // (len(self.thresholds) + 1)
        if not 1 <= self.release <= most:
            raise ValueError(f"release is {self.release}: must be at least 1, and at most {most}")

    def check(self, longest: int, tokens_per_step: int) -> None:
        """Raises ValueError where documents would wait for nothing or be released to where they have no room."""
        if self.thresholds[-1] > longest:
            raise ValueError(f"delay.thresholds end with {self.thresholds[-1]}: no document is over {longest} tokens")
        if self.release * longest > tokens_per_step:
            raise ValueError(
                f"delay.release is {self.release}: so many documents of {longest} tokens are over tokens_per_step, "
                f"{tokens_per_step}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """data: folder of a shard set. tokens_per_step: most tokens of a global batch. capacity: most tokens of one
    micro-batch on one rank. mode: `free` or `waves`, and ranks_per_node: see `packer.plan.Mesh`. max_document: most
    tokens of a document, by default the smaller of capacity and tokens_per_step; one over the capacity is spread over
    ranks. `overlong` says what happens to longer ones (error: refuse at start; truncate: keep the beginning; split:
    pieces of max_document tokens become documents of their own; drop: leave out). epochs: passes over the data, None
    for no end. seed and shuffle: the order of documents, a new global shuffle for each epoch. delay: long documents are
    held back until several come together, None for none. cost: what ranks are balanced by, None for tokens alone.
    fields: what batches hold for each token besides its id; what is left out costs nothing. pad_to: every batch is
    filled up to a multiple of so many tokens, None for not at all; the capacity gives all batches the same shape.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    data: str
    tokens_per_step: int
    capacity: int
    ranks: int = 1
    max_document: int | None = None
    overlong: Overlong = "error"
    epochs: int | None = None
    seed: int = 0
    shuffle: bool = True
    delay: Delay | None = None
    cost: CostModel | None = None
    mode: Mode = "free"
    ranks_per_node: int | None = None
    fields: tuple[TokenField, ...] = get_args(TokenField)
    pad_to: int | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "capacity", "ranks", "ranks_per_node", "max_document", "epochs", "pad_to"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_SETTING:
                raise ValueError(f"{name} is {value}: must be at least 1, and at most {MAX_SETTING}")
        if self.overlong not in ("error", "truncate", "split", "drop"):
            raise ValueError(f"overlong is {self.overlong!r}: must be error, truncate, split or drop")
        if not 0 <= self.seed < 1 << 62:
            raise ValueError(f"seed is {self.seed}: must be from 0 to 2**62 - 1")
        if self.longest > self.tokens_per_step:
            raise ValueError(
                f"max_document is {self.longest}: must not be over tokens_per_step, {self.tokens_per_step}"
            )
        if self.delay is not None:
            self.delay.check(self.longest, self.tokens_per_step)
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}: must be one of {', '.join(get_args(Mode))}")
        self._check_shape()

    def _check_shape(self) -> None:
        known = get_args(TokenField)
        if len(set(self.fields) & set(known)) < len(self.fields):
            raise ValueError(f"fields is {list(self.fields)}: must be of {', '.join(known)}, each at most once")
        if self.pad_to is not None and self.capacity % self.pad_to:
            raise ValueError(
                f"pad_to is {self.pad_to}: the capacity, {self.capacity}, must be a multiple of it, or full batches "
                "would be padded to more than that"
            )

    def padded(self, tokens: int) -> int:
        """Rows of a batch of so many tokens, padding included: with `pad_to` at least that many."""
        return tokens if self.pad_to is None else max(-(-tokens // self.pad_to), 1) * self.pad_to

    @property
    def longest(self) -> int:
        """`max_document`, resolved."""
        return min(self.capacity, self.tokens_per_step) if self.max_document is None else self.max_document

    @property
    def mesh(self) -> Mesh:
        """What steps are planned for."""
        return Mesh(ranks=self.ranks, capacity=self.capacity, mode=self.mode, ranks_per_node=self.ranks_per_node)

    def check_mesh(self) -> None:
        """Raises ValueError where the ranks together can not hold a document of `max_document` tokens."""
        if self.longest > (most := largest_document(self.ranks, self.capacity)):
            raise ValueError(
                f"max_document is {self.longest}: {self.ranks} ranks of {self.capacity} tokens hold {most}; "
                "use more ranks, a larger capacity or a smaller max_document"
            )

    def order(self) -> dict[str, Any]:
        """What decides the global batches besides the data and the state; a resumed run must have the same."""
        return {
            "tokens_per_step": self.tokens_per_step,
            "max_document": self.longest,
            "overlong": self.overlong,
            "shuffle": self.shuffle,
            "delay": self.delay and {"thresholds": list(self.delay.thresholds), "release": self.delay.release},
        }

    def to_json(self) -> bytes:
        return _ADAPTER.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> LoaderSettings:
        """Raises pydantic's ValidationError (a ValueError) naming each bad field."""
        return _ADAPTER.validate_json(text)

    def resolved(self) -> LoaderSettings:
        """The same with an absolute data folder, so that a process in another working folder finds it."""
        return _ADAPTER.validate_python(_ADAPTER.dump_python(self) | {"data": str(Path(self.data).resolve())})


_ADAPTER = TypeAdapter(LoaderSettings)


def make_settings(fields: dict[str, Any]) -> LoaderSettings:
    """Settings from values whose types nobody checked yet. Raises ValueError naming each bad field."""
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError as error:
        raise ValueError(explain(error)) from error
