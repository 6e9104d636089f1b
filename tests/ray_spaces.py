"""Runs a script that makes a Ray cluster in network and process namespaces of its own: Ray listens at the outer
interface otherwise, and leaves processes behind where it is killed."""

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
RUN_SECONDS = 240.0  # on a busy machine

MEMORY = Path("/dev/shm")


@contextmanager
def short_folder() -> Iterator[Path]:
    """Short, since Ray's sockets are in it, and quick to remove."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, ignore_cleanup_errors=True) as name:
        yield Path(name)


def told_by(module: str, folder: Path, *arguments: str | bytes) -> dict[str, Any]:
    """What a script says in its last line. folder: its first argument; Ray's sockets are there, so its path is short.
    Skips the test where this machine does not allow it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray")
    try:
        subprocess.run([*NAMESPACES, "ip", "link", "set", "lo", "up"], check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root, `ip` and namespaces: {getattr(error, 'stderr', error)}")
    own = {"RAY_AUTH_TOKEN": secrets.token_hex(20), "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(folder)}
    command = ["sh", "-c", f'ip link set lo up && "$0" -m {module} "$@"; exit $?']  # sh takes in orphans
    result = subprocess.run(
        [*NAMESPACES, *command, sys.executable, str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env=os.environ | own | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": ""},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return dict(json.loads(result.stdout.splitlines()[-1]))
