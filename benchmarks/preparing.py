"""What `bench prepare` measures with: a corpus, a tokenizer, ways from the one to ids by the other, and their check."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from seqmesh.benchmarks import peers_preparing
from seqmesh.benchmarks.bare_engine import Bare, encode_bare
from seqmesh.benchmarks.children import CLI, Spent, spend
from seqmesh.benchmarks.harness import installed_version
from seqmesh.benchmarks.peers_preparing import DATATROVE, Job
from seqmesh.benchmarks.peers_reading import ENVIRONMENTS, PACKAGE
from seqmesh.benchmarks.processes import on_cores
from seqmesh.benchmarks.shards import mapped_ids
from seqmesh.loader.files import atomic_write
from seqmesh.tools.corpus import build_corpus
from seqmesh.tools.tokenizers.training import END_OF_DOCUMENT, train_tokenizer

Ids = npt.NDArray[Any]
ARROW = "data-*.arrow"  # files of a saved dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where it is measured. corpus: JSONL. half: about the first half of it. scratch: for what candidates write."""

    scratch: Path
    corpus: Path
    half: Path
    tokenizer: Path

    @classmethod
    def prepared(cls, scratch: Path, *, size: int, vocabulary: int) -> Ground:
        """Write `size` bytes of this machine's Python files, and train a tokenizer on them. Those that spell the mark
        of documents' ends are left out: some peers take that for the mark."""
        corpus, half, tokenizer = scratch / "corpus.jsonl", scratch / "half.jsonl", scratch / "tokenizer.json"
        build_corpus(corpus, max_bytes=size)
        lines = corpus.read_bytes().splitlines(keepends=True)
        data = b"".join(line for line in lines if END_OF_DOCUMENT.encode() not in line)
        corpus.write_bytes(data)
        half.write_bytes(data[: data.index(b"\n", len(data) // 2) + 1])
        texts = (json.loads(line)["text"] for line in data.splitlines())
        atomic_write(tokenizer, train_tokenizer(texts, vocabulary))
        return cls(scratch=scratch, corpus=corpus, half=half, tokenizer=tokenizer)

    def repeated(self, times: int) -> Path:
        """The corpus over and over, in one file."""
        path = self.scratch / f"corpus-{times}.jsonl"
        if not path.exists():
            data = self.corpus.read_bytes()
            with path.open("wb") as file:
                for _ in range(times):
                    file.write(data)
        return path

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """A name below scratch that is free; what comes there, and beside it under names that begin so, is removed."""
        out = next(path for n in count() if not (path := self.scratch / f"out{n}").exists())
        try:
            yield out
        finally:
            for path in self.scratch.glob(f"{out.name}*"):
                shutil.rmtree(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a candidate took, how many tokens it wrote, marks included, and the checksum of their ids as uint32."""

    spent: Spent
    tokens: int
    checksum: str


def prepare(ground: Ground, corpus: Path, engine: str, workers: int, *, watch: bool = False) -> Made:
    """`seqmesh prepare` as a person types it, on a core for each worker: one alone would use threads."""
    with ground.new_folder() as out, on_cores(workers):
        options = ["--out", str(out), "--tokenizer", str(ground.tokenizer), "--engine", engine]
        spent = spend([*CLI, "prepare", str(corpus), *options, "--workers", str(workers)], watch=watch)
        return _made(spent, list(mapped_ids(out)))


def prepare_peer(ground: Ground, corpus: Path, peer: str) -> Made:
    """The same by others, in one process, by the peer's own interpreter; it finds this package through a link in a
    folder of its own, and nothing else of this environment."""
    with ground.new_folder() as out, TemporaryDirectory(dir=ground.scratch) as own:
        (Path(own) / "seqmesh").symlink_to(PACKAGE)
        job = Job(peer=peer, corpus=str(corpus), tokenizer=str(ground.tokenizer), end=END_OF_DOCUMENT, out=str(out))
        command = [interpreter_of(peer), "-P", "-m", peers_preparing.__name__, json.dumps(asdict(job))]
        places = {"PYTHONPATH": own, "TMPDIR": own, "HF_HOME": own, "HF_HUB_OFFLINE": "1"}
        spent = spend(command, environment={**places, "TOKENIZERS_PARALLELISM": "false"})
        return _made(spent, _datatrove_ids(out) if peer == DATATROVE else _datasets_ids(out))


def interpreter_of(peer: str) -> str:
    """datatrove's own environment, where there is one. The other needs only what is here: the library tokenizers."""
    own = Path(os.environ.get(ENVIRONMENTS, "")) / DATATROVE / "bin" / "python"
    return str(own) if peer == DATATROVE and ENVIRONMENTS in os.environ and own.exists() else sys.executable


def version_of(peer: str) -> str | None:
    """The version of a peer, None where it is not installed."""
    if (interpreter := interpreter_of(peer)) == sys.executable:
        return installed_version(peer)
    asked = f"import importlib.metadata; print(importlib.metadata.version({peer!r}))"
    return subprocess.run([interpreter, "-I", "-c", asked], capture_output=True, text=True).stdout.strip() or None


def prepare_bare(ground: Ground, corpus: Path, engine: str, workers: int) -> Bare:
    """The engine alone, on as many cores."""
    with on_cores(workers):
        return encode_bare(corpus, ground.tokenizer, engine, workers)


def _made(spent: Spent, parts: list[Ids]) -> Made:
    digest = xxhash.xxh3_128()
    for ids in parts:
        digest.update(ids.astype(np.uint32).tobytes())
    return Made(spent=spent, tokens=sum(map(len, parts)), checksum=digest.hexdigest())


def _datatrove_ids(out: Path) -> list[Ids]:
    """Of two bytes each, for vocabularies up to 65,535."""
    (path,) = out.glob("*.ds")
    return [np.fromfile(path, np.uint16)]


def _datasets_ids(out: Path) -> list[Ids]:
    found = []
    for path in sorted(out.glob(ARROW)):
        with pa.ipc.open_stream(pa.memory_map(str(path))) as reader:
            columns: Any = [batch.column("input_ids") for batch in reader]
            found += [column.flatten().to_numpy() for column in columns]
    return found
