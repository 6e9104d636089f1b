"""`seqmesh export` and `seqmesh verify` of checkpoints."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from seqmesh.tools import export, verify
from seqmesh.trainer.checkpoints.manifest import CheckpointError, DamageError
from seqmesh.trainer.part import Saved
from tests.checkpoints import saver_of, whole_tensors

MODEL = {"vocab_size": 60, "width": 16}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        tensors: Saved = dict(whole_tensors(step))
        saver_of(tmp_path / "run", tensors).save(step, tensors, {"model": MODEL})
    return tmp_path / "run"


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_parameters_are_written_and_nothing_else(run_folder: Path, tmp_path: Path, dtype: str | None) -> None:
    out, said = console()
    export.run(checkpoint=run_folder, out=tmp_path / "out", dtype=dtype, console=out)
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {n.removeprefix("model/"): t for n, t in whole_tensors(2).items() if n.startswith("model/")}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor if dtype is None else tensor.bfloat16())
        assert found[name].dtype == (tensor.dtype if dtype is None else torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == MODEL
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert f"parameters of {run_folder}/step-00000002" in said.getvalue()
    with pytest.raises(FileExistsError, match="out exists: choose another folder"):
        export.run(checkpoint=run_folder, out=tmp_path / "out", dtype=None, console=out)


def test_what_is_not_whole_is_not_exported_and_verify_says_why(run_folder: Path, tmp_path: Path) -> None:
    out, said = console()
    newest = run_folder / "step-00000002"
    (newest / "notes.txt").touch()
    verify.run(folder=newest, console=out)
    assert "notes.txt: warning: is not part of the checkpoint" in said.getvalue()
    assert f"{newest}: ok, 3 files of" in said.getvalue()
    content = bytearray((newest / "state.json").read_bytes())
    content[9] ^= 1
    (newest / "state.json").write_bytes(content)
    (newest / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="step-00000002 is not whole"):
        verify.run(folder=newest, console=out)
    assert "state.json: is damaged, its checksum differs" in said.getvalue()
    assert "rank-00000.safetensors: is missing" in said.getvalue()
    with pytest.raises(DamageError, match=r"rank-00000.safetensors: is missing"):
        export.run(checkpoint=newest, out=tmp_path / "out", dtype=None, console=out)
    with pytest.raises(DamageError, match=r"has no readable manifest.json"):
        export.run(checkpoint=tmp_path, out=tmp_path / "out", dtype=None, console=out)
    assert not (tmp_path / "out").exists()
