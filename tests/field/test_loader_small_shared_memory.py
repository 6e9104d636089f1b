"""/dev/shm of 64 MB, or more than there is: memory was promised, and missing later, as a bus error in the middle."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.wire import Welcome
from seqmesh.tools import procfs
from tests.serving import SECONDS, connection, digests_inline, say_hello, served_here, take, wait_for
from tests.support import make_set, settings_for

TERABYTE = 1 << 40


def test_more_memory_than_there_is_is_refused_at_once_with_both_numbers(tmp_path: Path) -> None:
    settings = settings_for(make_set(tmp_path / "set", [9] * 40)).resolved()
    with served_here(settings, f"ipc://{tmp_path}/s") as service:
        client = Client(f"ipc://{tmp_path}/s", rank=0, credit=64 * TERABYTE, timeout=SECONDS)
        with pytest.raises(LoaderError, match=r"a ring of \d+ bytes can not be reserved .*\(credit_bytes\)") as refused:
            client.subscribe(Position(Feed(settings).start))
        needed, available = (int(number) for number in re.findall(r"(\d+) bytes", str(refused.value)))
        assert needed == 64 * TERABYTE
        assert 0 < available <= procfs.kilobytes(procfs.meminfo(), "MemTotal")
        client.close()
        client = Client(f"ipc://{tmp_path}/s", rank=0, credit=1 << 20, timeout=SECONDS)
        client.subscribe(Position(Feed(settings).start))
        assert take(client) == digests_inline(settings, 0)  # whoever asks for less is served
        client.close()
        assert service.counters.refused == 0


def test_a_ring_has_its_memory_before_the_first_batch(tmp_path: Path) -> None:
    """A file of shared memory can be made larger than the machine: what counts are its blocks."""
    settings = settings_for(make_set(tmp_path / "set", [9] * 40)).resolved()
    with served_here(settings, f"ipc://{tmp_path}/s") as service, connection(f"ipc://{tmp_path}/s") as socket:
        say_hello(socket, credit=8 << 20, transport="shm")
        wait_for(socket, Welcome)
        arena = service._supply.ring(0)._arena
        assert arena is not None
        assert os.fstat(arena.descriptor).st_blocks * 512 >= arena.size == 8 << 20


# Holds views of more than /dev/shm could take.
IN_SMALL_SHARED_MEMORY = """
import json, os, sys
from pathlib import Path
from seqmesh.loader import Loader, LoaderSettings
from seqmesh.tools.checkup import check_shared_memory
from seqmesh.loader.batch import batch_digest
space = os.statvfs("/dev/shm")
assert space.f_blocks * space.f_frsize == 64 << 20, "the mount has failed"
with Loader(LoaderSettings.from_json(sys.argv[1]), rank=0, views=True, credit_bytes=256 << 20, timeout=20) as loader:
    held = list(loader)
assert check_shared_memory(Path("/dev/shm")).level == "warning"
print(json.dumps([[batch_digest(batch) for batch in held], os.listdir("/dev/shm")]))
"""


def may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not may_mount(), reason="may not mount a small /dev/shm in a namespace of its own")
def test_a_ring_may_be_larger_than_shared_memory_with_names(tmp_path: Path) -> None:
    tokens = 80_000  # just under 1 MiB a batch
    data = make_set(tmp_path, [tokens] * 10, shard_tokens=4 * tokens)
    settings = settings_for(data, tokens_per_step=tokens, capacity=tokens, epochs=8).resolved()
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", IN_SMALL_SHARED_MEMORY]
    done = subprocess.run([*command, settings.to_json().decode()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    digests, left = json.loads(done.stdout)
    assert digests == digests_inline(settings, 0)
    assert len(digests) == 80
    assert left == []
