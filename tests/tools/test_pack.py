"""The command pack: its numbers are those of the packing, its file accounts for every token, its errors say where."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import MANIFEST_NAME
from seqmesh.packer.bins import METHODS, pack
from seqmesh.packer.cost import MODEL_8B
from seqmesh.tools.cli import app
from seqmesh.tools.pack import PackOptions, bin_work, run, waiting
from seqmesh.tools.pack_report import Comparison
from tests.support import long_tail, make_set

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "packing.md").read_text()
LENGTHS = long_tail(400, 300, seed=3)
OPTIONS = PackOptions(capacity=128, overlong="split")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("pack") / "set", LENGTHS)


def printed(folder: Path, options: PackOptions, **rest: Any) -> tuple[Comparison, str]:
    output = io.StringIO()
    found = run(folder=folder, options=options, console=Console(file=output, width=60), **rest)
    return found, output.getvalue()


def test_every_method_is_compared_by_its_own_numbers(folder: Path) -> None:
    found, text = printed(folder, OPTIONS, rows_per_step=4)
    assert [result.method for result in found.results] == list(METHODS)
    assert (found.documents, found.tokens) == (400, sum(LENGTHS))
    assert found.overlong == sum(length > 128 for length in LENGTHS)
    for result in found.results:
        bins = pack(LENGTHS, 128, method=result.method, overlong="split")
        assert (result.bins, result.bound, result.fill) == (bins.count, bins.bound, bins.fill)
        assert re.search(rf"{result.method} +{bins.count} +\+{bins.count - bins.bound} +{bins.fill:.2%} ", text)
    by_name = {result.method: result for result in found.results}
    assert by_name["concat"].attention < by_name["next_fit"].attention < 1.0
    assert by_name["concat"].split_documents > by_name["next_fit"].split_documents == found.overlong
    assert "4 bins in a row" in text


def test_attention_is_that_of_whole_documents_where_nothing_is_cut(folder: Path) -> None:
    found, _ = printed(folder, PackOptions(capacity=300), methods=["next_fit"])
    assert found.results[0].attention == 1.0
    assert found.results[0].split_documents == found.results[0].cut_tokens == 0


def test_work_is_the_model_s_and_waiting_that_of_the_dearest_bin() -> None:
    bins = pack([3, 2, 4], 5, method="next_fit")
    assert bin_work(bins).tolist() == [
        5 * MODEL_8B.flops_per_token + (6 + 3) * MODEL_8B.flops_per_pair,
        4 * MODEL_8B.flops_per_token + 10 * MODEL_8B.flops_per_pair,
    ]
    assert waiting(np.array([4.0, 2.0, 3.0]), 2) == 2 * (4 + 3) / 9
    assert waiting(np.array([4.0, 4.0]), 2) == waiting(np.zeros(0), 2) == 1.0


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
@pytest.mark.parametrize("method", METHODS)
def test_the_file_accounts_for_every_document(folder: Path, tmp_path: Path, method: str, overlong: str) -> None:
    options = PackOptions(capacity=128, overlong=overlong, seed=1, max_documents=9, bins_multiple=4)
    output = tmp_path / "bins.arrow"
    found, _ = printed(folder, options, methods=[method], output=output)
    table = pa.ipc.open_file(str(output)).read_all()
    document, start, length, bin_of = (table[name].to_numpy() for name in ("document", "start", "length", "bin"))
    held = bin_of >= 0
    assert set(document) == set(range(400))
    assert (start + length <= np.array(LENGTHS)[document]).all()
    assert (np.diff(bin_of[held]) >= 0).all()
    loads = np.bincount(bin_of[held], weights=length[held])
    assert loads.max() <= 128
    assert len(loads) == found.results[0].bins
    assert len(loads) % 4 == 0
    assert np.bincount(bin_of[held]).max() <= 9
    assert length[held].sum() + found.results[0].cut_tokens == sum(LENGTHS)
    assert (overlong == "drop") == (not held.all())


def test_the_file_says_what_it_is_of(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bins.arrow"
    found, _ = printed(folder, PackOptions(capacity=300, seed=5), methods=["first_fit"], output=output)
    metadata = json.loads(pa.ipc.open_file(str(output)).schema.metadata[b"seqmesh"])
    assert metadata["manifest_xxh3"] == checksum(folder / MANIFEST_NAME)
    expected = {"capacity": 300, "method": "first_fit", "seed": 5, "overlong": "error", "seqmesh": "0.1.0"}
    assert metadata.items() >= expected.items()
    assert metadata["bins"] == found.results[0].bins


def test_a_file_that_is_there_is_replaced_only_by_force(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bins.arrow"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match=r"bins\.arrow is there already: give another name, or --force"):
        printed(folder, OPTIONS, methods=["first_fit"], output=output)
    assert output.read_text() == "mine"
    printed(folder, OPTIONS, methods=["first_fit"], output=output, force=True)
    assert pa.ipc.open_file(str(output)).read_all().num_rows > 400


def test_a_file_is_whole_or_not_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pa.RecordBatchFileWriter, "write_table", full)
    with pytest.raises(OSError, match=r"cannot write .*bins\.arrow: no space left"):
        printed(folder, OPTIONS, methods=["first_fit"], output=tmp_path / "bins.arrow")
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_written_as_json_too(folder: Path, tmp_path: Path) -> None:
    found, text = printed(folder, OPTIONS, json_path=tmp_path / "table.json")
    report = json.loads((tmp_path / "table.json").read_text())
    assert report["options"]["overlong"] == "split"
    assert [row["bins"] for row in report["comparison"]["results"]] == [result.bins for result in found.results]
    assert f"wrote {tmp_path}/table.json" in text


def test_the_picture_is_a_picture(folder: Path, tmp_path: Path) -> None:
    printed(folder, OPTIONS, plot=tmp_path / "table.png", rows_per_step=8)
    with Image.open(tmp_path / "table.png") as image:
        colors = image.convert("RGB").getcolors(1 << 20)
    assert colors is not None
    assert len(colors) > 20
    printed(folder, OPTIONS, plot=tmp_path / "table.svg", methods=["concat"])
    assert "<svg" in (tmp_path / "table.svg").read_text()
    with pytest.raises(ValueError, match="'bmpp' is not supported"):
        printed(folder, OPTIONS, plot=tmp_path / "table.bmpp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.png", "table.svg"]


def test_a_set_without_documents_has_no_bins(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "empty", [])
    output, plot = tmp_path / "bins.arrow", tmp_path / "empty.png"
    found, _ = printed(folder, PackOptions(capacity=8), methods=["concat"], output=output, plot=plot, rows_per_step=2)
    assert (found.documents, found.results[0].bins, found.results[0].fill) == (0, 0, 1.0)
    assert pa.ipc.open_file(str(output)).read_all().num_rows == 0
    assert len(printed(folder, PackOptions(capacity=8))[0].results) == len(METHODS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "0"], "capacity is 0: must be at least 1"),
        (["--capacity", "8", "--method", "magic"], "method is 'magic': must be one of best_fit_decreasing, "),
        (["--capacity", "8", "--multiple", "9"], "multiple is 9: must not be over the capacity, 8"),
        (["--capacity", "8", "--bins-multiple", "0"], "bins_multiple is 0: must be at least 1"),
        (["--capacity", "8", "--max-documents", "0"], "max_documents is 0: must be at least 1"),
        (["--capacity", "8", "--rows-per-step", "0"], "rows_per_step is 0: must be at least 1"),
        (["--capacity", "300", "--output", "x"], "holds the bins of one method, there are 7: choose with one --method"),
        (["--capacity", "300", "--method", "concat", "--output", "/no/x"], "cannot write /no/x: /no is no folder"),
        (["--capacity", "300", "--json", "/no/x"], "cannot write /no/x: /no is no folder"),
        (["--capacity", "300", "--plot", "/no/x.png"], "cannot write /no/x.png: /no is no folder"),
    ],
)
def test_errors_say_what_is_wrong(folder: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["pack", str(folder), *arguments])
    assert result.exit_code == 1
    assert message in str(result.exception)


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a finished shard set"):
        printed(tmp_path, OPTIONS)


def test_concat_needs_no_policy(folder: Path) -> None:
    found, text = printed(folder, PackOptions(capacity=64), methods=["concat", "concat"])
    assert len(found.results) == 1
    assert "of them longer than a bin: cut where a bin ends" in text


def test_the_guide_s_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(examples) >= 5
    for example in examples:
        exec(example, scope)
    shutil.rmtree("shards")  # 190 MB


def test_the_guide_s_commands_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("shards").symlink_to(folder)
    for command in re.findall(r"^seqmesh (pack shards .*)$", GUIDE, re.MULTILINE):
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, result.exception
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", GUIDE)
    assert Path("docs", picture).is_file()
    assert Path("bins.arrow").is_file()
    assert (ROOT / "docs" / picture).is_file()


def test_the_guide_says_when_to_take_every_method() -> None:
    for section in GUIDE.split("## ")[1:3]:  # which to take, and what was measured
        assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(METHODS)
