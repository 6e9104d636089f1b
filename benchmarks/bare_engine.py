"""The roof of preparing: an engine over texts that are in memory already, nothing read, written or checked.

    python -m seqmesh.benchmarks.bare_engine CORPUS TOKENIZER ENGINE PART PARTS

Takes every PARTS-th text from the PART-th on, says `ready`, waits for a line, and encodes them by one thread in calls
as large as those of `prepare`, which are units. Answers with one line of JSON: begin and end on the machine's clock,
CPU seconds, tokens, and the checksum of all ids with the mark that ends documents behind each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from seqmesh.tools.tokenizers.engine import Engine
from seqmesh.tools.tokenizers.engines import reference_engine
from seqmesh.tools.tokenizers.file import load_tokenizer
from seqmesh.tools.tokenizers.quicktok_engine import quicktok_engine
from seqmesh.tools.tokenizers.tiktoken_engine import tiktoken_engine
from seqmesh.tools.units.cut import UNIT_BYTES

FAST = {"quicktok": quicktok_engine, "tiktoken": tiktoken_engine}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """What the workers took: seconds from the first one's begin to the last one's end, CPU seconds of all, tokens
    without marks. checksum: of a single worker's ids, else empty."""

    wall: float
    cpu: float
    tokens: int
    checksum: str


def encode_bare(corpus: Path, tokenizer: Path, engine: str, workers: int) -> Bare:
    """Run as many workers at once, each with its share of the texts."""
    command = [sys.executable, "-m", __name__, str(corpus), str(tokenizer), engine]
    parts = [_started([*command, str(part), str(workers)]) for part in range(workers)]
    for part in parts:
        assert part.stdout is not None
        if part.stdout.readline().strip() != "ready":
            raise RuntimeError(f"a bare worker of {engine} ended with exit code {part.wait()}")
    found: list[dict[str, Any]] = [json.loads(part.communicate()[0]) for part in _all_told(parts)]
    return Bare(
        wall=max(each["end"] for each in found) - min(each["begin"] for each in found),
        cpu=sum(each["cpu"] for each in found),
        tokens=sum(each["tokens"] for each in found),
        checksum=found[0]["checksum"] if workers == 1 else "",
    )


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _all_told(parts: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """Let all begin before the first is waited for."""
    for part in parts:
        assert part.stdin is not None
        part.stdin.write("go\n")
        part.stdin.flush()
    return parts


def engine_of(tokenizer: Path, name: str) -> Engine:
    """One that does not check itself, with one thread."""
    file = load_tokenizer(tokenizer)
    return FAST[name](file, threads=1) if name in FAST else reference_engine(file, threads=1)


def batches(texts: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if found[-1] and size + len(text) > UNIT_BYTES:
            found.append([])
            size = 0
        found[-1].append(text)
        size += len(text)
    return found


def main(corpus: str, tokenizer: str, name: str, part: str, parts: str) -> None:
    lines = Path(corpus).read_bytes().splitlines()[int(part) :: int(parts)]
    calls = batches([json.loads(line)["text"] for line in lines])
    engine, end = engine_of(Path(tokenizer), name), load_tokenizer(Path(tokenizer)).eod_id or 0
    engine.encode_flat(calls[0][:100])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    begin, cpu = time.monotonic(), time.process_time()
    found = [engine.encode_flat(call) for call in calls]
    took = {"begin": begin, "end": time.monotonic(), "cpu": time.process_time() - cpu}
    ids, lengths = np.concatenate([ids for ids, _ in found]), np.concatenate([lengths for _, lengths in found])
    marked = np.insert(ids, np.cumsum(lengths), end).astype(np.uint32)
    told = {**took, "tokens": len(ids), "checksum": xxhash.xxh3_128_hexdigest(marked.tobytes())}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
