"""`seqmesh prepare`: documents in, a tokenised shard set out.

The set's bytes depend on the inputs and the options that change tokens or shards; threads, engine, time and place do
not matter. Memory is bounded by one batch of text and one shard. A text of white space only, or one that gives no
token, is empty: it is counted and left out. documents_in = documents_out + empty + refused.

A run that ends early, in whatever way, leaves its finished shards and a journal of them. The same command then goes on
after the last of them, also in the middle of an input file, and ends with the same bytes.

Not done here: several processes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from rich.console import Console

from seqmesh.loader.files import atomic_write
from seqmesh.loader.manifest import FileEntry
from seqmesh.tools import journal
from seqmesh.tools.claim import TOKENIZER_NAME, claimed
from seqmesh.tools.documents import read_records
from seqmesh.tools.engines import ENGINES, EngineName, choose_engine
from seqmesh.tools.ingest import Ingest, Tally, batched, sample
from seqmesh.tools.inputs import InputFile, find_files
from seqmesh.tools.journal import Header, Mark, Recipe
from seqmesh.tools.prepare_report import PrepareReport, Progress, print_report, progress_display
from seqmesh.tools.quarantine import OnError, Refusals, refusals
from seqmesh.tools.records import BadRecord, Columns, Cursor
from seqmesh.tools.resume import Position, position_of, unfinished
from seqmesh.tools.shard_writer import DEFAULT_SHARD_TOKENS, ShardWriter
from seqmesh.tools.tokenizer import (
    AUTO,
    END_OF_DOCUMENT,
    NONE,
    TRAIN_BYTES,
    TokenizerFile,
    load_tokenizer,
    parse_tokenizer,
    train_size,
    train_tokenizer,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What to read, how to cut it into tokens and where to put the set."""

    inputs: tuple[str, ...]  # JSONL or Parquet files, or folders, local or URLs
    out: Path
    tokenizer: str  # path of a tokenizer.json, or train:VOCABULARY
    engine: EngineName = "auto"
    eod_token: str = AUTO  # special token appended to each document: its text, `auto` or `none`
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    max_tokens: int | None = None  # end with the document that reaches this many
    on_error: OnError = "stop"
    text_column: str = "text"  # field or column that holds the text

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
        train_size(self.tokenizer)


def _ignore(_: object) -> None:
    """For callers that want no notices."""


def prepare(
    options: PrepareOptions,
    *,
    say: Callable[[str], None] = _ignore,
    progress: Callable[[Progress], None] = _ignore,
) -> PrepareReport:
    """Make the set. `say` gets one-line notices, `progress` an update after every batch.

    Raises ValueError or OSError with a sentence for the user; the output folder then has no manifest, and the same
    command goes on from its last finished shard.
    """
    out = options.out
    files = find_files(options.inputs)
    given = _given_tokenizer(options)
    with claimed(out, fingerprint=given.fingerprint if given else None):
        tokenizer, position = _begin(options, files, given, say)
        started = time.perf_counter()
        batches = batched(read_records(files, columns=Columns(text=options.text_column), start=position.next))
        first = next(batches, [])
        choice = choose_engine(tokenizer, sample(first), options.engine)
        say(f"engine: {choice.engine.name} ({choice.reason})")
        writer = _writer(options, tokenizer, position)
        tally, resumed_tokens = position.tally, position.tally.tokens
        with refusals(out, options.on_error, start=position.quarantine) as refused:
            ingest = Ingest(
                tokenizer=tokenizer,
                engine=choice.engine,
                writer=writer,
                refuse=refused.refuse,
                on_shard=_recorder(out, writer, tally, refused),
                tally=tally,
            )
            total_bytes = sum(file.size for file in files)
            for batch in itertools.chain([first], batches):
                done = ingest.add(batch, max_tokens=options.max_tokens)
                read = batch[-1].place.position / total_bytes if batch and total_bytes else 0.0
                progress(_progress(tally, read, options.max_tokens, started, resumed_tokens))
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
    )


def run(
    *,
    inputs: Sequence[str],
    out: Path,
    tokenizer: str,
    engine: EngineName = "auto",
    eod_token: str = AUTO,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    max_tokens: int | None = None,
    on_error: OnError = "stop",
    text_column: str = "text",
    console: Console | None = None,
) -> PrepareReport:
    """The whole command: prepare with progress on the console, then a table of what came out."""
    options = PrepareOptions(
        inputs=tuple(inputs),
        out=out,
        tokenizer=tokenizer,
        engine=engine,
        eod_token=eod_token,
        shard_tokens=shard_tokens,
        max_tokens=max_tokens,
        on_error=on_error,
        text_column=text_column,
    )
    console = console or Console()
    with progress_display(console) as progress:
        report = prepare(
            options, say=lambda message: console.print(message, markup=False, highlight=False), progress=progress
        )
    print_report(console, report)
    return report


def _given_tokenizer(options: PrepareOptions) -> TokenizerFile | None:
    """The tokenizer that the options name, None where one is to be trained."""
    if train_size(options.tokenizer) is not None:
        return None
    return load_tokenizer(Path(options.tokenizer), eod_token=options.eod_token)


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
    atomic_write(out / TOKENIZER_NAME, tokenizer.data)
    return tokenizer, position


def _recipe(options: PrepareOptions, files: Sequence[InputFile], given: TokenizerFile | None) -> Recipe:
    trained_end = {AUTO: END_OF_DOCUMENT, NONE: None}.get(options.eod_token, options.eod_token)
    return Recipe(
        tokenizer=xxhash.xxh3_128_hexdigest(given.data) if given else options.tokenizer,
        eod_token=given.eod_token if given else trained_end,
        shard_tokens=options.shard_tokens,
        max_tokens=options.max_tokens,
        text_column=options.text_column,
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
            tokenizer = load_tokenizer(saved, eod_token=options.eod_token)
            if tokenizer.fingerprint == header.fingerprint:
                return tokenizer
    size = train_size(options.tokenizer)
    assert size is not None
    say(f"training a tokenizer of {size} entries on the first {TRAIN_BYTES >> 20} MiB of text")
    data = train_tokenizer(_training_texts(files, options), size)
    return parse_tokenizer(data, name="the trained tokenizer", eod_token=options.eod_token)


def _training_texts(files: Sequence[InputFile], options: PrepareOptions) -> Iterator[str]:
    """Texts in input order until TRAIN_BYTES are reached."""
    used = 0
    for record in read_records(files, columns=Columns(text=options.text_column)):
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
        shard_tokens=options.shard_tokens,
        finished=position.finished,
    )


def _recorder(out: Path, writer: ShardWriter, tally: Tally, refused: Refusals) -> Callable[[FileEntry, Cursor], None]:
    """What to do with every finished shard: record it, once all that the record speaks of is on the disk."""
    known = len(writer.sources)

    def record(shard: FileEntry, next: Cursor) -> None:
        nonlocal known
        mark = Mark(
            shard=shard,
            next=next,
            documents_in=tally.documents_in,
            empty=tally.empty,
            refused=tally.refused,
            text_bytes=tally.text_bytes,
            quarantine=refused.sync(),
            sources=writer.sources[known:],
        )
        known = len(writer.sources)
        journal.append(out, mark)

    return record


def _progress(tally: Tally, read: float, max_tokens: int | None, started: float, resumed_tokens: int) -> Progress:
    limit = tally.tokens / max_tokens if max_tokens else 0.0
    return Progress(
        documents=tally.documents_in,
        tokens=tally.tokens,
        fraction=min(max(read, limit), 1.0),
        seconds=time.perf_counter() - started,
        resumed_tokens=resumed_tokens,
    )
