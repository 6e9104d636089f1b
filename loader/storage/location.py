"""`Location`: a folder that a data set lies in, on a disk or at a URL that fsspec knows (`s3://bucket/set`).

Gives the names and sizes of its files, small files whole, and large ones (or ranges of them) as local files. Every
request has a deadline and is made again where it failed, and every answer is measured: a connection that is cut often
gives less than was asked for, and no error. Nothing is written under its final name until it is whole.

How to reach a storage (endpoint, credentials) is for fsspec's own configuration, files or environment: see its
documentation. fsspec and its drivers are imported for URLs only. Nothing is kept here; copies are for `store`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import xxhash

from seqmesh.loader.errors import RemoteError
from seqmesh.loader.files import atomic_path
from seqmesh.loader.storage.retry import Patience, persist, within, without_password

RANGE_BYTES = 8 << 20  # asked for at once
LOCAL = ("file://", "local://")
HTTP = ("http://", "https://")


class Location:
    """A folder. str() and repr() show no password. May be shared by threads, and used after a fork."""

    __slots__ = ("_opened", "_patience", "url")

    def __init__(self, url: str | Path, patience: Patience | None = None) -> None:
        """Raises ValueError for a URL of no known protocol, or whose driver is not installed: it says what to
        install."""
        protocol, separator, path = str(url).rpartition("://")
        self.url = protocol + separator + (path.rstrip("/") or ("" if separator else "/"))
        self._patience = patience or Patience()
        self._opened: tuple[int, Any, str] | None = None  # process, file system, our path in it
        if not self.is_local:
            _check_url(self.url)

    def __str__(self) -> str:
        return without_password(self.url)

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"

    @property
    def is_local(self) -> bool:
        return "://" not in self.url or self.url.startswith(LOCAL)

    @property
    def path(self) -> Path:
        """Where it is on a disk. Raises ValueError for a URL of something else."""
        if not self.is_local:
            raise ValueError(f"{self} is not a local folder")
        return Path(self.url.rpartition("://")[2] or "/")

    @property
    def name(self) -> str:
        """Its last part: of a prefix, what the names of its files begin with."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The folder it is in. Raises ValueError for a whole bucket or host."""
        above = self.url.rpartition("/")[0]
        if "://" in self.url and above.endswith("/"):
            raise ValueError(f"{self} has no folder above it")
        return Location(above or ("/" if self.url.startswith("/") else "."), self._patience)

    def child(self, name: str) -> Location:
        """A folder in it."""
        return Location(self._join(self.url, name), self._patience)

    def files(self) -> dict[str, int]:
        """Sizes of the files in it by name, those in folders below not included; asked for anew each time. Raises
        FileNotFoundError where there is no such folder, RemoteError."""
        entries = self._ask("ls", None, f"listing {self}", lambda found: found, detail=True)
        path = self._open()[1].strip("/")
        sizes = {}
        for entry in entries:
            above, _, name = str(entry["name"]).rpartition("/")
            if entry["type"] == "file" and str(entry["name"]).strip("/") == path and name:
                raise FileNotFoundError(f"{self} is a file, and no folder")
            name = self._unquoted(name)
            if entry["type"] == "file" and above.strip("/") == path and name:
                sizes[name] = self.size(name) if entry["size"] is None else int(entry["size"])
        return dict(sorted(sizes.items()))

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder of this name. Raises RemoteError where that can not be told."""
        try:
            self._info(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError, also for a folder, and RemoteError."""
        info = self._info(name)
        if info["type"] == "directory":
            raise FileNotFoundError(f"{self}/{name} is a folder")
        if info["size"] is None:
            raise RemoteError(f"{self}/{name}: the server does not tell its size, without which no copy can be checked")
        return int(info["size"])

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a file from `start` on, to its end by default. Raises as `fetch` does."""
        size = max(self.size(name) - start, 0) if size is None else size
        return b"".join(self._ranges(name, start, size))

    def fetch(
        self,
        name: str,
        target: Path,
        *,
        start: int = 0,
        size: int | None = None,
        xxh3: str = "",
        whole: int | None = None,
    ) -> None:
        """Bring a file, or `size` bytes of it from `start` on, to a local path, whole or not at all.

        It comes in ranges of 8 MiB, one in memory at a time; the patience is with each of them. xxh3: the xxh3-128
        checksum that what is brought must have; whole: the bytes that all of the file must have. Raises
        FileNotFoundError, RemoteError, OSError where it can not be written.
        """
        if size is None or whole is not None:
            found = self.size(name)
            if whole is not None and found != whole:
                raise RemoteError(f"{self}/{name} has {found} bytes: must have {whole}; it was cut short or replaced")
            size = max(found - start, 0) if size is None else size
        with atomic_path(target, mark=f"{os.getpid()}-{secrets.token_hex(4)}") as temporary:
            for _ in range(2):  # what was damaged on the way is whole the next time
                if self._write(temporary, name, start, size) == xxh3 or not xxh3:
                    return
            raise RemoteError(f"{self}/{name}: its checksum is not {xxh3}, twice: it is damaged, or was replaced")

    def _write(self, path: Path, name: str, start: int, size: int) -> str:
        """The checksum of what came."""
        digest = xxhash.xxh3_128()
        with path.open("wb") as file:
            for data in self._ranges(name, start, size):
                digest.update(data)
                file.write(data)
        return digest.hexdigest()

    def _ranges(self, name: str, start: int, size: int) -> Iterator[bytes]:
        for first in range(start, start + size, RANGE_BYTES):
            yield self._range(name, first, min(first + RANGE_BYTES, start + size))

    def _range(self, name: str, start: int, stop: int) -> bytes:
        what = f"reading bytes {start} to {stop} of {self}/{name}"

        def measured(data: bytes) -> bytes:
            if len(data) > stop - start:
                raise RemoteError(f"{what}: the server gave {len(data)} bytes: it does not serve ranges of files")
            if len(data) < stop - start:
                raise EOFError(f"{len(data)} bytes came instead of {stop - start}")
            return data

        data: bytes = self._ask("cat_file", name, what, measured, start=start, end=stop)
        return data

    def _info(self, name: str) -> Any:
        return self._ask("info", name, f"looking for {self}/{name}", lambda found: found)

    def _ask(self, method: str, name: str | None, what: str, check: Callable[[Any], Any], **options: Any) -> Any:
        """What a method of the file system says of a file, or of the folder itself, once `check` lets it pass."""
        below = "" if name is None else self._join("", name)

        def once(seconds: float) -> Any:
            system, path = self._open()
            if method != "cat_file":
                system.invalidate_cache()  # it would give what it saw earlier
            path = path.rstrip("/") + below if below else path
            if system.async_impl:  # can be cancelled
                from fsspec.asyn import sync

                coroutine = getattr(system, f"_{method}")
                return check(sync(system.loop, coroutine, path, timeout=seconds, **options))
            return check(within(seconds, lambda: getattr(system, method)(path, **options)))

        return persist(once, what, self._patience)

    def _join(self, above: str, name: str) -> str:
        if not name or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{name!r} is not a name inside of {self}")
        name = quote(name) if self.url.startswith(HTTP) else name
        return f"{above.rstrip('/')}/{name}"

    def _unquoted(self, name: str) -> str:
        """The name behind a link; empty for one that only shows the folder in another order."""
        if not self.url.startswith(HTTP):
            return name
        return "" if "?" in name else unquote(name)

    def _open(self) -> tuple[Any, str]:
        """The file system and our path in it. Connections can not be shared with a process that was forked."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), *self._connect())
        return self._opened[1], self._opened[2]

    def _connect(self) -> tuple[Any, str]:
        if self.is_local:
            return _Disk(), str(self.path)
        import fsspec

        system, path = fsspec.core.url_to_fs(self.url)
        return system, str(path)


class _Disk:
    """What of fsspec's file systems is used here, for a local folder."""

    async_impl = False

    def invalidate_cache(self) -> None:
        pass

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        assert detail
        return [self.info(entry.path) for entry in os.scandir(path)]

    def info(self, path: str) -> dict[str, Any]:
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": os.stat(path).st_size, "type": kind}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(end - start)


def _check_url(url: str) -> None:
    """Raises ValueError for one that can not be a folder, or has no driver here."""
    shown, protocol = without_password(url), url.partition("://")[0]
    if "::" in url:
        raise ValueError(f"{shown}: chains of file systems (::) are not supported; give the URL of a folder")
    if url.startswith(HTTP) and "?" in url:
        raise ValueError(f"{shown}: a URL with a query is no folder that files could be looked for in")
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except ValueError:
        raise ValueError(f"{shown}: fsspec knows no protocol {protocol!r}; check the URL") from None
    except ImportError as error:  # fsspec says what to install
        raise ValueError(f"{shown}: its driver is not installed: {error}") from None
