"""Memory of `seqmesh prepare` over an input much larger than memory for it should be.

    python -m seqmesh.benchmarks.prepare_memory FOLDER BYTES    # an empty folder, with room for 2.5 times the bytes

Writes BYTES of JSONL into the folder, this machine's Python files again and again, each time other lines of them first,
so that no text comes twice; prepares them with two workers and the fastest engine; and meanwhile adds up what all its
processes hold, pages that several share counted once (PSS).
Answers with one line of JSON: the peak, what was held at most in each tenth of the time, and what the run took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import orjson

from seqmesh.benchmarks.children import CLI
from seqmesh.benchmarks.preparing import Ground
from seqmesh.benchmarks.processes import MEGABYTE, descendants

EVERY = 0.25  # seconds between looks
TENTHS = 10
CORPUS, VOCABULARY, WORKERS = 20_000_000, 32_768, 2


def write_varied(ground: Ground, path: Path, size: int) -> None:
    """The corpus until `size` is reached, each time with the lines of its texts turned by one more."""
    records = [orjson.loads(line) for line in ground.corpus.read_bytes().splitlines()]
    with path.open("wb") as file:
        for turn in count():
            for number, record in enumerate(records):
                if file.tell() >= size:
                    return
                lines = record["text"].splitlines(keepends=True)
                first = turn % max(len(lines), 1)
                text = "".join([f"# {turn}\n", *lines[first:], *lines[:first]])
                file.write(orjson.dumps({**record, "id": f"{turn}:{number}", "text": text}) + b"\n")


def watch(command: list[str]) -> dict[str, Any]:
    """Megabytes that a command and all that it starts hold until it ends. Raises RuntimeError where it fails."""
    begin, held = time.monotonic(), list[float]()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            held.append(sum(map(_megabytes, (process.pid, *descendants(process.pid)))))
            time.sleep(EVERY)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    bounds = [len(held) * i // TENTHS for i in range(TENTHS + 1)]
    tenths = [max(held[a:b], default=0.0) for a, b in pairwise(bounds)]
    return {"peak": max(held), "tenths": tenths, "looks": len(held), "seconds": time.monotonic() - begin}


def _megabytes(pid: int) -> float:
    """A process's share of memory, 0 where it has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / MEGABYTE for line in lines if line.startswith("Pss:")), 0.0)


def main(folder: Path, size: int) -> None:
    ground = Ground.prepared(folder, size=CORPUS, vocabulary=VOCABULARY)
    corpus = folder / "long.jsonl"
    write_varied(ground, corpus, size)
    options = ["--tokenizer", str(ground.tokenizer), "--out", str(folder / "out"), "--workers", str(WORKERS)]
    found = watch([*CLI, "prepare", str(corpus), *options])
    sys.stdout.write(json.dumps({"bytes": corpus.stat().st_size, **found}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
