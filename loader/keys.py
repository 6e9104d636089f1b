"""Keys for links between machines: CURVE certificates (elliptic curve, as ZeroMQ has them), in a folder.

    keys/loader.key_secret   the loader's own            keys/loader.key   its public half, which every rank needs
    keys/rank.key_secret     every rank's own            keys/ranks/rank.key   its public half: who may connect

The whole folder goes to every machine of the job, readable by its user alone. A rank proves to have a key that is in
`ranks`, the loader to have its own, and everything between them is encrypted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

LOADER, RANK, RANKS = "loader", "rank", "ranks"
KEY_CHARACTERS = 40


def create_keys(folder: Path) -> None:
    """Make a new folder of keys. Raises FileExistsError where there is one."""
    folder.mkdir(parents=True, mode=0o700)
    (folder / RANKS).mkdir(mode=0o700)
    for name in (LOADER, RANK):
        zmq.auth.create_certificates(folder, name)
        (folder / f"{name}.key_secret").chmod(0o600)
    (folder / f"{RANK}.key").rename(folder / RANKS / f"{RANK}.key")


def check_keys(folder: Path) -> None:
    """Raises ValueError for a folder without keys, with a damaged one, or whose secrets others could read."""
    for file in (f"{LOADER}.key", f"{LOADER}.key_secret", f"{RANK}.key_secret", RANKS):
        if not (folder / file).exists():
            raise ValueError(f"keys is {str(folder)!r}: has no {file}; make them with `seqmesh keys FOLDER`")
    for name in (LOADER, RANK):
        if (mode := (folder / f"{name}.key_secret").stat().st_mode) & 0o077:
            raise ValueError(f"{folder / name}.key_secret has mode {mode & 0o777:o}: others can read it; use chmod 600")
        _pair(folder / f"{name}.key_secret")
    _public(folder / f"{LOADER}.key")


def prove_rank(socket: zmq.Socket[bytes], folder: Path) -> None:
    """Make a rank's socket, not yet connected, use the keys."""
    socket.curve_publickey, socket.curve_secretkey = _pair(folder / f"{RANK}.key_secret")
    socket.curve_serverkey = _public(folder / f"{LOADER}.key")


@contextlib.contextmanager
def proving_loader(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], folder: Path) -> Iterator[None]:
    """Make a loader's socket, not yet bound, use the keys, and refuse all others. Only loaded where keys are used: the
    library answers ZeroMQ's questions from a thread of its own."""
    check_keys(folder)
    guard = ThreadAuthenticator(context)
    guard.start()
    try:
        guard.configure_curve(domain="*", location=os.fspath(folder / RANKS))
        socket.curve_publickey, socket.curve_secretkey = _pair(folder / f"{LOADER}.key_secret")
        socket.curve_server = True
        yield
    finally:
        guard.stop()


def _pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _read(path)
    if secret is None:
        raise ValueError(f"{path} holds no secret key")
    return public, secret


def _public(path: Path) -> bytes:
    public, _ = _read(path)
    return public


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a key: {error}") from error
    if any(key is not None and len(key) != KEY_CHARACTERS for key in (public, secret)):
        raise ValueError(f"{path} is damaged: its keys must have {KEY_CHARACTERS} characters")
    return public, secret
