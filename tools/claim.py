"""The output folder of `prepare`: whose it is, and that only one run at a time writes to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from seqmesh.loader.manifest import LENGTHS_NAME, MANIFEST_NAME, read_manifest
from seqmesh.tools.journal import JOURNAL_NAME
from seqmesh.tools.units.seen import SEEN_NAME

LOCK_NAME = "prepare.lock"
TOKENIZER_NAME = "tokenizer.json"
MODEL_NAME = "tokenizer.model"  # a SentencePiece model
TOKENIZER_NAMES = (TOKENIZER_NAME, MODEL_NAME)  # a set keeps its tokenizer under one of them
QUARANTINE_NAME = "quarantine.jsonl"

_NAMES = (LENGTHS_NAME, MANIFEST_NAME, *TOKENIZER_NAMES, QUARANTINE_NAME, JOURNAL_NAME)
_OURS = re.compile(
    rf"(shard-\d+\.arrow|{'|'.join(map(re.escape, _NAMES))})(\.tmp)?|{'|'.join(map(re.escape, (LOCK_NAME, SEEN_NAME)))}"
)


@contextmanager
def claimed(out: Path, *, fingerprint: str | None) -> Iterator[None]:
    """Make `out` if need be, and keep other runs out of it until the block ends or the process dies.

    Raises where it holds a finished set or anything that `prepare` does not write; it is left as it is then.
    `fingerprint` is the tokenizer's, None where it is still to be trained; a finished set's message compares it.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file: the output must be a folder")
    _refuse_finished(out, fingerprint)
    out.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(out)
    lock = filelock.FileLock(out / LOCK_NAME, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise BlockingIOError(
            f"another run of prepare writes to {out}: wait for it, or choose another folder"
        ) from None
    try:
        _refuse_finished(out, fingerprint)  # another run may have finished since
        yield
    finally:
        # An unfinished folder keeps the lock's file: two runs could get in at once where one removes what the other
        # has opened. In a finished folder nobody gets further than the manifest.
        if is_finished(out):
            _tidy(out)
        lock.release()


def is_finished(out: Path) -> bool:
    """Whether a folder holds a whole set: a manifest, and no journal beside it."""
    return (out / MANIFEST_NAME).exists() and not (out / JOURNAL_NAME).exists()


def clear(out: Path, *, keep: frozenset[str] = frozenset()) -> int:
    """Remove what earlier runs left, but for the names in `keep`. Returns how many files went."""
    # The manifest first: without it nobody takes for a set what is about to lose its files.
    names = sorted((path.name for path in out.iterdir()), key=lambda name: (name != MANIFEST_NAME, name))
    gone = [name for name in names if name != LOCK_NAME and name not in keep]
    for name in gone:
        (out / name).unlink()
    return len(gone)


def _tidy(out: Path) -> None:
    """Remove what only an unfinished run needs."""
    for name in (LOCK_NAME, SEEN_NAME):
        (out / name).unlink(missing_ok=True)


def _refuse_finished(out: Path, fingerprint: str | None) -> None:
    if not is_finished(out):
        return
    with suppress(OSError):  # left by a kill in a run's last moment; the folder may be read-only
        _tidy(out)
    existing = read_manifest(out)
    known = {None: "", existing.tokenizer: ", made with the same tokenizer"}
    compared = known.get(fingerprint, f", made with another tokenizer ({existing.tokenizer}, now {fingerprint})")
    raise FileExistsError(
        f"{out} already holds a finished shard set of {existing.documents} documents{compared}: "
        "delete the folder or choose another"
    )


def _refuse_foreign(out: Path) -> None:
    names = sorted(path.name for path in out.iterdir())
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    # A tokenizer alone is somebody's: our runs write the journal before it.
    if foreign or names in ([name] for name in TOKENIZER_NAMES):
        listed = ", ".join((foreign or names)[:5])
        raise FileExistsError(f"{out} holds other files ({listed}): choose a new or empty folder")
