"""The `seqmesh` command: what a person types. Most commands are in `seqmesh.tools.commands`, by subject. Every
command's work is a module of its own, imported when it is run, so that `seqmesh --help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from seqmesh.tools.commands import loaders, planning, preparing, sets

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Feed and train language models on documents of very uneven lengths.",
    epilog="A first tour: seqmesh demo runs/demo",
)

USER_ERRORS = (ValueError, OSError, RuntimeError, NotImplementedError)
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


for group in (preparing, sets, planning, loaders):
    group.register(app)


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
    name: Annotated[str, typer.Argument(help="packer, loader, prepare, train, hybrid, curves or another, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: done within 40 seconds each.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file, too.")] = None,
    against: Annotated[str, typer.Option(help="Peers to compare with, separated by commas (default: all).")] = "",
    cost: Annotated[Path | None, typer.Option(help="calibrate: write the cost file of a job here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="curves: draw them here.")] = None,
) -> None:
    """Measure a part against peers or the machine's roof, in the same run."""
    from seqmesh.tools import bench as command

    peers = tuple(filter(None, against.split(",")))
    command.run(name=name, quick=quick, json_path=json, against=peers, cost_path=cost, plot_path=plot)


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
