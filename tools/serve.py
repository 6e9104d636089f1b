"""`seqmesh serve`: the loader process in the foreground, until SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import shutil
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from seqmesh.loader.errors import ServingError
from seqmesh.loader.order import FAILED
from seqmesh.loader.process import private_folder
from seqmesh.loader.server import raise_exit, serve
from seqmesh.loader.settings import LoaderSettings, make_settings


def run(*, endpoint: str | None, console: Console | None = None, **fields: Any) -> None:
    """The whole command. `fields` are those of `LoaderSettings`.

    Raises ValueError for unfit settings or data, LoaderError for a damaged set, OSError for a busy endpoint; ends by
    SystemExit with 128 + the signal's number, or with 3 if it fails while serving (the log has the traceback).
    """
    console = console or Console()
    settings = make_settings(fields)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, raise_exit)
    folder: Path | None = None
    if endpoint is None:
        folder = private_folder()
        endpoint = f"ipc://{folder / 'loader'}"
    try:
        serve(settings, endpoint, ready=lambda: _say(console, settings, endpoint))
    except ServingError:
        raise SystemExit(FAILED) from None
    finally:
        if folder:
            shutil.rmtree(folder)


def _say(console: Console, settings: LoaderSettings, endpoint: str) -> None:
    ranks = "rank 0" if settings.ranks == 1 else f"ranks 0 to {settings.ranks - 1}"
    console.print(f"serving {settings.data} for {ranks} at {endpoint}", highlight=False, soft_wrap=True)
    console.print(f'  Loader(endpoint="{endpoint}", rank=0)', highlight=False, soft_wrap=True)
