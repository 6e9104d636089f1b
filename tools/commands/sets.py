"""The commands on finished sets: inspect, verify, merge, append, split, reshard, convert, cat. The work of each is a
module of its own, most of them in `seqmesh.tools.sets`, imported when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Format = Literal["seqmesh", "megatron", "parquet", "huggingface"]

Out = Annotated[Path, typer.Argument(help="A new folder.")]
ShardTokens = Annotated[int, typer.Option(help="Tokens of a shard.")]
Column = Annotated[str, typer.Option(help="Of the ids in Parquet and Hugging Face data.")]
VocabSize = Annotated[int | None, typer.Option(help="Of data that does not say it: ids are below it.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (inspect, verify, merge, append, split, reshard, convert, cat):
        app.command()(command)


def inspect(
    folder: Annotated[Path, typer.Argument(help="A shard set.")],
    show: Annotated[int | None, typer.Option(help="Print this document (a row number) as text instead.")] = None,
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle", help="Say instead how well shuffles mix it, and which files they need at a time."),
    ] = False,
    window: Annotated[
        list[int] | None, typer.Option(help="--shuffle: files of a shuffle by blocks; may be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="--shuffle: of the order of documents (default: 0).")] = None,
    epoch: Annotated[int | None, typer.Option(help="--shuffle: the epoch of that order (default: 0).")] = None,
) -> None:
    """Say what a shard set holds: rows, tokens, lengths, sources."""
    from seqmesh.tools import inspect_set

    inspect_set.run(folder=folder, show=show, shuffle=shuffle, windows=tuple(window or ()), seed=seed, epoch=epoch)


def verify(folder: Annotated[Path, typer.Argument(help="A shard set, or a checkpoint.")]) -> None:
    """Read a whole shard set, or a checkpoint, and list everything in it that is not as it should be."""
    from seqmesh.tools import verify as command

    command.run(folder=folder)


def merge(
    out: Out, sets: Annotated[list[str], typer.Argument(help="Shard sets, folders or URLs, in this order.")]
) -> None:
    """Make one shard set of several of the same tokenizer; shards that stay as they are are linked."""
    from seqmesh.tools.sets import merge as command

    command.run(out=out, data=sets)


def append(
    folder: Annotated[Path, typer.Argument(help="The shard set that grows.")],
    sets: Annotated[list[str], typer.Argument(help="Shard sets, folders or URLs, in this order.")],
) -> None:
    """Add the shards of other sets to a shard set. Interrupted, it is as it was."""
    from seqmesh.tools.sets import append as command

    command.run(folder=folder, data=sets)


def split(
    data: Annotated[str, typer.Argument(help="A shard set, a folder or URL.")],
    outs: Annotated[list[str], typer.Argument(help="OUT=SHARE of each new set; with --by-source a folder for all.")],
    seed: Annotated[int | None, typer.Option(help="Of the choice of documents (default: 0).")] = None,
    every: Annotated[bool, typer.Option("--every", help="Take documents at even distances; draw none.")] = False,
    by_source: Annotated[bool, typer.Option("--by-source", help="Make a set of each source's documents.")] = False,
    shard_tokens: ShardTokens = 1 << 25,
) -> None:
    """Divide the documents of a shard set over new ones, by shares (train=0.99 valid=0.01) or by source."""
    from seqmesh.tools.sets import split as command

    command.run(data=data, outs=outs, seed=seed, every=every, by_source=by_source, shard_tokens=shard_tokens)


def reshard(
    data: Annotated[str, typer.Argument(help="A shard set, a folder or URL.")],
    out: Out,
    shard_tokens: ShardTokens,
    shuffle_seed: Annotated[
        int | None, typer.Option(help="Put the documents in the order that this seed draws (default: as they are).")
    ] = None,
) -> None:
    """Cut a shard set into shards of another size, in its order or a drawn one."""
    from seqmesh.tools.sets import reshard as command

    command.run(data=data, out=out, shard_tokens=shard_tokens, shuffle_seed=shuffle_seed)


def convert(
    data: Annotated[str, typer.Argument(help="Folder or URL: a shard set, Parquet, Hugging Face or Megatron data.")],
    out: Out,
    to: Annotated[Format, typer.Option(help="The format to make.")],
    vocab_size: VocabSize = None,
    column: Column = "input_ids",
    tokenizer: Annotated[
        Path | None, typer.Option(help="To a shard set: the tokenizer that made the ids, which the set then knows.")
    ] = None,
    eod_token: Annotated[str, typer.Option(help="--tokenizer: the token that ends documents, auto or none.")] = "auto",
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a file; Megatron data is one.")] = 1 << 25,
) -> None:
    """Write the documents of a set in another format; says what that does not hold."""
    from seqmesh.tools.sets import convert as command

    options = command.ConvertOptions(
        to=to, column=column, vocab_size=vocab_size, tokenizer=tokenizer, eod_token=eod_token, shard_tokens=shard_tokens
    )
    command.run(data=data, out=out, options=options)


def cat(
    data: Annotated[str, typer.Argument(help="Folder or URL of a set; only shard sets can be shown as text.")],
    doc_ids: Annotated[list[str] | None, typer.Argument(help="Documents by id (default: all).")] = None,
    row: Annotated[list[int] | None, typer.Option(help="A document by its number; may be repeated.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids, no text.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON lines, which prepare reads.")] = False,
    limit: Annotated[int | None, typer.Option(help="Most documents (default: no limit).")] = None,
    vocab_size: VocabSize = None,
    column: Column = "input_ids",
) -> None:
    """Print documents as text, token ids or JSON lines: all of a set, or those of some ids or rows."""
    from seqmesh.tools.sets import cat as command

    options = command.CatOptions(
        doc_ids=tuple(doc_ids or ()),
        rows=tuple(row or ()),
        ids=ids,
        json=json,
        limit=limit,
        vocab_size=vocab_size,
        column=column,
    )
    command.run(data=data, options=options)
