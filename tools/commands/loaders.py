"""The commands that run loaders and look after them; the work of each is a module of its own, imported when
it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Overlong = Literal["error", "truncate", "split", "drop"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (serve, fleet, ledger, doctor, keys):
        app.command()(command)


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


def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder, to be copied to every machine of the job.")],
) -> None:
    """Make keys for loaders and ranks on different machines: what is sent is encrypted, and strangers are refused."""
    from seqmesh.loader.keys import create_keys

    create_keys(folder)
    typer.echo(f"wrote {folder}: copy it to every machine, readable by its user alone (scp -p)")
    typer.echo(f"  seqmesh serve ... --endpoint tcp://HOST:PORT --keys {folder}")
    typer.echo(f'  Loader(endpoint="tcp://HOST:PORT", keys="{folder}", rank=...)')
