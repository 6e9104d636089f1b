"""The folders that commands on shard sets make: each appears whole under its name, or not at all.

Files are written to a folder with a temporary name beside it, which is renamed at the end. What a killed run left there
is removed by the next one of the same name; two runs at once are refused.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from seqmesh.loader.files import sync_folder
from seqmesh.loader.storage.location import Location


@contextmanager
def new_folder(out: Path, *, inputs: Sequence[str] = ()) -> Iterator[Path]:
    """The folder to write to in place of `out`. inputs: sets that are read meanwhile, which `out` must not lie in.
    Raises FileExistsError where there is anything of that name, BlockingIOError while another run makes it."""
    out = out.absolute()
    check_new(out, inputs)
    out.parent.mkdir(parents=True, exist_ok=True)
    making = out.with_name(f".{out.name}.making.tmp")
    making.mkdir(exist_ok=True)
    with only_one(making, f"another command is making {out}: wait for it, or choose another folder"):
        try:
            _empty(making)
            yield making
            sync_folder(making)
            check_new(out, inputs)
            making.rename(out)
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise


def check_new(out: Path, inputs: Sequence[str] = ()) -> None:
    """Raises FileExistsError where there is anything called `out`, ValueError where it is a URL, or lies in one of the
    inputs."""
    check_local(out)
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists already: choose another folder, or remove it")
    for data in inputs:
        location = Location(data)
        if location.is_local and location.path.is_dir() and out.resolve().is_relative_to(location.path.resolve()):
            raise ValueError(f"{out} lies inside {data}, which is read: choose a folder beside it")


def check_local(folder: Path) -> None:
    """Raises ValueError for a URL, of which a path keeps one of the slashes."""
    if ":/" in str(folder):
        raise ValueError(f"{folder} is a URL: sets are read from there, but written to folders of this machine")


@contextmanager
def only_one(folder: Path, message: str) -> Iterator[None]:
    """Keep other runs that ask for the same out of a folder. Raises BlockingIOError with the message where one is in
    it. A lock of the folder itself: no file is left in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _locked(descriptor, folder):
            raise BlockingIOError(message)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, folder: Path) -> bool:
    """Whether the lock is ours, and of what the name still stands for: another run may just have renamed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except (BlockingIOError, FileNotFoundError):
        return False


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
