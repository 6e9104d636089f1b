"""`seqmesh prepare`: documents in, a tokenised shard set out.

The set's bytes depend on the inputs and the options that change tokens or shards; workers, engine, time and place do
not matter. The input is cut into units, workers encode them, and this process takes what they made in order. A text of
white space only, or one that gives no token, is empty: it is counted and left out. documents_in = documents_out +
empty + refused + what each filter left out.

Memory: this process holds twice a shard's ids, and of each worker AHEAD units (`seqmesh.tools.units.crew`) of
UNIT_BYTES and their tokens; a worker holds one unit, its texts and tokens, or one document where that is larger. Where
duplicates are removed, about 110 bytes a document come on top.

A run that ends early, in whatever way, leaves its finished shards and a journal of them. The same command then goes on
after the last of them, also in the middle of an input file, and ends with the same bytes.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash
from rich.console import Console

from seqmesh.loader.files import atomic_write
from seqmesh.loader.manifest import FileEntry
from seqmesh.tools import journal
from seqmesh.tools.chat.template import CHATML, ChatTemplate, load_template
from seqmesh.tools.claim import TOKENIZER_NAME, claimed
from seqmesh.tools.documents import read_records
from seqmesh.tools.ingest import Ingest, Tally, sample
from seqmesh.tools.inputs import STDIN, InputFile, find_files, without_output
from seqmesh.tools.journal import Header, Mark, Recipe
from seqmesh.tools.output import check_folders
from seqmesh.tools.prepare_report import PrepareReport, Progress, progress_display
from seqmesh.tools.prepared.show import print_report
from seqmesh.tools.quarantine import OnError, Refusals, refusals
from seqmesh.tools.reading.stdin import spooled
from seqmesh.tools.records import LONGEST_RECORD, BadRecord, Columns, Cursor
from seqmesh.tools.resume import Position, position_of, unfinished
from seqmesh.tools.shard_writer import DEFAULT_SHARD_TOKENS, ShardWriter
from seqmesh.tools.tokenizers.engine import Engine
from seqmesh.tools.tokenizers.engines import ENGINES, EngineName, choose_engine
from seqmesh.tools.tokenizers.file import AUTO, NONE, TokenizerFile, load_tokenizer, parse_tokenizer
from seqmesh.tools.tokenizers.training import END_OF_DOCUMENT, TRAIN_BYTES, train_size, train_tokenizer
from seqmesh.tools.units.clock import Clock
from seqmesh.tools.units.crew import Crew, Encode, Job, workers_for
from seqmesh.tools.units.cut import records_of, units
from seqmesh.tools.units.encoder import Encoder
from seqmesh.tools.units.filters import Filters
from seqmesh.tools.units.seen import Seen, remember

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


def _ignore(_: object) -> None:
    """For callers that want no notices."""


def prepare(
    options: PrepareOptions,
    *,
    say: Callable[[str], None] = _ignore,
    progress: Callable[[Progress], None] = _ignore,
) -> PrepareReport:
    """Make the set. `say` gets one-line notices, `progress` an update after every unit.

    Several workers import the calling program's main module anew, which must therefore do nothing on import. Raises
    ValueError or OSError with a sentence for the user; the output folder then has no manifest, and the same
    command goes on from its last finished shard.
    """
    with _stdin(options, say) as stdin:
        files = without_output(find_files(options.inputs, stdin=stdin), options.out, options.inputs)
        return _prepare(options, files, say, progress)


@contextmanager
def _stdin(options: PrepareOptions, say: Callable[[str], None]) -> Iterator[InputFile | None]:
    """Standard input as a file, where it is one of the inputs."""
    if STDIN not in options.inputs:
        yield None
        return
    say(f"reading standard input to the disk of {options.out.parent}")
    with spooled(sys.stdin.buffer, options.out.parent) as file:
        yield file


def _prepare(
    options: PrepareOptions,
    files: Sequence[InputFile],
    say: Callable[[str], None],
    progress: Callable[[Progress], None],
) -> PrepareReport:
    out = options.out
    given = _given_tokenizer(options)
    with claimed(out, fingerprint=given.fingerprint if given else None):
        tokenizer, position = _begin(options, files, given, say)
        started = time.perf_counter()
        source = units(files, columns=options.columns, start=position.next, longest=options.longest_record)
        first = next(source, None)
        choice = choose_engine(tokenizer, sample(records_of(first)) if first else (), options.engine)
        say(f"engine: {choice.engine.name} ({choice.reason})")
        writer = _writer(options, tokenizer, position)
        tally, resumed_tokens = position.tally, position.tally.tokens
        with (
            refusals(out, options.on_error, start=position.quarantine) as refused,
            _encoding(options, files, tokenizer, choice.engine) as (encode, workers),
        ):
            ingest = Ingest(
                tokenizer=tokenizer,
                writer=writer,
                refuse=refused.refuse,
                on_shard=_recorder(options, writer, tally, refused),
                seen=Seen(position.hashes) if options.dedup else None,
                max_tokens=options.max_tokens,
                tally=tally,
            )
            clock = Clock(sum(file.size for file in files), options.max_tokens, resumed_tokens)
            for unit, encoded in encode(itertools.chain([first] if first else [], source)):
                done = ingest.add(unit, encoded)
                progress(clock.progress(tally, unit.position))
                if done:
                    break
        writer.counts.update(tally.counts())
        manifest = writer.finish()
        journal.remove(out)
    return PrepareReport(
        manifest=manifest,
        engine=choice.engine.name,
        engine_reason=choice.reason,
        source_documents=dict(tally.source_documents),
        source_tokens=dict(tally.source_tokens),
        seconds=time.perf_counter() - started,
        resumed_tokens=resumed_tokens,
        workers=workers,
        stages=dict(ingest.stages),
    )


def run(
    options: PrepareOptions,
    *,
    json_file: Path | None = None,
    html: Path | None = None,
    console: Console | None = None,
) -> PrepareReport:
    """The whole command: prepare with progress on the console, then a table of what came out, which is also written to
    `json_file` and `html` where they are given."""
    check_folders(json_file, html)
    console = console or Console()
    with progress_display(console) as progress:
        report = prepare(
            options, say=lambda message: console.print(message, markup=False, highlight=False), progress=progress
        )
    print_report(console, report, options.out, json_file=json_file, html=html)
    return report


def _given_tokenizer(options: PrepareOptions) -> TokenizerFile | None:
    """The tokenizer that the options name, None where one is to be trained."""
    if train_size(options.tokenizer) is not None:
        return None
    path = Path(options.tokenizer)
    return load_tokenizer(path, pattern=options.pattern, special=options.special, **_marks(options))


def _marks(options: PrepareOptions) -> dict[str, Any]:
    """What the options say about special tokens."""
    return {
        "eod_token": options.eod_token,
        "bod_token": options.bod_token,
        "parse_special": options.parse_special,
    }


def _begin(
    options: PrepareOptions, files: Sequence[InputFile], given: TokenizerFile | None, say: Callable[[str], None]
) -> tuple[TokenizerFile, Position]:
    """Find out where to begin, and write down from what the set is made before anything of it is made."""
    out = options.out
    recipe = _recipe(options, files, given)
    found = unfinished(out, recipe, options.on_error, say)
    header, marks = found or (None, [])
    tokenizer = given or _trained(files, options, header, say)
    if header and marks and header.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{out / TOKENIZER_NAME}, which the shards in {out} were made with, is lost, and training does not give it "
            "again: put it back, or delete the folder to start over"
        )
    position = position_of(out, marks, say)
    if position.marks:
        where = _where(files, position.next)
        say(f"continuing after {len(position.marks)} shards of {position.tally.tokens:,} tokens, at {where}")
    journal.begin(out, Header(recipe=recipe, fingerprint=tokenizer.fingerprint), position.marks)
    atomic_write(out / tokenizer.name, tokenizer.data)
    return tokenizer, position


def _recipe(options: PrepareOptions, files: Sequence[InputFile], given: TokenizerFile | None) -> Recipe:
    trained_end = {AUTO: END_OF_DOCUMENT, NONE: None}.get(options.eod_token, options.eod_token)
    trained_begin = {AUTO: None, NONE: None}.get(options.bod_token, options.bod_token)
    return Recipe(
        tokenizer=xxhash.xxh3_128_hexdigest(given.data) if given else options.tokenizer,
        eod_token=given.eod_token if given else trained_end,
        bod_token=given.bod_token if given else trained_begin,
        parse_special=options.parse_special,
        shard_tokens=options.shard_tokens,
        max_tokens=options.max_tokens,
        text_column=options.text_column,
        id_column=options.id_column,
        source_column=options.source_column,
        keep=options.keep,
        chat_column=options.chat_column,
        chat_template=template.fingerprint if (template := options.template) else None,
        min_tokens=options.min_tokens,
        max_document_tokens=options.max_document_tokens,
        dedup=options.dedup,
        sample=options.sample,
        seed=options.seed if options.sample is not None else None,
        inputs=journal.input_marks(files),
    )


def _where(files: Sequence[InputFile], cursor: Cursor) -> str:
    file = files[cursor.file]
    return f"{file.shown}, {'row' if file.has_rows else 'line'} {cursor.record + (not file.has_rows)}"


def _trained(
    files: Sequence[InputFile], options: PrepareOptions, header: Header | None, say: Callable[[str], None]
) -> TokenizerFile:
    """The tokenizer that an unfinished run had trained, where it is still whole; else a new one."""
    saved = options.out / TOKENIZER_NAME
    if header and saved.is_file():
        with suppress(ValueError):  # damaged
            tokenizer = load_tokenizer(saved, **_marks(options))
            if tokenizer.fingerprint == header.fingerprint:
                return tokenizer
    size = train_size(options.tokenizer)
    assert size is not None
    say(f"training a tokenizer of {size} entries on the first {TRAIN_BYTES >> 20} MiB of text")
    data = train_tokenizer(_training_texts(files, options), size)
    return parse_tokenizer(data, name="the trained tokenizer", **_marks(options))


def _training_texts(files: Sequence[InputFile], options: PrepareOptions) -> Iterator[str]:
    """Texts in input order until TRAIN_BYTES are reached."""
    used = 0
    for record in read_records(files, columns=options.columns, longest=options.longest_record):
        if isinstance(record, BadRecord):
            if options.on_error == "stop":
                raise ValueError(record.sentence())
            continue
        yield record.text
        used += record.size
        if used >= TRAIN_BYTES:
            return


def _writer(options: PrepareOptions, tokenizer: TokenizerFile, position: Position) -> ShardWriter:
    return ShardWriter(
        options.out,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        eod_id=tokenizer.eod_id,
        bod_id=tokenizer.bod_id,
        shard_tokens=options.shard_tokens,
        finished=position.finished,
    )


@contextmanager
def _encoding(
    options: PrepareOptions, files: Sequence[InputFile], tokenizer: TokenizerFile, engine: Engine
) -> Iterator[tuple[Encode, int]]:
    """What encodes units, and how many processes: this one, or several others until the block ends."""
    template = options.template
    job = Job(tokenizer=tokenizer, engine=engine.name, filters=options.filters, template=template)
    if options.on == "ray":
        from seqmesh.tools.units.ray_crew import ray_crew

        with ray_crew(job, files, workers=options.workers, address=options.ray_address) as cluster:
            yield cluster.encode, cluster.workers
        return
    workers = workers_for(files, options.workers)
    if workers == 1:
        encoder = Encoder(tokenizer, engine, options.filters, template)
        yield lambda source: ((unit, encoder.encode(unit)) for unit in source), workers
        return
    with Crew(job, workers) as crew:
        yield crew.encode, workers


def _recorder(
    options: PrepareOptions, writer: ShardWriter, tally: Tally, refused: Refusals
) -> Callable[[FileEntry, Cursor, bytes], None]:
    """What to do with every finished shard: record it, once all that the record speaks of is on the disk."""
    known = len(writer.sources)

    def record(shard: FileEntry, next: Cursor, hashes: bytes) -> None:
        nonlocal known
        mark = Mark(
            shard=shard,
            next=next,
            documents_in=tally.documents_in,
            empty=tally.empty,
            refused=tally.refused,
            filtered=dict(tally.filtered),
            text_bytes=tally.text_bytes,
            quarantine=refused.sync(),
            sources=writer.sources[known:],
            texts=remember(options.out, hashes) if options.dedup else "",
        )
        known = len(writer.sources)
        journal.append(options.out, mark)

    return record
