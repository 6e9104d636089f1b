"""The `seqmesh` command: what a person types. Every command's work is a module of its own, imported when it is run, so
that `seqmesh --help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from seqmesh.tools import set_commands

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Feed and train language models on documents of very uneven lengths.",
    epilog="A first tour: seqmesh demo runs/demo",
)

USER_ERRORS = (ValueError, OSError, RuntimeError, NotImplementedError)
Engine = Literal["auto", "quicktok", "tiktoken", "tokenizers", "sentencepiece"]
Where = Literal["local", "ray"]
OnError = Literal["stop", "skip"]
Overlong = Literal["error", "truncate", "split", "drop"]
Mode = Literal["free", "waves"]
Format = Literal["safetensors", "huggingface"]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]

EXTRAS = {
    "torch": "train",
    "safetensors": "train",
    "matplotlib": "train",
    "ray": "ray",
    "jinja2": "chat",
}  # of packages, the extra


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"seqmesh {version('seqmesh')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of all commands; `main` reads --debug itself."""


@app.command()
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


@app.command()
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


@app.command()
def verify(folder: Annotated[Path, typer.Argument(help="A shard set, or a checkpoint.")]) -> None:
    """Read a whole shard set, or a checkpoint, and list everything in it that is not as it should be."""
    from seqmesh.tools import verify as command

    command.run(folder=folder)


set_commands.register(app)


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="A shard set.")],
    capacity: Annotated[int, typer.Option(help="Tokens of a bin.")],
    method: Annotated[list[str] | None, typer.Option(help="A method; may be repeated (default: all).")] = None,
    overlong: Annotated[Overlong, typer.Option(help="What happens to documents that are longer than a bin.")] = "error",
    multiple: Annotated[int, typer.Option(help="Documents are padded to a multiple of this many tokens.")] = 1,
    max_documents: Annotated[int | None, typer.Option(help="Most documents of a bin (default: no limit).")] = None,
    bins_multiple: Annotated[int, typer.Option(help="Make the number of bins a multiple of this.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of the order of documents (default: as stored).")] = None,
    epoch: Annotated[int, typer.Option(help="Each epoch of a seed has an order of its own.")] = 0,
    lookahead: Annotated[int, typer.Option(help="Documents that order_keeping sees ahead.")] = 4096,
    rows_per_step: Annotated[int | None, typer.Option(help="Say how long steps of so many bins last.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the bins of one method to this Arrow file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the table into this file (.png, .svg, .pdf).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --output.")] = False,
) -> None:
    """Compare packing methods on a shard set: bins, fill, cut tokens, attention work, balance."""
    from seqmesh.tools import pack as command

    options = command.PackOptions(
        capacity=capacity,
        overlong=overlong,
        multiple=multiple,
        max_documents=max_documents,
        bins_multiple=bins_multiple,
        seed=seed,
        epoch=epoch,
        lookahead=lookahead,
    )
    command.run(
        folder=folder,
        options=options,
        methods=tuple(method or ()),
        rows_per_step=rows_per_step,
        output=output,
        json_path=json,
        plot=plot,
        force=force,
    )


@app.command()
def plan(
    folder: Annotated[Path, typer.Argument(help="A shard set.")],
    ranks: Annotated[int, typer.Option(help="Ranks to spread a step over.")],
    capacity: Annotated[int, typer.Option(help="Most tokens of a micro-batch on one rank.")],
    tokens_per_step: Annotated[int, typer.Option(help="Most tokens of a step.")],
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks with fast links to each other (default: all).")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="waves: all ranks have equally many micro-batches.")] = "free",
    steps: Annotated[int, typer.Option(help="Steps to plan.")] = 1,
    first_step: Annotated[int, typer.Option(help="The first of them, counted from 0.")] = 0,
    max_document: Annotated[int | None, typer.Option(help="Most tokens of a document (default: the capacity).")] = None,
    overlong: Annotated[Overlong, typer.Option(help="What happens to longer documents.")] = "error",
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the order of documents.")] = 0,
    shape: Annotated[str | None, typer.Option(help="The model whose costs are balanced: 8b (the default).")] = None,
    cost: Annotated[Path | None, typer.Option(help="A JSON file with the cost model instead.")] = None,
    flops: Annotated[float | None, typer.Option(help="FLOP/s that a rank reaches: say how long steps take.")] = None,
    near: Annotated[float | None, typer.Option(help="Bytes/s into a rank from its node (default: no limit).")] = None,
    far: Annotated[float | None, typer.Option(help="Bytes/s into a rank from other nodes (default: as near).")] = None,
    launch: Annotated[float | None, typer.Option(help="Seconds that any micro-batch takes (default: 0).")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers of every step to this file, too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the first step into this file (.png, .html).")] = None,
) -> None:
    """Plan steps of a shard set: rings, micro-batches, time over the least possible, bytes sent; and draw one."""
    from seqmesh.tools import plan as command
    from seqmesh.tools.plan_costs import CostOptions

    command.run(
        folder=folder,
        ranks_per_node=ranks_per_node,
        first_step=first_step,
        steps=steps,
        costs=CostOptions(shape=shape, file=cost, flops=flops, near=near, far=far, launch=launch),
        json_path=json,
        plot=plot,
        ranks=ranks,
        capacity=capacity,
        mode=mode,
        tokens_per_step=tokens_per_step,
        max_document=max_document,
        overlong=overlong,
        epochs=epochs,
        seed=seed,
    )


@app.command()
def serve(
    data: Annotated[
        str | None,
        typer.Argument(
            help="Folder or URL: a shard set, Parquet, Hugging Face or Megatron data (default: what the settings name)."
        ),
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="A YAML file of loader settings, see docs/loader.md; options go before it.")
    ] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="Most tokens of a global batch.")] = None,
    capacity: Annotated[int | None, typer.Option(help="Most tokens of a micro-batch on one rank.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks to spread a global batch over (default: 1).")] = None,
    max_document: Annotated[int | None, typer.Option(help="Most tokens of a document (default: the capacity).")] = None,
    overlong: Annotated[
        Overlong | None, typer.Option(help="What happens to longer documents (default: error).")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data (default: no end).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of documents (default: 0).")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of data that does not say it: ids are below it.")] = None,
    column: Annotated[str | None, typer.Option(help="Of the ids in Parquet and Hugging Face data.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for copies of data at URLs, and of Parquet.")] = None,
    cache_bytes: Annotated[int | None, typer.Option(help="The most bytes in it (default: 32 GiB).")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Where to listen (default: a private ipc:// socket).")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="A folder of `seqmesh keys`, for an address that other machines reach.")
    ] = None,
    standby: Annotated[bool, typer.Option("--standby", help="Take over when the loader at the endpoint ends.")] = False,
    metrics: Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="A folder to record in what every step trained on.")] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")] = False,
    poison: Annotated[bool, typer.Option("--poison", help="Overwrite recycled slots, to find who reads them.")] = False,
) -> None:
    """Run a loader process in the foreground, for Loader(endpoint=...)."""
    from seqmesh.loader.order import ServeOptions
    from seqmesh.tools import serve as command

    command.run(
        file=settings,
        endpoint=endpoint,
        options=ServeOptions(
            standby=standby,
            keys=str(keys) if keys else None,
            metrics=metrics,
            ledger=str(ledger) if ledger else None,
            poison=poison,
            cache=str(cache) if cache else None,
            cache_bytes=cache_bytes,
        ),
        log_json=log_json,
        data=data,
        vocab_size=vocab_size,
        column=column,
        tokens_per_step=tokens_per_step,
        capacity=capacity,
        ranks=ranks,
        max_document=max_document,
        overlong=overlong,
        epochs=epochs,
        seed=seed,
    )


@app.command()
def fleet(
    settings: Annotated[Path, typer.Option(help="A YAML file of loader settings, see docs/loader.md.")],
    address: Annotated[str, typer.Option(help="Of the Ray cluster; auto: the one that this machine is in.")] = "auto",
    keys: Annotated[
        Path | None, typer.Option(help="A folder of `seqmesh keys`, at the same path on every node.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="A node's id or address; may be repeated (default: all).")
    ] = None,
    num_cpus: Annotated[float, typer.Option(help="CPUs that Ray sets aside for a loader.")] = 1,
    port: Annotated[int, typer.Option(help="Of the first loader, the next has the next (default: free ones).")] = 0,
    endpoints: Annotated[
        Path | None, typer.Option(help="Always say in this file where the loaders are, for ranks that are not on Ray.")
    ] = None,
) -> None:
    """Run a loader on every node of a Ray cluster, in the foreground; Ray starts them again, elsewhere if need be."""
    from seqmesh.tools import fleet as command

    command.run(
        file=settings,
        address=address,
        keys=keys,
        nodes=node,
        num_cpus=num_cpus,
        port=port,
        endpoints=endpoints,
    )


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="The folder of `seqmesh serve --ledger`.")],
    step: Annotated[int | None, typer.Option(help="The step to show (default: say which there are).")] = None,
    documents: Annotated[bool, typer.Option("--documents", help="List the step's documents.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="Show every time that the step was served.")] = False,
    document: Annotated[int | None, typer.Option(help="Say which steps saw this document (a row number).")] = None,
    data: Annotated[str | None, typer.Option(help="Where the shard set is by now.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write what is shown to this file, too.")] = None,
) -> None:
    """Say what a step trained on, from the records of the loaders that served it."""
    from seqmesh.tools import ledger as command

    command.run(folder=folder, step=step, documents=documents, every=all_, document=document, data=data, json_path=json)


@app.command()
def doctor(
    clean: Annotated[bool, typer.Option("--clean", help="Remove what loaders that were killed have left.")] = False,
    port: Annotated[
        list[int] | None, typer.Option(min=1, max=65535, help="Say who has this TCP port; may be repeated.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write what is found to this file, too.")] = None,
) -> None:
    """Say which loaders run on this machine, what killed ones have left, and whether the machine is fit."""
    from seqmesh.tools import doctor as command

    command.run(clean=clean, ports=tuple(port or ()), json_path=json)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder, to be copied to every machine of the job.")],
) -> None:
    """Make keys for loaders and ranks on different machines: what is sent is encrypted, and strangers are refused."""
    from seqmesh.loader.keys import create_keys

    create_keys(folder)
    typer.echo(f"wrote {folder}: copy it to every machine, readable by its user alone (scp -p)")
    typer.echo(f"  seqmesh serve ... --endpoint tcp://HOST:PORT --keys {folder}")
    typer.echo(f'  Loader(endpoint="tcp://HOST:PORT", keys="{folder}", rank=...)')


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="A YAML file; docs/training.md lists the settings.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, such as optim.lr=1e-3.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a file to begin with, and stop.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every setting with its value, and stop.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Start the ranks again after a failure, so many times.")] = 0,
) -> None:
    """Train a transformer; resumes from the newest whole checkpoint of its run folder."""
    if example:
        from seqmesh.tools.starter import STARTER

        typer.echo(STARTER, nl=False)
        return
    if config is None:
        raise ValueError("name a YAML file of settings; seqmesh train --example prints one to begin with")
    from seqmesh.tools import launch

    if print_config:
        launch.show(config=config, overrides=tuple(overrides or ()))
    else:
        launch.run(config=config, overrides=tuple(overrides or ()), max_restarts=max_restarts)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="RUN/step-..., or a run folder for its newest checkpoint.")],
    out: Annotated[Path, typer.Argument(help="A new folder for the weights and config.json.")],
    format_: Annotated[
        Format, typer.Option("--format", help="Our names in one file, or a Llama model for transformers.")
    ] = "safetensors",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the parameters that are written (default: that of training).")
    ] = None,
) -> None:
    """Write the parameters of a checkpoint as safetensors, without the optimizer's and the loader's state."""
    from seqmesh.tools import export as command

    command.run(checkpoint=checkpoint, out=out, format=format_, dtype=dtype)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="The run folder of a training job.")]) -> None:
    """Summarise a training run: a table, and a picture of loss and throughput."""
    from seqmesh.tools import report as command

    command.run(folder=run)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="packer, rings, loader, train, checkpoint, planner, calibrate or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: done within 40 seconds each.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file, too.")] = None,
    against: Annotated[str, typer.Option(help="Peers to compare with, separated by commas (default: all).")] = "",
    cost: Annotated[Path | None, typer.Option(help="calibrate: write the cost file of a job here.")] = None,
) -> None:
    """Measure a part against peers or the machine's roof, in the same run."""
    from seqmesh.tools import bench as command

    peers = tuple(filter(None, against.split(",")))
    command.run(name=name, quick=quick, json_path=json, against=peers, cost_path=cost)


@app.command()
def demo(folder: Annotated[Path, typer.Argument(help="A new folder for everything it makes.")]) -> None:
    """Run the whole line on this machine's own Python sources: prepare, serve, train, get killed, resume, compare."""
    from seqmesh.tools import demo as command

    command.run(folder=folder)


def main() -> None:
    """The console script: errors in a sentence, and in full with --debug."""
    debug = "--debug" in sys.argv[1:]
    if debug:
        os.environ["SEQMESH_DEBUG"] = "1"  # for the ranks that this process starts
    try:
        app()
    except ModuleNotFoundError as error:
        if debug or error.name not in EXTRAS:
            raise
        _fail(f"this command needs {error.name}: pip install 'seqmesh[{EXTRAS[error.name]}]'")
    except USER_ERRORS as error:
        if debug:
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
