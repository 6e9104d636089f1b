"""Storages on this machine for tests: over HTTP, as S3 where a server for it is installed, and links that are cut."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 60.0
STUCK_SECONDS = 4.0
BUCKET = "bucket"


class Ranges(SimpleHTTPRequestHandler):
    """Serves a folder, and the ranges of its files; what is called secret it refuses, and of what is called stuck it
    gives nothing for a while."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = self.headers.get("Range", "")
        if path.name == "stuck":
            time.sleep(STUCK_SECONDS)
        if "secret" in path.name:
            self.send_error(403)
        elif not asked or not path.is_file():
            super().do_GET()
        else:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            data = path.read_bytes()[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        if "secret" in self.path:
            self.send_error(403)
        else:
            super().do_HEAD()

    def log_message(self, *_: Any) -> None:
        pass


class Unlisted(Ranges):
    """Says nothing of folders, as most servers of files on the web."""

    def list_directory(self, _path: Any) -> None:
        self.send_error(404)


@contextlib.contextmanager
def http_server(folder: Path, *, lists: bool = True) -> Iterator[int]:
    """Serve a folder; the port. lists: it says what is in it."""
    handler = Ranges if lists else Unlisted
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


class Link:
    """Passes bytes between who connects to `port` and a server, and cuts the next `cuts` connections after `limit`
    bytes of answers."""

    def __init__(self, server: int) -> None:
        self.cuts, self.limit, self.was_cut = 0, 0, 0
        self._server = server
        self._open = list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Nobody listens any more, and all connections end."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open += [client, server]
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and self.cuts and passed + len(data) > self.limit:
                    self.cuts, self.was_cut = self.cuts - 1, self.was_cut + 1
                    sink.sendall(data[: self.limit - passed])
                    break
                sink.sendall(data)
                passed += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def link_to(server: int) -> Iterator[Link]:
    link = Link(server)
    try:
        yield link
    finally:
        link.close()


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """An S3 server in a process of its own; its port. Skips the test where none is installed."""
    for module in ("moto", "s3fs", "flask"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], **quiet) as process:  # type: ignore[call-overload]  # of keywords
        try:
            _wait_for_server(port)
            yield port
        finally:
            process.kill()


def _wait_for_server(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def s3_settings(port: int) -> Iterator[dict[str, str]]:
    """Point s3:// at a server on this machine, as a user does: by the environment, which is given for programs that
    are started, and in this process by what fsspec makes of it."""
    from fsspec.config import conf, set_conf_env

    names = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "KEY": "testing", "SECRET": "testing"}
    environment = {f"FSSPEC_S3_{name}": value for name, value in names.items()}
    before = dict(conf)
    set_conf_env(conf, environment)
    try:
        yield os.environ | environment
    finally:
        conf.clear()
        conf.update(before)
