"""Peers that are asked for documents by their numbers, in packs that their user plans: see `peers_loading.RIVALS`.

`export_NAME(corpus, folder)` writes what a peer wants, `read_NAME(corpus, folder, pack, workers)` gives its batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from seqmesh.benchmarks.peers_corpus import Corpus, Int32Array, columns, concatenated, concatenated_rows


class Mapped:
    """A map-style data set of the memory-mapped documents, as tensors."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return len(self.corpus.lengths)

    def __getitem__(self, index: int) -> Any:
        return import_module("torch").from_numpy(self.corpus.document(index))


def map_style(loader: Any, dataset: Any, corpus: Corpus, pack: int, workers: int, collate: Any) -> Iterator[Any]:
    """A data set with an index, read in the order of our packs, by torch's loader or one that takes the same."""
    sampler = list(corpus.packs(pack))
    for tokens, _ in loader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=workers):
        yield tokens


def read_torch(corpus: Corpus, _folder: Path, pack: int, workers: int) -> Iterator[Any]:
    loader = import_module("torch.utils.data").DataLoader
    return map_style(loader, Mapped(corpus), corpus, pack, workers, concatenated)


def read_torchdata(corpus: Corpus, _folder: Path, pack: int, workers: int) -> Iterator[Any]:
    loader = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return map_style(loader, Mapped(corpus), corpus, pack, workers, concatenated)


def export_datasets(corpus: Corpus, folder: Path) -> None:
    table = import_module("pyarrow").concat_tables(columns(corpus))
    import_module("datasets").Dataset(import_module("datasets.table").InMemoryTable(table)).save_to_disk(str(folder))


def read_datasets(corpus: Corpus, folder: Path, pack: int, workers: int) -> Iterator[Any]:
    dataset = import_module("datasets").load_from_disk(str(folder)).with_format("torch")
    loader = import_module("torch.utils.data").DataLoader
    return map_style(loader, dataset, corpus, pack, workers, concatenated_rows)


def export_megatron(corpus: Corpus, folder: Path) -> None:
    indexed, torch = import_module("megatron.core.datasets.indexed_dataset"), import_module("torch")
    folder.mkdir()
    builder = indexed.IndexedDatasetBuilder(str(folder / "set.bin"), dtype=np.int32)
    for index in range(len(corpus.lengths)):
        builder.add_document(torch.from_numpy(corpus.document(index)), [int(corpus.lengths[index])])
    builder.finalize(str(folder / "set.idx"))


def read_megatron(corpus: Corpus, folder: Path, pack: int, workers: int) -> Iterator[Any]:
    dataset = import_module("megatron.core.datasets.indexed_dataset").IndexedDataset(str(folder / "set"))
    loader = import_module("torch.utils.data").DataLoader
    return map_style(loader, dataset, corpus, pack, workers, concatenated)


def gathered(corpus: Corpus, indices: list[int]) -> tuple[Int32Array, Int32Array]:
    """Documents one after the other, and the boundaries, by numpy alone."""
    documents = [corpus.document(index) for index in indices]
    return np.concatenate(documents), np.cumsum([0, *map(len, documents)], dtype=np.int32)


def read_spdl(corpus: Corpus, _folder: Path, pack: int, workers: int) -> Iterator[Any]:
    """One thread that gathers, in this process or in a worker."""
    spdl = import_module("spdl.pipeline")
    builder = spdl.PipelineBuilder().add_source(corpus.packs(pack) if not workers else list(corpus.packs(pack)))
    builder = builder.pipe(partial(gathered, corpus)).add_sink(3)
    if workers:
        for tokens, _ in spdl.run_pipeline_in_subprocess(builder.get_config(), num_threads=1):
            yield tokens
        return
    pipeline = builder.build(num_threads=1)
    with pipeline.auto_stop():
        for tokens, _ in pipeline:
            yield tokens
