"""Damage: whatever happens to a byte or a file of a checkpoint is found, by name, before anything is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.checkpoints.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    CheckpointError,
    DamageError,
    problems,
    strangers,
    verify,
)
from seqmesh.trainer.part import Saved, whole
from tests.checkpoints import ALONE, GRID, is_step, plain_tensors, save_alone

FILES = ("rank-00000.safetensors", STATE, TENSORS, MANIFEST)
SAMPLES = 150  # bytes of each file that are changed


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_alone(tmp_path_factory.mktemp("run"), [1, 2])


def flip(path: Path, place: int, bit: int = 4) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ bit]))


@pytest.mark.parametrize("name", FILES)
def test_every_byte_counts(two: list[Path], name: str) -> None:
    path = two[1] / name
    size = path.stat().st_size
    for place in sorted({0, size - 1, *range(0, size, max(size // SAMPLES, 1))}):
        bit = 1 << place % 8
        flip(path, place, bit)
        with pytest.raises(DamageError, match=name):
            verify(two[1])
        flip(path, place, bit)
    verify(two[1])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("damage", [cut, lengthen, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_by_name(
    two: list[Path], name: str, damage: Callable[[Path], None]
) -> None:
    path = two[1] / name
    content = path.read_bytes()
    damage(path)
    said: list[str] = []
    assert newest_checkpoint(two[0].parent, ALONE, said.append) == two[0]
    (word,) = said
    assert word.startswith("passed over: ")
    assert str(two[1]) in word
    assert name in word
    path.write_bytes(content)
    assert newest_checkpoint(two[0].parent, ALONE, said.append) == two[1]


def test_every_share_is_somebodys_and_strangers_do_no_harm(two: list[Path]) -> None:
    flip(two[1] / TENSORS, 9)
    flip(two[1] / "rank-00000.safetensors", 9)
    (two[1] / "notes.txt").write_text("mine")
    found = [word for share in range(3) for word in problems(two[1], share=share, shares=3)]
    assert sorted(found) == sorted(problems(two[1]))
    assert len(found) == 2
    flip(two[1] / TENSORS, 9)
    flip(two[1] / "rank-00000.safetensors", 9)
    assert strangers(two[1]) == ["notes.txt"]
    (two[1] / "notes.txt").unlink()
    assert is_step(two[1], 2)


def test_another_version_is_refused_not_passed_over(tmp_path: Path) -> None:
    _, second = save_alone(tmp_path, [1, 2])
    (second / MANIFEST).write_text(json.dumps({"version": 1, "files": {"state.json": "0" * 32}}, indent=1))
    with pytest.raises(
        CheckpointError, match="step-00000002: has version 1, this seqmesh reads 2: finish the run with"
    ):
        newest_checkpoint(tmp_path, ALONE, print)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model/norm"), "it holds model/norm, which the model has not"),
        (
            lambda tensors: tensors.update({"model/norm": whole(tensors["model/norm"].local[:3])}),
            r"model/norm is .* \[6\] there and",
        ),
        (lambda tensors: tensors.update({"model/norm": whole(tensors["model/norm"].local.float())}), "float32 .* here"),
    ],
)
def test_tensors_that_do_not_fit_are_named(two: list[Path], change: Callable[[Saved], object], words: str) -> None:
    tensors = plain_tensors(0)
    change(tensors)
    with pytest.raises(CheckpointError, match=f"does not fit this model: .*{words}"):
        load(two[1], tensors, GRID)


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (path,) = save_alone(tmp_path, [1])
    text = (path / TENSORS).read_text()
    (path / TENSORS).write_text(text.replace('"rank-', '"../rank-'))
    with pytest.raises(DamageError, match="is not a name of a file"):
        load(path, plain_tensors(0), GRID)
