"""The options of `prepare`, checked when they are made; what files hold is looked at later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from seqmesh.tools.chat.template import CHATML, ChatTemplate, load_template
from seqmesh.tools.quarantine import OnError
from seqmesh.tools.records import LONGEST_RECORD, Columns
from seqmesh.tools.shard_writer import DEFAULT_SHARD_TOKENS
from seqmesh.tools.tokenizers.engines import ENGINES, EngineName
from seqmesh.tools.tokenizers.file import AUTO, NONE
from seqmesh.tools.tokenizers.training import train_size
from seqmesh.tools.units.filters import Filters

Where = Literal["local", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What to read, how to cut it into tokens and where to put the set."""

    inputs: tuple[str, ...]  # JSONL or Parquet files, or folders, local or URLs
    out: Path
    tokenizer: str  # path of a tokenizer.json, a SentencePiece model or tiktoken's ranks, or train:VOCABULARY
    engine: EngineName = "auto"
    eod_token: str = AUTO  # special token appended to each document: its text, `auto` or `none`
    bod_token: str = NONE  # the same before each document; `auto` is what the tokenizer's own template has there
    parse_special: bool = False  # text that spells a special token gives that token
    pattern: str | None = None  # of tiktoken's ranks: gpt2, cl100k, o200k, llama3 or a regular expression
    special: tuple[str, ...] = ()  # of tiktoken's ranks: special tokens as TOKEN=ID, by default those of the pattern
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    shuffle_seed: int | None = None  # the documents of each shard in an order that it draws; None: as they are read
    max_tokens: int | None = None  # end with the document that reaches this many
    on_error: OnError = "stop"
    text_column: str = "text"  # field or column that holds the text
    id_column: str = "id"
    source_column: str = "source"
    keep: tuple[str, ...] = ()  # fields or columns that go along as metadata
    chat_column: str | None = None  # field or column that holds a conversation, which is read instead of the text
    chat_template: str = CHATML  # chatml, tokenizer, or a file in Jinja
    longest_record: int = LONGEST_RECORD  # bytes of a line or text; longer ones are refused
    min_tokens: int | None = None  # shorter documents are left out; marks count, as in all numbers of tokens
    max_document_tokens: int | None = None  # longer documents are left out
    dedup: bool = False  # of equal texts only the first is kept
    sample: float | None = None  # share of the documents to take
    seed: int = 0  # of the sample
    workers: int | None = 1  # processes that encode; 1: this one; None: one a core, as far as the input goes round
    on: Where = "local"  # whose processes encode: of this machine, or of a Ray cluster
    ray_address: str = "auto"

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("no inputs: give at least one JSONL or Parquet file, or a folder")
        if self.engine not in ENGINES:
            raise ValueError(f"engine is {self.engine!r}: must be one of {', '.join(ENGINES)}")
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}: must be stop or skip")
        if self.shard_tokens < 1:
            raise ValueError(f"shard_tokens is {self.shard_tokens}: must be at least 1")
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 1 << 63:
            raise ValueError(f"shuffle_seed is {self.shuffle_seed}: must be from 0 to 2^63 - 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: must be at least 1")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}: must be at least 1")
        if self.on not in get_args(Where):
            raise ValueError(f"on is {self.on!r}: must be local or ray")
        if self.longest_record < 1:
            raise ValueError(f"longest_record is {self.longest_record}: must be at least 1")
        if self.chat_column is None and self.chat_template != CHATML:
            raise ValueError("chat_template is for conversations: name their column with chat_column")
        _ = self.filters, self.columns
        if train_size(self.tokenizer) is not None and (self.pattern is not None or self.special):
            raise ValueError("pattern and special belong to files of tiktoken's ranks: a tokenizer is to be trained")

    @property
    def columns(self) -> Columns:
        return Columns(
            text=self.text_column, id=self.id_column, source=self.source_column, chat=self.chat_column, keep=self.keep
        )

    @property
    def template(self) -> ChatTemplate | None:
        """How conversations are written. Raises FileNotFoundError or ValueError naming the template."""
        return None if self.chat_column is None else load_template(self.chat_template, Path(self.tokenizer))

    @property
    def filters(self) -> Filters:
        return Filters(
            min_tokens=self.min_tokens,
            max_tokens=self.max_document_tokens,
            dedup=self.dedup,
            sample=self.sample,
            seed=self.seed,
        )
