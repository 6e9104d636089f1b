"""What was saved by any number of ranks in any spread is loaded by any other, bit for bit."""

from pathlib import Path

from safetensors.torch import load_file

from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.checkpoints.parts import local_of
from seqmesh.trainer.checkpoints.read import read_model
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Part, Saved
from tests.checkpoints import ALONE, SHAPES, SPREADS, STATE, same, saver_of, spread, whole_tensors, zeros
from tests.ranks import run_ranks

ALONE_SPREADS = ("plain", "rows")  # the others need a process group


def load_then_save(ranks: Ranks, folder: Path, spreads: tuple[str, ...] = SPREADS) -> list[list[int]]:
    """Load everything that is there in all spreads, then save in all spreads; for each load the bytes that every kind
    of tensor had this rank read: in all, and of parts."""
    counts = []
    for run in sorted(folder.iterdir()):
        path = newest_checkpoint(run, ranks, print)
        assert path is not None
        seed = int(path.name[-8:])
        for how in spreads:
            expected = spread(whole_tensors(seed), how, ranks)
            tensors = zeros(spread(whole_tensors(0), how, ranks))
            found = load(path, tensors, ranks)
            assert same(tensors, expected), (run.name, how, ranks.rank)
            assert found.state["loader"] == STATE["loader"]
            counts.append([found.bytes_read, own_bytes(tensors)])
    for number, how in enumerate(spreads):
        step = 10 * ranks.count + number + 1
        tensors = spread(whole_tensors(step), how, ranks)
        with saver_of(folder / f"{ranks.count}-{how}", tensors, ranks, background=True) as saver:
            saver.save(step, tensors, STATE)
    return counts


def own_bytes(tensors: Saved) -> int:
    """Of tensors that lie on several ranks, what this one has."""
    return sum(local_of(value).nbytes for value in tensors.values() if isinstance(value, Part))


def test_every_spread_on_every_number_of_ranks(tmp_path: Path) -> None:
    load_then_save(ALONE, tmp_path, ALONE_SPREADS)
    total = sum(value.nbytes for value in whole_tensors(0).values())
    for count in (2, 3, 4, 2):
        for results in zip(*run_ranks(load_then_save, count, tmp_path), strict=True):
            read, own = (list(column) for column in zip(*results, strict=True))
            if any(own):
                assert read == own  # a rank reads its rows and no others
            elif sum(read) == total:
                assert max(read) <= 0.7 * total  # whole tensors are read once, by several ranks
    assert len(load_then_save(ALONE, tmp_path, ALONE_SPREADS)) == 2 * (len(ALONE_SPREADS) + 3 * len(SPREADS))
    for run in tmp_path.iterdir():
        (path,) = run.iterdir()
        expected = whole_tensors(int(path.name[-8:]))
        files = [load_file(file) for file in path.glob("rank-*.safetensors")]
        assert sum(tensor.numel() for file in files for tensor in file.values()) == sum(
            tensor.numel() for tensor in expected.values()
        )
        assert same(
            dict(read_model(path)), {n.removeprefix("model/"): expected[n] for n in SHAPES if n.startswith("model/")}
        )
