"""`seqmesh prepare`: documents in, a tokenised shard set out.

The set's bytes depend on the inputs and the options that change tokens or shards; workers, engine, time and place do
not matter. The input is cut into units, workers encode them, and this process takes what they made in order. A text of
white space only, or one that gives no token, is empty: it is counted and left out. documents_in = documents_out +
empty + refused + what each filter left out.

Memory: this process holds a shard's ids (twice where their order is drawn), and of each worker AHEAD units
(`seqmesh.tools.units.crew`) of UNIT_BYTES and their tokens; a worker holds one unit, its texts and tokens, or one
document where that is larger. Where duplicates are removed, about 110 bytes a document come on top.

A run that ends early, in whatever way, leaves its finished shards and a journal of them. The same command then goes on
after the last of them, also in the middle of an input file, and ends with the same bytes.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from seqmesh.loader.manifest import FileEntry
from seqmesh.tools import journal
from seqmesh.tools.claim import claimed
from seqmesh.tools.ingest import Ingest, Tally, sample
from seqmesh.tools.inputs import STDIN, InputFile, find_files, without_output
from seqmesh.tools.journal import Mark
from seqmesh.tools.output import check_folders
from seqmesh.tools.prepare_report import PrepareReport, Progress, progress_display
from seqmesh.tools.prepared.show import print_report
from seqmesh.tools.preparing.begin import begin
from seqmesh.tools.preparing.options import PrepareOptions
from seqmesh.tools.preparing.tokenizer import given_tokenizer
from seqmesh.tools.quarantine import Refusals, refusals
from seqmesh.tools.reading.stdin import spooled
from seqmesh.tools.records import Cursor
from seqmesh.tools.resume import Position
from seqmesh.tools.shard_writer import ShardWriter
from seqmesh.tools.tokenizers.engine import Engine
from seqmesh.tools.tokenizers.engines import choose_engine
from seqmesh.tools.tokenizers.file import TokenizerFile
from seqmesh.tools.tokenizers.fingerprint import recorded
from seqmesh.tools.units.clock import Clock
from seqmesh.tools.units.crew import Crew, Encode, Job, workers_for
from seqmesh.tools.units.cut import records_of, units
from seqmesh.tools.units.encoder import Encoder
from seqmesh.tools.units.seen import Seen, remember

__all__ = ["PrepareOptions", "prepare", "run"]


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
    given = given_tokenizer(options)
    with claimed(out, fingerprint=recorded(given.fingerprint, options.template) if given else None):
        tokenizer, position = begin(options, files, given, say)
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
        seconds=time.perf_counter() - started,
        resumed_tokens=resumed_tokens,
        workers=workers,
        stages=dict(ingest.stages),
        left_out={source: dict(counts) for source, counts in tally.left_out.items()},
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


def _writer(options: PrepareOptions, tokenizer: TokenizerFile, position: Position) -> ShardWriter:
    return ShardWriter(
        options.out,
        vocab_size=tokenizer.vocab_size,
        tokenizer=recorded(tokenizer.fingerprint, options.template),
        eod_id=tokenizer.eod_id,
        bod_id=tokenizer.bod_id,
        shard_tokens=options.shard_tokens,
        shuffle_seed=options.shuffle_seed,
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
    known, counted = len(writer.sources), _copied(tally.left_out)

    def record(shard: FileEntry, next: Cursor, hashes: bytes) -> None:
        nonlocal known, counted
        mark = Mark(
            shard=shard,
            next=next,
            left_out=_since(counted, tally.left_out),
            text_bytes=tally.text_bytes,
            quarantine=refused.sync(),
            sources=writer.sources[known:],
            texts=remember(options.out, hashes) if options.dedup else "",
        )
        known, counted = len(writer.sources), _copied(tally.left_out)
        journal.append(options.out, mark)

    return record


def _copied(left_out: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {source: counts.copy() for source, counts in left_out.items()}


def _since(before: Mapping[str, Counter[str]], now: Mapping[str, Counter[str]]) -> dict[str, dict[str, int]]:
    """What was added, without sources to which nothing was."""
    grown = {source: counts - before.get(source, Counter()) for source, counts in now.items()}
    return {source: dict(counts) for source, counts in grown.items() if counts}
