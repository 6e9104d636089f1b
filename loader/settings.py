"""`LoaderSettings`: everything that decides which batches a job gets, in one frozen description.

The settings are split by what they decide: the *order* (data, seed, shuffle, tokens_per_step, ...) defines the global
batches and knows nothing of ranks; the *mesh* (ranks, capacity, cost) decides how a global batch is spread.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.catalog import COLUMN, BadShards, Reading
from seqmesh.loader.explain import explain
from seqmesh.loader.mixture import Mixture
from seqmesh.packer.cost import CostModel
from seqmesh.packer.offload import Offload, largest_offloaded_document
from seqmesh.packer.overlong import Policy
from seqmesh.packer.pieces import largest_document
from seqmesh.packer.plan import Mesh, Mode
from seqmesh.packer.rows import LARGEST_WINDOW

MAX_SETTING = 1 << 40  # far above any use, far below where 64-bit sums end

MAX_WAITING = 1 << 8  # documents that are held back at a time: their places travel with every batch

WINDOW = 1 << 16  # documents: packed, and packed again when a job resumes, in a few hundredths of a second

Overlong = Policy
TokenField = Literal["labels", "position_ids"]
Batching = Literal["tokens", "rows"]
Tail = Literal["pad", "drop"]

log = logging.getLogger("seqmesh.loader")


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
class Blocks:
    """A shuffle for data whose files are fetched one after the other: files come in a new random order in each epoch,
    and the documents of at most `window` of them at a time are mixed. Each is needed during one stretch of an epoch."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    window: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MAX_SETTING:
            raise ValueError(f"shuffle.window is {self.window}: must be at least 1, and at most {MAX_SETTING}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """data: folder or URL of a shard set, or of data in another format, see `formats.detect`. column, vocab_size and
    bad_shards: how that is read, see `catalog.Reading`. verify: compare all checksums at the start. capacity: most
    tokens of one micro-batch on one rank. mode: `free` or `waves`, ranks_per_node and stages: see `packer.plan.Mesh`; a
    rank that several processes hold together counts once. max_document: most tokens of a document, by default the
    smaller of capacity and tokens_per_step; one over the capacity is spread over ranks. `overlong` says what happens to
    longer ones (error: refuse at start; truncate: keep the beginning; split: pieces of max_document tokens become
    documents of their own; drop: leave out). epochs: passes over the data, None for no end. seed and shuffle: the order
    of documents, a new one for each epoch: True for a global shuffle, `Blocks` for a few files at a time, False for the
    order of the set; without a seed, whoever starts the loader draws one. mixture: the parts of the set's sources, None
    for one shuffle of everything. delay: long documents are held back until several come together, None for none. cost:
    what ranks are balanced by, None for tokens alone. offload: micro-batches may be over the capacity, as far as a
    share of their activations, which they name, can be moved to the host meanwhile (mode `free`, batching `tokens`);
    None for never.

    batching `tokens`: a global batch is of at most `tokens_per_step` tokens. `rows`: of `rows_per_step` rows of at most
    `capacity` tokens, packed from a window of so many documents, 65,536 by default; ranks get equally many. tail: what
    happens to the last, incomplete step of an epoch: `pad` with empty rows (the default), or `drop` its documents.

    fields: what batches hold for each token besides its id; what is left out costs nothing. pad_to: every batch is
    filled up to a multiple of so many tokens, None for not at all; the capacity gives all batches the same shape.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    data: str
    capacity: int
    tokens_per_step: int | None = None
    batching: Batching = "tokens"
    rows_per_step: int | None = None
    window: int | None = None
    tail: Tail | None = None
    ranks: int = 1
    max_document: int | None = None
    overlong: Overlong = "error"
    epochs: int | None = None
    seed: int | None = None
    shuffle: bool | Blocks = True
    mixture: Mixture | None = None
    delay: Delay | None = None
    cost: CostModel | None = None
    offload: Offload | None = None
    mode: Mode = "free"
    ranks_per_node: int | None = None
    stages: int = 1
    fields: tuple[TokenField, ...] = get_args(TokenField)
    pad_to: int | None = None
    verify: bool = False
    column: str = COLUMN
    vocab_size: int | None = None
    bad_shards: BadShards = "refuse"

    def __post_init__(self) -> None:
        for name in _SIZES:
            self._check_size(name)
        if self.overlong not in get_args(Overlong):
            raise ValueError(f"overlong is {self.overlong!r}: must be error, truncate, split or drop")
        if self.seed is not None and not 0 <= self.seed < 1 << 62:
            raise ValueError(f"seed is {self.seed}: must be from 0 to 2**62 - 1")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}: must be one of {', '.join(get_args(Mode))}")
        if not isinstance(self.shuffle, bool | Blocks):
            raise ValueError(f"shuffle is {self.shuffle!r}: must be true, false, or Blocks(window=N)")
        if self.bad_shards not in get_args(BadShards):
            raise ValueError(f"bad_shards is {self.bad_shards!r}: must be refuse or quarantine")
        if self.batching not in get_args(Batching):
            raise ValueError(f"batching is {self.batching!r}: must be one of {', '.join(get_args(Batching))}")
        if self.batching == "rows":
            self._check_rows()
        else:
            self._check_tokens()
        self._check_shape()
        if self.stages > 1 and self.mode == "waves":
            raise ValueError(f"stages is {self.stages}: needs mode 'free', 'waves' is chosen")
        if self.offload is not None:
            self._check_offload()

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not 1 <= value <= MAX_SETTING:
            raise ValueError(f"{name} is {value}: must be at least 1, and at most {MAX_SETTING}")

    def _check_tokens(self) -> None:
        if self.tokens_per_step is None:
            raise ValueError("tokens_per_step is missing: batching 'tokens' needs it")
        for name in ("rows_per_step", "window", "tail"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name} is {value}: belongs to batching 'rows', which is not chosen")
        if self.longest > self.tokens_per_step:
            raise ValueError(
                f"max_document is {self.longest}: must not be over tokens_per_step, {self.tokens_per_step}"
            )
        if self.delay is not None:
            self.delay.check(self.longest, self.tokens_per_step)
            if self.mixture is not None:
                raise ValueError("delay and mixture are both set: documents of several sources can not be held back")

    def _check_shape(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))  # a list would leave the settings without a hash
        known = get_args(TokenField)
        if len(set(self.fields) & set(known)) < len(self.fields):
            raise ValueError(f"fields is {list(self.fields)}: must be of {', '.join(known)}, each at most once")
        if self.pad_to is not None and self.capacity % self.pad_to:
            raise ValueError(
                f"pad_to is {self.pad_to}: the capacity, {self.capacity}, must be a multiple of it, or full batches "
                "would be padded to more than that"
            )

    def _check_offload(self) -> None:
        for name, unfit in (("mode", "waves"), ("batching", "rows")):
            if getattr(self, name) == unfit:
                raise ValueError(f"offload is set, {name} is {unfit!r}: micro-batches are never over the capacity then")
        if self.pad_to is not None:
            raise ValueError("offload and pad_to are both set: padding would need memory that no plan knows of")

    def padded(self, tokens: int) -> int:
        """Rows of a batch of so many tokens, padding included: with `pad_to` at least that many."""
        return tokens if self.pad_to is None else max(-(-tokens // self.pad_to), 1) * self.pad_to

    def _check_rows(self) -> None:
        if self.rows_per_step is None:
            raise ValueError("rows_per_step is missing: batching 'rows' needs it")
        for name in ("tokens_per_step", "delay"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name} is {value}: belongs to batching 'tokens', which is not chosen")
        if self.tail not in (None, *get_args(Tail)):
            raise ValueError(f"tail is {self.tail!r}: must be pad or drop")
        if not self.rows_per_step <= self.documents_per_window <= LARGEST_WINDOW:
            raise ValueError(
                f"window is {self.documents_per_window}: must be at least rows_per_step, {self.rows_per_step}, "
                f"and at most {LARGEST_WINDOW}"
            )
        if self.longest > self.capacity:
            raise ValueError(f"max_document is {self.longest}: must not be over a row's capacity, {self.capacity}")

    @property
    def longest(self) -> int:
        """`max_document`, resolved."""
        if self.max_document is not None:
            return self.max_document
        return self.capacity if self.tokens_per_step is None else min(self.capacity, self.tokens_per_step)

    @property
    def documents_per_window(self) -> int:
        """`window`, resolved."""
        return WINDOW if self.window is None else self.window

    @property
    def mesh(self) -> Mesh:
        """What steps are planned for."""
        return Mesh(
            ranks=self.ranks,
            capacity=self.capacity,
            mode=self.mode,
            ranks_per_node=self.ranks_per_node,
            stages=self.stages,
            offload=self.offload,
        )

    def check_mesh(self) -> None:
        """Raises ValueError where the ranks together can not hold a document of `max_document` tokens, or can not share
        the rows of a step evenly."""
        if self.rows_per_step is not None and self.rows_per_step % self.ranks:
            raise ValueError(
                f"rows_per_step is {self.rows_per_step}: {self.ranks} ranks can not share them evenly; "
                "use a number of ranks that divides it"
            )
        if self.longest > (most := self._largest_document()):
            offloaded = "" if self.offload is None else ", with all that can be offloaded in time"
            raise ValueError(
                f"max_document is {self.longest}: {self.ranks} ranks of {self.capacity} tokens hold {most}{offloaded}; "
                "use more ranks, a larger capacity or a smaller max_document"
            )

    def _largest_document(self) -> int:
        """The ranks hold every document of at most so many tokens; not looked for beyond `longest`."""
        if self.offload is None:
            return largest_document(self.ranks, self.capacity)
        cost = self.cost or CostModel()
        return largest_offloaded_document(self.ranks, self.capacity, cost, self.offload, self.longest)

    def order(self) -> dict[str, Any]:
        """What decides the global batches besides the data, the state and what may change under way (epochs, weights);
        a resumed run must have the same. Plain JSON."""
        return {
            "tokens_per_step": self.tokens_per_step,
            "max_document": self.longest,
            "overlong": self.overlong,
            "shuffle": {"window": self.shuffle.window} if isinstance(self.shuffle, Blocks) else self.shuffle,
            "sources": self.mixture and {n: o.overlong or self.overlong for n, o in self.mixture.sources.items()},
            "delay": self.delay and {"thresholds": list(self.delay.thresholds), "release": self.delay.release},
            **self._order_of_rows(),
        }

    def _order_of_rows(self) -> dict[str, Any]:
        if self.batching == "tokens":
            return dict.fromkeys(("rows_per_step", "window", "tail", "capacity", "cost"))
        return {
            "rows_per_step": self.rows_per_step,
            "window": self.documents_per_window,
            "tail": self.tail or "pad",
            "capacity": self.capacity,
            "cost": {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(self.cost or CostModel()).items()},
        }

    def to_json(self) -> bytes:
        return _ADAPTER.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> LoaderSettings:
        """Raises pydantic's ValidationError (a ValueError) naming each bad field."""
        return _ADAPTER.validate_json(text)

    @property
    def reading(self) -> Reading:
        """How the data is to be read."""
        return Reading(column=self.column, vocab_size=self.vocab_size, bad_shards=self.bad_shards)

    def resolved(self) -> LoaderSettings:
        """The same with an absolute data folder, so that a process in another working folder finds it, and with a seed:
        one is drawn, and logged, where none was set."""
        data, seed = self.data if "://" in self.data else str(Path(self.data).resolve()), self.seed
        if seed is None:
            seed = secrets.randbelow(1 << 62)
            log.info("seed is %d: drawn, since none was set", seed)
        return _ADAPTER.validate_python(_ADAPTER.dump_python(self) | {"data": data, "seed": seed})


_SIZES = (
    "tokens_per_step",
    "rows_per_step",
    "window",
    "capacity",
    "ranks",
    "ranks_per_node",
    "stages",
    "max_document",
    "epochs",
    "pad_to",
    "vocab_size",
)
_ADAPTER = TypeAdapter(LoaderSettings)


def make_settings(fields: dict[str, Any]) -> LoaderSettings:
    """Settings from values whose types nobody checked yet. Raises ValueError naming each bad field."""
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError as error:
        raise ValueError(explain(error)) from error
