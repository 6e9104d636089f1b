"""`seqmesh prepare`: documents in, a tokenised shard set out.

The set's bytes depend on the inputs and the options that change tokens or shards; threads, engine, time and place do
not matter. Memory is bounded by one batch of text and one shard. A text of white space only, or one that gives no
token, is empty: it is counted and left out. documents_in = documents_out + empty + refused.

Not done here: resuming an interrupted run (it starts over), several processes, Parquet inputs.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from seqmesh.loader.files import atomic_path, atomic_write
from seqmesh.loader.manifest import MANIFEST_NAME, read_manifest
from seqmesh.tools.documents import BadRecord, Document, InputFile, Record, find_files, read_records
from seqmesh.tools.engines import ENGINES, EngineName, choose_engine
from seqmesh.tools.ingest import Ingest, Tally
from seqmesh.tools.prepare_report import PrepareReport, Progress, print_report, progress_display
from seqmesh.tools.shard_writer import DEFAULT_SHARD_TOKENS, ShardWriter
from seqmesh.tools.tokenizer import (
    AUTO,
    TRAIN_BYTES,
    TokenizerFile,
    load_tokenizer,
    parse_tokenizer,
    train_size,
    train_tokenizer,
)

TOKENIZER_NAME = "tokenizer.json"
QUARANTINE_NAME = "quarantine.jsonl"
BATCH_BYTES = 4 << 20  # of text; a larger document is a batch of its own
BATCH_DOCUMENTS = 4096
SAMPLE_CHARACTERS = 1 << 20  # of text, on which an engine is proved

OnError = Literal["stop", "skip"]
_OURS = re.compile(r"(shard-\d+\.arrow|lengths\.arrow|tokenizer\.json|quarantine\.jsonl)(\.tmp)?|manifest\.json\.tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What to read, how to cut it into tokens and where to put the set."""

    inputs: tuple[str, ...]  # JSONL files or folders, local or URLs
    out: Path
    tokenizer: str  # path of a tokenizer.json, or train:VOCABULARY
    engine: EngineName = "auto"
    eod_token: str = AUTO  # special token appended to each document: its text, `auto` or `none`
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    max_tokens: int | None = None  # end with the document that reaches this many
    on_error: OnError = "stop"

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("no inputs: give at least one JSONL file or folder")
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

    Raises ValueError or OSError with a sentence for the user; the output folder then has no manifest.
    """
    files = find_files(options.inputs)
    size = train_size(options.tokenizer)
    if size is None:
        tokenizer = load_tokenizer(Path(options.tokenizer), eod_token=options.eod_token)
        claim_folder(options.out, fingerprint=tokenizer.fingerprint, say=say)
    else:
        claim_folder(options.out, fingerprint=None, say=say)
        tokenizer = _trained(files, size, options, say)
    started = time.perf_counter()
    batches = _batches(read_records(files))
    first = next(batches, [])
    choice = choose_engine(tokenizer, _sample(first), options.engine)
    say(f"engine: {choice.engine.name} ({choice.reason})")
    writer = ShardWriter(
        options.out,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        eod_id=tokenizer.eod_id,
        shard_tokens=options.shard_tokens,
    )
    ingest = Ingest(tokenizer=tokenizer, engine=choice.engine, writer=writer)
    total_bytes = sum(file.size for file in files)
    with writer, _refusals(options) as refuse:
        for batch in itertools.chain([first], batches):
            done = ingest.add(batch, refuse=refuse, max_tokens=options.max_tokens)
            progress(_progress(ingest.tally, batch, total_bytes, options.max_tokens, started))
            if done:
                break
        writer.counts.update(ingest.tally.counts())
        atomic_write(options.out / TOKENIZER_NAME, tokenizer.data)
    return PrepareReport(
        manifest=writer.finish(),
        engine=choice.engine.name,
        engine_reason=choice.reason,
        source_documents=dict(ingest.tally.source_documents),
        source_tokens=dict(ingest.tally.source_tokens),
        seconds=time.perf_counter() - started,
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
    )
    console = console or Console()
    with progress_display(console) as progress:
        report = prepare(
            options, say=lambda message: console.print(message, markup=False, highlight=False), progress=progress
        )
    print_report(console, report)
    return report


def claim_folder(out: Path, *, fingerprint: str | None, say: Callable[[str], None]) -> None:
    """Make `out` ours: created, or cleared of what an unfinished run left. Raises where anything else is in it.

    `fingerprint` is the tokenizer's, None where it is still to be trained; a finished set's message compares it.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file: the output must be a folder")
    if (out / MANIFEST_NAME).exists():
        raise FileExistsError(_finished_message(out, fingerprint))
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in out.iterdir())
    if not names:
        return
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign or names == [TOKENIZER_NAME]:  # a tokenizer alone is somebody's: our runs write it after the shards
        listed = ", ".join((foreign or names)[:5])
        raise FileExistsError(f"{out} holds other files ({listed}): choose a new or empty folder")
    say(f"{out} holds {len(names)} files of an unfinished run: starting over")
    for name in names:
        (out / name).unlink()


def _finished_message(out: Path, fingerprint: str | None) -> str:
    existing = read_manifest(out)
    known = {None: "", existing.tokenizer: ", made with the same tokenizer"}
    compared = known.get(fingerprint, f", made with another tokenizer ({existing.tokenizer}, now {fingerprint})")
    return (
        f"{out} already holds a finished shard set of {existing.documents} documents{compared}: "
        "delete the folder or choose another"
    )


def _trained(
    files: Sequence[InputFile], size: int, options: PrepareOptions, say: Callable[[str], None]
) -> TokenizerFile:
    say(f"training a tokenizer of {size} entries on the first {TRAIN_BYTES >> 20} MiB of text")
    data = train_tokenizer(_training_texts(files, options.on_error), size)
    return parse_tokenizer(data, name="the trained tokenizer", eod_token=options.eod_token)


def _training_texts(files: Sequence[InputFile], on_error: OnError) -> Iterator[str]:
    """Texts in input order until TRAIN_BYTES are reached."""
    used = 0
    for record in read_records(files):
        if isinstance(record, BadRecord):
            if on_error == "stop":
                raise ValueError(record.sentence())
            continue
        yield record.text
        used += record.size
        if used >= TRAIN_BYTES:
            return


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _sample(batch: Sequence[Record]) -> list[str]:
    """Texts from the start of the input, SAMPLE_CHARACTERS in all, the last one cut."""
    texts = [record.text for record in batch if isinstance(record, Document)]
    rooms = (SAMPLE_CHARACTERS - used for used in itertools.accumulate(map(len, texts), initial=0))
    return [text[:room] for text, room in zip(texts, rooms, strict=False) if room > 0]


@contextmanager
def _refusals(options: PrepareOptions) -> Iterator[Callable[[BadRecord], None]]:
    """What to do with a bad record: stop, or put it into the quarantine file, which appears when the run succeeds."""
    if options.on_error == "stop":
        yield _stop
        return
    with atomic_path(options.out / QUARANTINE_NAME) as path, path.open("w", encoding="utf-8") as file:

        def refuse(record: BadRecord) -> None:
            file.write(record.as_json() + "\n")

        yield refuse


def _stop(record: BadRecord) -> None:
    raise ValueError(f"{record.sentence()}. Mend it, or skip bad records with on-error skip")


def _progress(
    tally: Tally, batch: Sequence[Record], total_bytes: int, max_tokens: int | None, started: float
) -> Progress:
    read = batch[-1].position / total_bytes if batch and total_bytes else 0.0
    limit = tally.tokens / max_tokens if max_tokens else 0.0
    return Progress(
        documents=tally.documents_in,
        tokens=tally.tokens,
        fraction=min(max(read, limit), 1.0),
        seconds=time.perf_counter() - started,
    )
