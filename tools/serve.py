"""`seqmesh serve`: the loader process in the foreground, until SIGINT or SIGTERM."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from seqmesh.loader.errors import ServingError
from seqmesh.loader.folder import private_folder
from seqmesh.loader.logs import log_json as log_as_json
from seqmesh.loader.logs import log_plain
from seqmesh.loader.mapping import read_mapping
from seqmesh.loader.order import FAILED, ServeOptions
from seqmesh.loader.server import raise_exit, serve
from seqmesh.loader.settings import LoaderSettings, make_settings


def run(
    *,
    file: Path | None = None,
    endpoint: str | None = None,
    options: ServeOptions | None = None,
    log_json: bool = False,
    console: Console | None = None,
    **fields: Any,
) -> None:
    """The whole command. file: of settings, which `fields`, those of `LoaderSettings` that are not None, go before.

    Raises ValueError for unfit settings or data, LoaderError for a damaged set, OSError for a busy endpoint; ends by
    SystemExit with 128 + the signal's number, or with 3 if it fails while serving (the log has the traceback).
    """
    console, options = console or Console(), options or ServeOptions()
    settings = read_settings(file, {name: value for name, value in fields.items() if value is not None}).resolved()
    (log_as_json if log_json else log_plain)()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, raise_exit)
    folder: Path | None = None
    if endpoint is None:
        if options.standby:
            raise ValueError("endpoint is missing: a standby waits for the loader at an endpoint, which must be named")
        folder = private_folder()
        endpoint = f"ipc://{folder / 'loader'}"
    try:
        serve(
            settings,
            endpoint,
            ready=lambda: _say(console, settings, endpoint, options),
            standing_by=lambda: console.print(f"standing by for {endpoint}", highlight=False, soft_wrap=True),
            options=options,
            folder=folder,
        )
    except ServingError:
        raise SystemExit(FAILED) from None
    finally:
        if folder:
            shutil.rmtree(folder)


def read_settings(file: Path | None, fields: dict[str, Any]) -> LoaderSettings:
    """Settings of a YAML file, `fields` before it. The seed is 0 by default: a loader that is started again must serve
    the same. Raises FileNotFoundError, or ValueError naming each bad field."""
    if file is None:
        return make_settings({"seed": 0} | fields)
    found = read_mapping(file)
    try:
        return make_settings({"seed": 0} | found | fields)
    except ValueError as error:
        raise ValueError(f"{file} does not make loader settings: {error}") from error


def _say(console: Console, settings: LoaderSettings, endpoint: str, options: ServeOptions) -> None:
    ranks = "rank 0" if settings.ranks == 1 else f"ranks 0 to {settings.ranks - 1}"
    keys = f', keys="{options.keys}"' if options.keys else ""
    console.print(f"serving {settings.data} for {ranks} at {endpoint}", highlight=False, soft_wrap=True)
    reached = endpoint.replace("//0.0.0.0:", "//HOST:").replace("//*:", "//HOST:").replace("//[::]:", "//HOST:")
    console.print(f'  Loader(endpoint="{reached}", rank=0{keys})', highlight=False, soft_wrap=True)
