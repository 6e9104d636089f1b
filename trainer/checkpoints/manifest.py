"""The manifest of a checkpoint: size and checksum of each of its files, and its own checksum. Written last, read first.

Nothing of a checkpoint is used before it agrees with the manifest. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from seqmesh.loader.files import checksum

VERSION = 2
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = "tensors.json"


class CheckpointError(RuntimeError):
    """A checkpoint can not be written, is of another version or does not fit the job."""


class DamageError(CheckpointError):
    """Something of a checkpoint is missing, or not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """xxh3: of all `bytes` of the file, 128 bits as hexadecimal digits."""

    bytes: int
    xxh3: str


def manifest_bytes(files: Mapping[str, FileEntry]) -> bytes:
    """The file that names `files`."""
    return _with_checksum({"version": VERSION, "files": {name: asdict(files[name]) for name in sorted(files)}})


def read_manifest(path: Path) -> dict[str, FileEntry]:
    """The files of the checkpoint at `path`. Raises DamageError where the manifest is missing or was changed,
    CheckpointError where it is of another version."""
    try:
        data = (path / MANIFEST).read_bytes()
        found = json.loads(data)
        if found["version"] == 1 and "xxh3" not in found:
            raise _version_error(path, 1)
        if data != _with_checksum({name: value for name, value in found.items() if name != "xxh3"}):
            raise DamageError(f"{path / MANIFEST}: is damaged, its checksum differs from the one it names")
        if found["version"] != VERSION:
            raise _version_error(path, found["version"])
        return {name: FileEntry(**entry) for name, entry in found["files"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamageError(f"{path}: has no readable {MANIFEST} ({error})") from error


def verify(path: Path) -> None:
    """Raises DamageError naming a file that is missing or was changed, CheckpointError for another version."""
    if found := next(problems(path), None):
        raise DamageError(found)


def problems(path: Path, *, share: int = 0, shares: int = 1) -> Iterator[str]:
    """What is wrong with the files that the manifest names, or with every so many of them. Raises what `read_manifest`
    raises."""
    files = read_manifest(path)
    for name in sorted(files, key=lambda name: -files[name].bytes)[share::shares]:
        if what := _problem(path / name, files[name]):
            yield f"{path / name}: {what}"


def strangers(path: Path) -> list[str]:
    """Names in the folder that are not part of the checkpoint."""
    known = {MANIFEST, *read_manifest(path)}
    return sorted(found.name for found in path.iterdir() if found.name not in known)


def _problem(path: Path, entry: FileEntry) -> str | None:
    try:
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != entry.bytes:
            return f"is damaged, it has {size:,} bytes and the manifest says {entry.bytes:,}"
        return None if checksum(path) == entry.xxh3 else "is damaged, its checksum differs from the manifest's"
    except OSError as error:
        return f"can not be read: {error}"


def _version_error(path: Path, version: Any) -> CheckpointError:
    return CheckpointError(
        f"{path}: has version {version}, this seqmesh reads {VERSION}: finish the run with the seqmesh that wrote it, "
        "or choose another run"
    )


def _with_checksum(body: dict[str, Any]) -> bytes:
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body).encode())
    return json.dumps(body | {"xxh3": digest}, indent=1).encode() + b"\n"
