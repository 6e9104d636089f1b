"""The command `seqmesh prepare`: its options. The work is `seqmesh.tools.prepare`, imported when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Engine = Literal["auto", "quicktok", "tiktoken", "tokenizers", "sentencepiece"]
Where = Literal["local", "ray"]
OnError = Literal["stop", "skip"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(prepare)


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="JSONL, Parquet or Arrow files, saved datasets, folders, patterns, URLs, - (standard input)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the shard set: new, or of an interrupted run to continue.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="A tokenizer.json, tiktoken's ranks, a SentencePiece model, or train:VOCAB to train one on the input."
        ),
    ],
    engine: Annotated[Engine, typer.Option(help="auto takes the fastest that is proved equal.")] = "auto",
    eod_token: Annotated[str, typer.Option(help="Special token after each document: its text, auto or none.")] = "auto",
    bod_token: Annotated[
        str, typer.Option(help="The same before each document; auto is what the tokenizer's own template has there.")
    ] = "none",
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Text that spells a special token gives that token.")
    ] = False,
    pattern: Annotated[
        str | None,
        typer.Option(help="tiktoken's ranks: how text is split (gpt2, cl100k, o200k, llama3 or a regular expression)."),
    ] = None,
    special: Annotated[
        list[str] | None,
        typer.Option(help="tiktoken's ranks: a special token as TOKEN=ID (default: the pattern's); may be repeated."),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a shard.")] = 1 << 25,
    shuffle_seed: Annotated[
        int | None,
        typer.Option(
            help="Draws the order inside each shard, for readers that go in order; the loader shuffles globally anyway."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens.")] = None,
    on_error: Annotated[OnError, typer.Option(help="Bad records: stop, or skip into quarantine.jsonl.")] = "stop",
    text_column: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    id_column: Annotated[str, typer.Option(help="The one with the name of a document.")] = "id",
    source_column: Annotated[str, typer.Option(help="The one with its source.")] = "source",
    keep: Annotated[list[str] | None, typer.Option(help="One to carry along as metadata; may be repeated.")] = None,
    chat_column: Annotated[str | None, typer.Option(help="The one with a conversation, instead of a text.")] = None,
    chat_template: Annotated[str, typer.Option(help="chatml, tokenizer (its own) or a file in Jinja.")] = "chatml",
    longest_record: Annotated[int, typer.Option(help="Most bytes of a line or text.")] = 1 << 28,
    min_tokens: Annotated[int | None, typer.Option(help="Leave shorter documents out.")] = None,
    max_document_tokens: Annotated[int | None, typer.Option(help="Leave longer documents out.")] = None,
    dedup: Annotated[bool, typer.Option("--dedup", help="Keep the first of documents with equal texts.")] = False,
    sample: Annotated[float | None, typer.Option(help="Take this share of the documents.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes (default: one a core).")] = None,
    on: Annotated[Where, typer.Option(help="Whose processes: this machine's, or those of a Ray cluster.")] = "local",
    ray_address: Annotated[
        str, typer.Option(help="--on ray: of the cluster; auto: the one that this machine is in.")
    ] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write it as a page to this file.")] = None,
) -> None:
    """Turn text into a shard set: tokenised, checked, with a manifest. Interrupted, the same command goes on where it
    stopped."""
    from seqmesh.tools import prepare as command

    options = command.PrepareOptions(
        inputs=tuple(inputs),
        out=out,
        tokenizer=tokenizer,
        engine=engine,
        eod_token=eod_token,
        bod_token=bod_token,
        parse_special=parse_special,
        pattern=pattern,
        special=tuple(special or ()),
        shard_tokens=shard_tokens,
        shuffle_seed=shuffle_seed,
        max_tokens=max_tokens,
        on_error=on_error,
        text_column=text_column,
        id_column=id_column,
        source_column=source_column,
        keep=tuple(keep or ()),
        chat_column=chat_column,
        chat_template=chat_template,
        longest_record=longest_record,
        min_tokens=min_tokens,
        max_document_tokens=max_document_tokens,
        dedup=dedup,
        sample=sample,
        seed=seed,
        workers=workers,
        on=on,
        ray_address=ray_address,
    )
    command.run(options, json_file=json_file, html=html)
