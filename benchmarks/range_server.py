"""A storage on this machine for benchmarks: serves a folder, and ranges of its files, over HTTP on a loopback port.

`python -m seqmesh.benchmarks.range_server FOLDER` prints the port and serves until its input ends. In a process of its
own, so that it takes nothing from the CPU time of who reads.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class _Ranges(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, asked = Path(self.translate_path(self.path)), self.headers.get("Range", "")
        if not asked or not path.is_file():
            super().do_GET()
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        with path.open("rb") as file:
            file.seek(int(first))
            data = file.read(int(last) + 1 - int(first))
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Its URL, while a process serves the folder."""
    command = [sys.executable, "-m", "seqmesh.benchmarks.range_server", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def main() -> None:
    handler = partial(_Ranges, directory=sys.argv[1])
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
