"""`seqmesh convert`: documents of one format to another: shard sets, Parquet, Hugging Face, Megatron.

The loader finds out what the input is, so everything that it reads can be converted, at a folder or URL. Ids of
documents, sources and supervised spans go along where the new format holds them; what is lost is said. A shard set
holds no empty documents: they are left out and counted. The output is a folder; a Megatron dataset is called
`text_document` in it. The tokenizer of a shard set lies beside the data in every format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console

from seqmesh.loader.catalog import COLUMN, FormatName, Reading
from seqmesh.loader.files import atomic_write
from seqmesh.tools.claim import TOKENIZER_NAME
from seqmesh.tools.sets.blocks import Block, add_block
from seqmesh.tools.sets.carry import copy_tokenizer
from seqmesh.tools.sets.folder import new_folder
from seqmesh.tools.sets.losses import has_spans, losses
from seqmesh.tools.sets.megatron import MegatronWriter
from seqmesh.tools.sets.progress import Say, Share, ignore, progress_on, said_on
from seqmesh.tools.sets.reading import InputSet
from seqmesh.tools.sets.tables import TableWriter
from seqmesh.tools.shard_writer import DEFAULT_SHARD_TOKENS, ShardWriter

Add = Callable[[Block], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """column, vocab_size: of an input that does not say them. tokenizer: file of the one that made the ids, which a
    shard set is to know; its vocabulary counts then. eod_token: the token that ends documents in it. shard_tokens: of
    a file of the output, Megatron's left out."""

    to: FormatName
    column: str = COLUMN
    vocab_size: int | None = None
    tokenizer: Path | None = None
    eod_token: str = "auto"
    shard_tokens: int = DEFAULT_SHARD_TOKENS


def convert_set(
    data: str, out: Path, options: ConvertOptions, *, say: Say = ignore, progress: Share = ignore
) -> tuple[int, int]:
    """Returns how many documents and tokens were written. say: hears what the new format does not hold. Raises
    FileNotFoundError where there is no data, ValueError for an option that is missing or unfit, ShardError for damaged
    data, FileExistsError where `out` exists."""
    if options.to not in get_args(FormatName):
        raise ValueError(f"to is {options.to!r}: must be one of {', '.join(get_args(FormatName))}")
    if options.tokenizer is not None and options.to != "seqmesh":
        raise ValueError("tokenizer is set: it is for a conversion to a shard set")
    facts = _facts(options)
    given = InputSet(data, Reading(column=options.column, vocab_size=facts.vocab_size))
    if given.catalog.format == options.to:
        raise ValueError(f"{data} is {options.to} data already; seqmesh reshard changes the size of a set's shards")
    documents, tokens, total = 0, 0, max(given.tokens, 1)
    for lost in losses(given, options.to):
        say(lost)
    with new_folder(out, inputs=[data]) as folder, _writing(given, folder, options, facts) as add:
        for block in given.blocks():
            kept = block.chosen(block.lengths > 0) if options.to == "seqmesh" else block
            add(kept)
            documents, tokens = documents + len(kept), tokens + int(kept.lengths.sum())
            progress(tokens / total)
        _put_tokenizer(given, facts, folder)
    if documents < len(given):
        say(f"left out: {len(given) - documents:,} empty documents; a shard set holds none")
    return documents, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What a shard set is to know of its ids; name, data: of the tokenizer's file."""

    vocab_size: int | None
    tokenizer: str = "none"
    eod_id: int | None = None
    name: str = TOKENIZER_NAME
    data: bytes | None = None


def _facts(options: ConvertOptions) -> _Facts:
    if options.tokenizer is None:
        return _Facts(vocab_size=options.vocab_size)
    from seqmesh.tools.tokenizers.file import load_tokenizer  # slow to import

    file = load_tokenizer(options.tokenizer, eod_token=options.eod_token)
    if options.vocab_size not in (None, file.vocab_size):
        raise ValueError(f"vocab_size is {options.vocab_size}: {options.tokenizer} has {file.vocab_size} entries")
    return _Facts(
        vocab_size=file.vocab_size, tokenizer=file.fingerprint, eod_id=file.eod_id, name=file.name, data=file.data
    )


@contextmanager
def _writing(given: InputSet, folder: Path, options: ConvertOptions, facts: _Facts) -> Iterator[Add]:
    """What takes the documents in the new format."""
    vocab_size = given.catalog.vocab_size
    if options.to == "seqmesh":
        with ShardWriter(
            folder,
            vocab_size=vocab_size,
            tokenizer=facts.tokenizer,
            eod_id=facts.eod_id,
            shard_tokens=options.shard_tokens,
        ) as writer:
            empty = int((given.catalog.lengths == 0).sum())
            writer.counts.update({"documents_in": len(given), "empty": empty, "refused": 0})
            yield lambda block: add_block(writer, block, given.catalog.sources)
    elif options.to == "megatron":
        with MegatronWriter(folder, vocab_size) as megatron:
            yield megatron.add
    else:
        with TableWriter(
            folder,
            _table_kind(options.to),
            sources=given.catalog.sources,
            vocab_size=vocab_size,
            with_targets=_has_targets(given),
            file_tokens=options.shard_tokens,
            fingerprint=given.catalog.fingerprint,
        ) as table:
            yield table.add


def _table_kind(to: FormatName) -> Literal["parquet", "huggingface"]:
    return "parquet" if to == "parquet" else "huggingface"


def _has_targets(given: InputSet) -> bool:
    """Whether the spans of any document say something: those that hold all of it are as good as none."""
    catalog = given.catalog
    if has_spans(given):
        return True
    first = next((number for number, part in enumerate(catalog.parts) if part.rows), None)
    return first is not None and any(block.targets is not None for block in given.part(first, checked=False))


def _put_tokenizer(given: InputSet, facts: _Facts, folder: Path) -> None:
    if facts.data is not None:
        atomic_write(folder / facts.name, facts.data)
    elif given.catalog.format == "seqmesh":
        copy_tokenizer([given], folder)


def run(*, data: str, out: Path, options: ConvertOptions, console: Console | None = None) -> None:
    """The whole command."""
    console = console or Console()
    with progress_on(console, "converting", "tokens written") as progress:
        documents, tokens = convert_set(data, out, options, say=said_on(console), progress=progress)
    said_on(console)(f"{out}: {documents:,} documents, {tokens:,} tokens as {options.to}")
