"""Ways of others from JSONL to token ids on the disk, each in a process that needs only numpy and the one it measures.

    python -m seqmesh.benchmarks.peers_preparing JOB     # JSON of a `Job`

One process, no worker, asked in the way that their own guides show; the token that ends documents comes behind each.
The whole process is timed from outside. It is run by a peer's own interpreter, where it has one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

DATATROVE, DATASETS = "datatrove", "datasets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """corpus: a JSONL file. tokenizer: a tokenizer.json. end: its token behind each document. out: a new folder."""

    peer: str
    corpus: str
    tokenizer: str
    end: str
    out: str


def with_datatrove(job: Job) -> None:
    """Its own format: ids in one .ds file, ends of documents in the index beside it."""
    pipeline, corpus = import_module("datatrove.pipeline.readers"), Path(job.corpus)
    reader = pipeline.JsonlReader(str(corpus.parent), glob_pattern=corpus.name)
    tokenizer = import_module("datatrove.pipeline.tokens").DocumentTokenizer(
        output_folder=job.out, tokenizer_name_or_path=job.tokenizer, eos_token=job.end, shuffle_documents=False
    )
    executor = import_module("datatrove.executor").LocalPipelineExecutor(
        pipeline=[reader, tokenizer], tasks=1, workers=1, logging_dir=f"{job.out}-logs"
    )
    executor.run()


def with_datasets(job: Job) -> None:
    """`map` in batches of a thousand with the library tokenizers, saved as Arrow files."""
    datasets = import_module("datasets")
    tokenizer = import_module("tokenizers").Tokenizer.from_file(job.tokenizer)
    end = tokenizer.token_to_id(job.end)

    def encoded(batch: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[*each.ids, end] for each in found]}

    texts = datasets.load_dataset("json", data_files=job.corpus, split="train", cache_dir=f"{job.out}-cache")
    texts.map(encoded, batched=True, remove_columns=texts.column_names).save_to_disk(job.out)


PEERS: dict[str, Callable[[Job], None]] = {DATATROVE: with_datatrove, DATASETS: with_datasets}

if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[1]))
    PEERS[asked.peer](asked)
