"""`seqmesh ledger`: tables for people, JSON for programs, a sentence where there is no answer."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from seqmesh.loader.embedded import Loader
from seqmesh.loader.ledger import recorder
from seqmesh.loader.ledger.reading import Ledger
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.stream import StreamState
from seqmesh.tools import ledger as command
from tests.support import long_tail, make_set, settings_for
from tests.tools.test_cli import seqmesh

NAMES = ["code" if n % 3 == 0 else "web" for n in range(60)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_set(tmp_path / "set", long_tail(60, 40), sources=NAMES)


@pytest.fixture
def folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a job that was killed and resumed: steps 0 to 4, then 3 to the end; a record batch for each."""
    monkeypatch.setattr(recorder, "MOST_BEGINNINGS", 1)
    settings = settings_for(data, ranks=2, capacity=24, max_document=40)
    options, state = ServeOptions(ledger=str(tmp_path / "ledger")), None
    for last in (4, 99):
        with Loader(settings, rank=0, mode="inline", options=options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                if batch.last_in_step and batch.step == 2:
                    state = loader.state_dict()
                if batch.last_in_step and batch.step == last:
                    break
    return tmp_path / "ledger"


def said(**options: Any) -> str:
    console = Console(width=300, record=True, file=StringIO())
    command.run(console=console, **options)
    return re.sub(r" +", " ", console.export_text())


def test_a_step_is_told_by_rank_and_document(folder: Path, tmp_path: Path) -> None:
    text = said(folder=folder, step=1, documents=True, json_path=tmp_path / "out.json")
    (record,) = Ledger(folder).recorded(1)
    assert f"step 1, epoch 0, served {record.time:%Y-%m-%d %H:%M:%S} UTC by " in text
    assert f" tokens {record.tokens} " in text
    for rank, row in enumerate(zip(record.waves, *record.by_rank(), strict=True)):
        assert f" {rank} {' '.join(map(str, row))} \n" in text
    for row, offset, length, ranks in zip(record.document, record.offset, record.length, record.ranks_of, strict=True):
        assert f" {row} {row} {NAMES[row]} {offset} {length} {' '.join(map(str, ranks))} \n" in text
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["step"], found["times_served"], len(found["records"])) == (1, 1, 1)
    assert StreamState.from_dict(found["records"][0]["before"]) == record.before
    assert [each["row"] for each in found["records"][0]["documents"]] == record.document.tolist()


def test_a_step_that_was_served_twice_says_so(folder: Path) -> None:
    assert said(folder=folder, step=3).startswith("served 2 times; the latest (--all: each):\nstep 3")
    assert said(folder=folder, step=3, every=True).count("step 3, epoch 0, served") == 2


def test_without_the_data_documents_have_numbers(folder: Path, data: Path, tmp_path: Path) -> None:
    data.rename(tmp_path / "moved")
    text = said(folder=folder, step=1, documents=True)
    assert "the data are not there: " in text
    row = Ledger(folder).recorded(1)[0].document[0]
    assert f"\n {row} - - 0 " in text
    text = said(folder=folder, step=1, documents=True, data=str(tmp_path / "moved"))
    assert f"\n {row} {row} {NAMES[row]} 0 " in text


def test_the_summary_tells_steps_runs_and_gaps(folder: Path, tmp_path: Path) -> None:
    last = int(Ledger(folder).steps[-1])
    text = said(folder=folder)
    assert f"steps 0 to {last}, {last + 1} recorded\n" in text
    assert re.search(rf"\n 0 .* UTC 0 to 4 5 .*\n 1 .* UTC 3 to {last} {last - 2} ", text)
    min(folder.iterdir()).unlink()
    with max(folder.iterdir()).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 100)
    text = said(folder=folder, json_path=tmp_path / "out.json")
    assert f"damaged: {folder}" in text
    assert f"steps 3 to {last - 1}" in text
    assert "step 1, epoch 0, planned again: no loader has left a record" in said(folder=folder, step=1)
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["steps"], found["missing"], len(found["damage"])) == ([3, last - 1], [], 1)


def test_a_documents_steps_are_found(folder: Path) -> None:
    record = Ledger(folder).recorded(4)[0]
    document = int(record.document[0])
    assert said(folder=folder, document=document).count("\n 4 0 ") == 2
    assert said(folder=folder, document=10**9) == "no step that was recorded saw document 1000000000\n"
    with pytest.raises(ValueError, match="both a step and a document"):
        said(folder=folder, document=1, step=1)


def test_serve_writes_it_and_the_command_reads_it(folder: Path, data: Path, tmp_path: Path) -> None:
    assert "step 1, epoch 0" in seqmesh("ledger", folder, "--step", "1").stdout
    wrong = seqmesh("ledger", folder, "--step", "999")
    assert (wrong.returncode, wrong.stderr) == (
        1,
        f"error: step 999 is not in {folder}: it has steps 0 to {Ledger(folder).steps[-1]}\n",
    )
    assert "holds no ledger: no file there ends with .arrows" in seqmesh("ledger", tmp_path).stderr
    (tmp_path / "file").write_text("")
    sizes = ["--tokens-per-step", "128", "--capacity", "64"]
    refused = seqmesh("serve", data, *sizes, "--ledger", tmp_path / "file")
    assert (refused.returncode, "the ledger can not be written in" in refused.stderr) == (1, True)
