"""How far a command on a shard set is: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar

from seqmesh.loader.manifest import Manifest

QUIET_SECONDS = 5.0  # between lines of progress where there is no terminal

Share = Callable[[float], None]  # hears which share of the work is done, from 0 to 1
Say = Callable[[str], None]  # hears one-line notices


def ignore(_: object) -> None:
    """For callers that want no progress, or no notices."""


def said_on(console: Console) -> Say:
    """Notices as lines of their own, whatever signs they hold."""
    return lambda message: console.print(message, markup=False, highlight=False, soft_wrap=True)


def say_made(console: Console, folder: Path, made: Manifest) -> None:
    """How much a set holds by now, as a command's last line."""
    said_on(console)(f"{folder}: {made.documents:,} documents, {made.tokens:,} tokens, {len(made.shards):,} shards")


def stretch(progress: Share, start: float, length: float) -> Share:
    """For a part of the work, which is this share of all, and begins there."""
    return lambda done: progress(start + length * done)


@contextmanager
def progress_on(console: Console, doing: str, done: str) -> Iterator[Share]:
    """doing: what the bar is called; done: what the share is of, as the lines say it."""
    if not console.is_terminal:
        yield _lines(console, done)
        return
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task(doing, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _lines(console: Console, done: str) -> Share:
    last = time.perf_counter()

    def line(share: float) -> None:
        nonlocal last
        if time.perf_counter() - last >= QUIET_SECONDS:
            last = time.perf_counter()
            console.print(f"{share:.0%} of the {done}", highlight=False)

    return line
