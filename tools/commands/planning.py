"""The commands that pack and plan the documents of a shard set without training; the work of each is a module of
its own, imported when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Overlong = Literal["error", "truncate", "split", "drop"]
Mode = Literal["free", "waves"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (pack, plan):
        app.command()(command)


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
