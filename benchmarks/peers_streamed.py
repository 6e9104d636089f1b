"""Peers that decide by themselves which documents come next: see `peers_loading.RIVALS`.

`export_NAME(corpus, folder)` writes what a peer wants, `read_NAME(corpus, folder, pack, workers)` gives its batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from seqmesh.benchmarks.peers_corpus import (
    BLOCK,
    SEED,
    SHARD_DOCUMENTS,
    SHUFFLE_BUFFER,
    Corpus,
    Int32Array,
    columns,
    concatenated,
    concatenated_rows,
)


def litdata_document(corpus: Corpus, index: int) -> Iterator[Any]:
    yield import_module("torch").tensor(corpus.document(index))


def export_litdata(corpus: Corpus, folder: Path) -> None:
    litdata = import_module("litdata")
    litdata.optimize(
        fn=partial(litdata_document, corpus),
        inputs=list(range(len(corpus.lengths))),
        output_dir=str(folder),
        chunk_bytes="64MB",
        num_workers=1,
        item_loader=litdata.TokensLoader(),
    )


def read_litdata(_corpus: Corpus, folder: Path, pack: int, workers: int) -> Iterable[Any]:
    litdata = import_module("litdata")
    dataset = litdata.StreamingDataset(str(folder), item_loader=litdata.TokensLoader(block_size=BLOCK), shuffle=True)
    loader: Iterable[Any] = litdata.StreamingDataLoader(dataset, batch_size=pack // BLOCK, num_workers=workers)
    return loader


class Ids:
    """In the place of torchtitan's tokenizer: documents are tokens already."""

    def encode(self, ids: list[int], **_options: bool) -> list[int]:
        return ids


def read_torchtitan(_corpus: Corpus, folder: Path, pack: int, workers: int) -> Iterator[Any]:
    """Its text data set, given tokens for text. It reads what `export_datasets` wrote, in order in the first pass."""
    titan, load = import_module("torchtitan.hf_datasets.text_datasets"), import_module("datasets").load_from_disk
    config = import_module("torchtitan.hf_datasets").DatasetConfig
    titan.DATASETS["corpus"] = config(path=str(folder), loader=load, sample_processor=itemgetter("tokens"))
    dataset = titan.HuggingFaceTextDataset("corpus", None, Ids(), seq_len=pack)
    loader = import_module("torch.utils.data").DataLoader
    for inputs, _labels in loader(dataset, batch_size=None, num_workers=workers):
        yield inputs["input"]


class Documents:
    """A source with an index, of dictionaries of arrays."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return len(self.corpus.lengths)

    def __getitem__(self, index: int) -> dict[str, Int32Array]:
        return {"tokens": self.corpus.document(index)}


def grain_packs(packing: str, corpus: Corpus, pack: int, workers: int, **options: Any) -> Any:
    """Documents in a shuffled order, packed by one of grain's classes, in this process or in one worker."""
    grain = import_module("grain")
    inline = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    source = grain.MapDataset.source(Documents(corpus)).shuffle(seed=SEED).to_iter_dataset(inline)
    packed = getattr(import_module("grain.experimental"), packing)(source, length_struct={"tokens": pack}, **options)
    return packed.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)) if workers else packed


def read_grain(corpus: Corpus, _folder: Path, pack: int, workers: int) -> Iterator[Any]:
    yield from map(without_padding, grain_packs("ConcatThenSplitIterDataset", corpus, pack, workers))


def read_grain_first_fit(corpus: Corpus, _folder: Path, pack: int, workers: int) -> Iterator[Any]:
    packs = grain_packs("FirstFitPackIterDataset", corpus, pack, workers, num_packing_bins=16)
    yield from map(without_padding, packs)


def without_padding(pack: dict[str, Any]) -> Any:
    """Rows after the last document belong to segment 0."""
    return pack["tokens"][: np.count_nonzero(pack["tokens_segment_ids"])]


def export_streaming(corpus: Corpus, folder: Path) -> None:
    with import_module("streaming").MDSWriter(out=str(folder), columns={"tokens": "ndarray:int32"}) as writer:
        for index in range(len(corpus.lengths)):
            writer.write({"tokens": np.array(corpus.document(index))})


def read_streaming(corpus: Corpus, folder: Path, pack: int, workers: int) -> Iterator[Any]:
    size = corpus.documents_of(pack)
    dataset = import_module("streaming").StreamingDataset(local=str(folder), shuffle=True, batch_size=size)
    loader = import_module("torch.utils.data").DataLoader
    for tokens, _ in loader(dataset, batch_size=size, collate_fn=concatenated_rows, num_workers=workers):
        yield tokens


def export_webdataset(corpus: Corpus, folder: Path) -> None:
    folder.mkdir()
    with import_module("webdataset").ShardWriter(f"{folder}/%05d.tar", maxcount=SHARD_DOCUMENTS, verbose=0) as writer:
        for index in range(len(corpus.lengths)):
            writer.write({"__key__": f"{index:08d}", "npy": np.array(corpus.document(index))})


def read_webdataset(corpus: Corpus, folder: Path, pack: int, workers: int) -> Iterator[Any]:
    webdataset = import_module("webdataset")
    files = sorted(map(str, folder.glob("*.tar")))
    dataset = webdataset.WebDataset(files, shardshuffle=len(files), empty_check=False).shuffle(SHUFFLE_BUFFER)
    rows = dataset.decode().to_tuple("npy").batched(corpus.documents_of(pack), collation_fn=concatenated_tuples)
    for tokens, _ in webdataset.WebLoader(rows, batch_size=None, num_workers=workers):
        yield tokens


def concatenated_tuples(rows: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    return concatenated([row[0] for row in rows])


def export_ray(corpus: Corpus, folder: Path) -> None:
    folder.mkdir()
    for number, table in enumerate(columns(corpus)):
        import_module("pyarrow.parquet").write_table(table, folder / f"{number:05d}.parquet", compression="none")


def read_ray(corpus: Corpus, folder: Path, pack: int, _workers: int) -> Iterator[Any]:
    ray = import_module("ray")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.read_parquet(str(folder), shuffle="files")
    for batch in rows.iter_batches(batch_size=corpus.documents_of(pack), batch_format="pyarrow"):
        yield batch["tokens"].combine_chunks().flatten().to_numpy()
