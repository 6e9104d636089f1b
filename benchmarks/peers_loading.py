"""Loaders that others publish, each on the same documents, in a process that needs only numpy and the one it measures.

    python peers_loading.py JOB     # JSON of a `Job`; answers with JSON on the last line of its output

`export` writes the documents in the format that a peer wants; `read` reads them once and says what that took. A corpus
is a folder with `tokens.bin` (int32) and `lengths.npy`. Documents are shuffled where the peer can, and what comes are
batches of about `pack` tokens. Peers are asked in the way that their own guides show, with `workers` processes.

This file is run by a peer's own interpreter, so it imports nothing of seqmesh; `peers_reading` starts it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 4_096  # tokens of those that read blocks of a fixed size
SHARD_DOCUMENTS = 4_096  # of a tar file, a parquet file or a chunk of a column
SHUFFLE_BUFFER = 1_000  # documents, where a peer shuffles in a buffer
SEED = 7
TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in /proc

Int32Array = npt.NDArray[np.int32]


class Corpus:
    """The first `documents` documents of a corpus folder. tokens: memory-mapped; copy on write, since torch warns of
    memory that can not be written. bounds: document i is tokens bounds[i] to bounds[i + 1]. A worker that gets it
    opens it again."""

    def __init__(self, folder: Path, documents: int) -> None:
        self.folder, self.documents = folder, documents
        self.lengths: npt.NDArray[np.int64] = np.load(folder / "lengths.npy")[:documents]
        self.bounds: list[int] = [0, *np.cumsum(self.lengths).tolist()]
        self.tokens: Int32Array = np.memmap(folder / "tokens.bin", np.int32, mode="c")

    def __reduce__(self) -> tuple[type[Corpus], tuple[Path, int]]:
        return Corpus, (self.folder, self.documents)

    def document(self, index: int) -> Int32Array:
        return self.tokens[self.bounds[index] : self.bounds[index + 1]]

    def packs(self, pack: int) -> Iterator[list[int]]:
        """All documents in a shuffled order, as many in each pack as fit."""
        lengths = self.lengths.tolist()
        chosen: list[int] = []
        room = pack
        for index in np.random.default_rng(SEED).permutation(len(lengths)).tolist():
            if lengths[index] > room and chosen:
                yield chosen
                chosen, room = [], pack
            chosen.append(index)
            room -= lengths[index]
        if chosen:
            yield chosen

    def documents_of(self, pack: int) -> int:
        """How many documents have `pack` tokens on average."""
        return max(1, round(pack / float(self.lengths.mean())))


Export = Callable[[Corpus, Path], None]
Read = Callable[[Corpus, Path, int, int], Iterable[Any]]  # corpus, exported, tokens of a pack, workers


def nothing(_corpus: Corpus, _folder: Path) -> None:
    """For peers that map the corpus as it is."""


def concatenated(documents: list[Any]) -> tuple[Any, Any]:
    """Arrays or tensors one after the other, as a tensor, and the boundaries."""
    torch = import_module("torch")
    lengths = torch.tensor([0, *map(len, documents)], dtype=torch.int32)
    return torch.cat([torch.as_tensor(each) for each in documents]), lengths.cumsum(0, dtype=torch.int32)


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


def columns(corpus: Corpus) -> Iterator[Any]:
    """The documents as Arrow tables of one column, SHARD_DOCUMENTS rows each."""
    arrow = import_module("pyarrow")
    for first in range(0, len(corpus.lengths), SHARD_DOCUMENTS):
        bounds = np.array(corpus.bounds[first : first + SHARD_DOCUMENTS + 1])
        values = arrow.array(corpus.tokens[bounds[0] : bounds[-1]])
        yield arrow.table({"tokens": arrow.ListArray.from_arrays(arrow.array(bounds - bounds[0], "int32"), values)})


def export_datasets(corpus: Corpus, folder: Path) -> None:
    table = import_module("pyarrow").concat_tables(columns(corpus))
    import_module("datasets").Dataset(import_module("datasets.table").InMemoryTable(table)).save_to_disk(str(folder))


def concatenated_rows(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    return concatenated([row["tokens"] for row in rows])


def read_datasets(corpus: Corpus, folder: Path, pack: int, workers: int) -> Iterator[Any]:
    dataset = import_module("datasets").load_from_disk(str(folder)).with_format("torch")
    loader = import_module("torch.utils.data").DataLoader
    return map_style(loader, dataset, corpus, pack, workers, concatenated_rows)


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


def gathered(corpus: Corpus, indices: list[int]) -> tuple[Int32Array, npt.NDArray[np.int32]]:
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
        slow=True,
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
    """rival: a name of RIVALS. action: `export`, `read` or `version`. corpus: the folder; documents: the first so many
    of it. exported: where the rival's own format is, or goes. pack: tokens of a batch."""

    rival: str
    action: str
    corpus: str = ""
    documents: int = 0
    exported: str = ""
    pack: int = 0
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: seconds on the wall, of CPU in this process, of CPU in it and all that it started."""

    wall: float
    trainer: float
    total: float

    @classmethod
    def now(cls) -> Mark:
        own = time.process_time()
        return cls(time.monotonic(), own, own + cpu_of_children())

    def since(self, earlier: Mark) -> dict[str, float]:
        return {
            "wall": self.wall - earlier.wall,
            "trainer": self.trainer - earlier.trainer,
            "total": self.total - earlier.total,
        }


def cpu_of_children() -> float:
    """CPU seconds of the processes that this one started, and that they started: those that have ended and were
    waited for, and those that live (to a hundredth of a second)."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return waited.ru_utime + waited.ru_stime + sum(map(_cpu_of, descendants(os.getpid())))


def descendants(pid: int) -> list[int]:
    """Processes under `pid` that live, at any depth."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and (fields := _stat(int(each.name))):
            children.setdefault(int(fields[1]), []).append(int(each.name))
    found = children.get(pid, [])
    for each_child in found:  # grows while it is read
        found.extend(children.get(each_child, []))
    return found


def _cpu_of(pid: int) -> float:
    """In user and system mode, of the process and of its children that it waited for."""
    return sum(map(int, _stat(pid)[11:15])) / TICKS


def _stat(pid: int) -> list[str]:
    """The kernel's account of a process from its state on (man 5 proc); empty where it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


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
    if job.action == "version":
        return {"version": version(rival.package)}
    if job.action == "export":
        rival.export(Corpus(Path(job.corpus), job.documents), Path(job.exported))
        return {}
    return measure(job)


if __name__ == "__main__":
    answer = carry_out(Job(**json.loads(sys.argv[1])))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
