from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from seqmesh.tools.report import run, summary_table
from seqmesh.trainer.monitor import JsonLines, StepClock, make_record, read_steps
from seqmesh.trainer.step import StepResult


def write_run(folder: Path, steps: int) -> None:
    log = JsonLines(folder / "log.jsonl")
    for step in range(1, steps + 1):
        clock = StepClock()
        clock.spans = [("data", 0.1), ("compute", 0.3)]
        result = StepResult(
            loss=10 / step, grad_norm=1.0, fill=0.9, rows=1000, layer_pairs=0, lr=1e-3, updated=step != 2
        )
        log.write(
            make_record(result, clock, step=step, epoch=0, tokens=1000, rings=3, ring_bytes=1 << 20, imbalance=1.1)
        )
    log.close()


def test_the_table_says_what_the_log_says(tmp_path: Path) -> None:
    write_run(tmp_path, 4)
    console = Console(record=True, width=100, file=(tmp_path / "out").open("w"))
    console.print(summary_table(list(read_steps(tmp_path / "log.jsonl").values())))
    text = console.export_text()
    for part in ("4,000", "10.000 → 2.500", "90.0%", "1.1000", "updates skipped"):
        assert part in text
    console.file.close()


@pytest.mark.parametrize("steps", [1, 30])
def test_the_picture_is_a_picture(tmp_path: Path, steps: int) -> None:
    write_run(tmp_path, steps)
    with (tmp_path / "out").open("w") as out:
        picture = run(folder=tmp_path, console=Console(file=out))
    with Image.open(picture) as image:
        assert image.size == (1080, 1080)
        colors = image.convert("RGB").getcolors(1 << 20)
        assert colors is not None
        assert len(colors) > 50  # not blank
    assert str(picture) in (tmp_path / "out").read_text()


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no training run"):
        run(folder=tmp_path)
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match="holds no step yet"):
        run(folder=tmp_path)
