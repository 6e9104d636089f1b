"""Loaders that others publish, each on the same documents, in a process that needs only numpy and the one it measures.

    python -m seqmesh.benchmarks.peers_loading JOB     # JSON of a `Job`; answers with JSON on its last line

`export` writes the documents in the format that a peer wants; `read` reads them once and says what that took.
Documents are shuffled where the peer can, and what comes are batches of about `pack` tokens. Peers are asked in the
way that their own guides show, with `workers` processes. It is run by a peer's own interpreter (see `peers_reading`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from seqmesh.benchmarks.peers_corpus import BLOCK, Corpus
from seqmesh.benchmarks.peers_mapped import (
    export_datasets,
    export_megatron,
    read_datasets,
    read_megatron,
    read_spdl,
    read_torch,
    read_torchdata,
)
from seqmesh.benchmarks.peers_streamed import (
    export_litdata,
    export_ray,
    export_streaming,
    export_webdataset,
    read_grain,
    read_grain_first_fit,
    read_litdata,
    read_ray,
    read_streaming,
    read_torchtitan,
    read_webdataset,
)
from seqmesh.benchmarks.processes import Mark

Export = Callable[[Corpus, Path], None]
Read = Callable[[Corpus, Path, int, int], Iterable[Any]]  # corpus, exported, tokens of a pack, workers


def nothing(_corpus: Corpus, _folder: Path) -> None:
    """For peers that map the corpus as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """package: the distribution whose version counts. modules: imported before the clock starts. workers: in how many
    processes it is measured. gives: what its batches are. environment: the folder of its interpreter, its name where
    not given. exact: delivers every token once; one that does not leaves out ends of chunks or of the whole.
    slow: takes seconds to start or for ten million tokens; it is given fewer documents."""

    package: str
    modules: tuple[str, ...]
    workers: tuple[int, ...]
    gives: str
    read: Read
    export: Export = nothing
    environment: str = ""
    exact: bool = True
    slow: bool = False


WHOLE = "whole documents to the pack's size, boundaries"
COUNTED = "a fixed number of documents, boundaries"
RIVALS = {
    "torch": Rival(package="torch", modules=("torch",), workers=(0, 1), gives=WHOLE, read=read_torch),
    "torchdata": Rival(
        package="torchdata",
        modules=("torchdata.stateful_dataloader",),
        workers=(0, 1),
        gives=f"{WHOLE}, resumable",
        read=read_torchdata,
    ),
    "litdata": Rival(
        package="litdata",
        modules=("litdata",),
        workers=(0, 1),
        gives=f"blocks of {BLOCK} tokens, no boundaries, ends of chunks left out",
        export=export_litdata,
        read=read_litdata,
        exact=False,
    ),
    "datasets": Rival(
        package="datasets",
        modules=("torch", "datasets"),
        workers=(0, 1),
        gives=WHOLE,
        export=export_datasets,
        read=read_datasets,
    ),
    "spdl": Rival(
        package="spdl", modules=("spdl.pipeline",), workers=(0, 1), gives=f"{WHOLE}, numpy arrays", read=read_spdl
    ),
    "megatron": Rival(
        package="megatron-core",
        modules=("torch", "megatron.core.datasets.indexed_dataset"),
        workers=(0, 1),
        gives=WHOLE,
        export=export_megatron,
        read=read_megatron,
        slow=True,
    ),
    "grain": Rival(
        package="grain",
        modules=("grain", "grain.experimental"),
        workers=(0, 1),
        gives="documents cut to fill every pack, segment ids and positions, numpy arrays, the end padded",
        read=read_grain,
        slow=True,
    ),
    "grain_first_fit": Rival(
        package="grain",
        modules=("grain", "grain.experimental"),
        workers=(1,),
        gives="whole documents packed first fit, padded, segment ids and positions, numpy arrays",
        environment="grain",
        read=read_grain_first_fit,
        slow=True,
    ),
    "webdataset": Rival(
        package="webdataset",
        modules=("torch", "webdataset"),
        workers=(0, 1),
        gives=f"{COUNTED}, shuffled in a buffer",
        export=export_webdataset,
        read=read_webdataset,
        slow=True,
    ),
    "streaming": Rival(
        package="mosaicml-streaming",
        modules=("torch", "streaming"),
        workers=(0, 1),
        gives=f"{COUNTED}, resumable",
        export=export_streaming,
        read=read_streaming,
        slow=True,
    ),
    "ray": Rival(
        package="ray",
        modules=("ray.data",),
        workers=(1,),
        gives="a fixed number of documents, files shuffled, numpy arrays",
        export=export_ray,
        read=read_ray,
    ),
    "torchtitan": Rival(
        package="torchtitan",
        modules=("torch", "datasets", "torchtitan.hf_datasets.text_datasets"),
        workers=(0, 1),
        gives="documents cut to fill every pack, labels and positions, not shuffled, the end left out, resumable",
        export=export_datasets,
        read=read_torchtitan,
        exact=False,
        slow=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """rival: a name of RIVALS. action: `export` or `read`. corpus: the folder; documents: the first so many
    of it. exported: where the rival's own format is, or goes. pack: tokens of a batch."""

    rival: str
    action: str
    corpus: str = ""
    documents: int = 0
    exported: str = ""
    pack: int = 0
    workers: int = 0


def measure(job: Job) -> dict[str, Any]:
    """Read all batches. first: from asking for the loader to the first batch. rest: from there to the end, with the
    tokens that came in it. imports: CPU seconds before. Prefetching by workers begins before the first batch has come,
    and what they are ahead then is not in `rest`: a few batches."""
    rival, corpus = RIVALS[job.rival], Corpus(Path(job.corpus), job.documents)
    for module in rival.modules:
        import_module(module)
    begin = Mark.now()
    with closing(_generated(rival.read(corpus, Path(job.exported), job.pack, job.workers))) as batches:
        head = sum(map(_size, islice(batches, 1)))
        first = Mark.now()
        rest = sum(map(_size, batches))
    end = Mark.now()
    return {
        "tokens": head + rest,
        "rest_tokens": rest,
        "imports": begin.trainer,
        "first": first.since(begin),
        "rest": end.since(first),
    }


def _generated(batches: Iterable[Any]) -> Generator[Any, None, None]:
    yield from batches


def _size(batch: Any) -> int:
    return int(batch.numel() if hasattr(batch, "numel") else batch.size)


def carry_out(job: Job) -> dict[str, Any]:
    rival = RIVALS[job.rival]
    if job.action == "export":
        rival.export(Corpus(Path(job.corpus), job.documents), Path(job.exported))
        return {}
    return measure(job)


if __name__ == "__main__":
    answer = carry_out(Job(**json.loads(sys.argv[1])))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
