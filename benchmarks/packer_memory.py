"""How much memory packing takes beside its input: the peak of a fresh process that packs once.

`python -m seqmesh.benchmarks.packer_memory NAME CAPACITY FILE` packs the lengths in an .npy file and prints bytes and
bins as JSON. The process has imported, compiled and prepared everything before; then its peak is set back to what it
holds. Linux only. Where the kernel does not set peaks back, the answer is an upper limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from seqmesh.benchmarks.packing import adapter
from seqmesh.benchmarks.processes import held_bytes, reset_peak
from seqmesh.packer.lengths import Int64Array

WARM_UP = 1_000  # documents
TIMEOUT = 300  # seconds


def extra_bytes(name: str, lengths: Int64Array, capacity: int) -> tuple[int, int]:
    """Peak memory over what was held before, and bins, of candidate `name` in a process of its own."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, lengths)
        command = [sys.executable, "-m", __name__, name, str(capacity), str(file)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["bytes"], found["bins"]


def measure_here(name: str, lengths: Int64Array, capacity: int) -> dict[str, int]:
    """The same in this process."""
    warm = adapter(name)(lengths[:WARM_UP], capacity)
    warm.packed(warm.call())
    prepared = adapter(name)(lengths, capacity)
    reset_peak()
    before = held_bytes("VmRSS")
    answer = prepared.call()
    peak = held_bytes("VmHWM")
    return {"bytes": max(0, peak - before), "bins": len(prepared.packed(answer)[1])}


if __name__ == "__main__":
    name, capacity, file = sys.argv[1:]
    print(json.dumps(measure_here(name, np.load(file), int(capacity))))  # noqa: T201
