"""`seqmesh export` and `seqmesh verify` of checkpoints."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from seqmesh.tools import export, verify
from seqmesh.trainer.checkpoints.manifest import CheckpointError, DamageError
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.huggingface import huggingface_config, load_huggingface
from seqmesh.trainer.models.transformer import Transformer, parts_of
from seqmesh.trainer.part import Saved, whole
from tests.checkpoints import saver_of

MODEL = ModelConfig(vocab_size=11, width=8, layers=1, heads=2, kv_heads=1, block="serial")


def parameters(step: int) -> dict[str, Tensor]:
    return dict(Transformer(MODEL, seed=step).state_dict())


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        tensors: Saved = {f"model/{name}": whole(tensor) for name, tensor in parameters(step).items()}
        tensors["optimizer/step"] = whole(torch.tensor(float(step)))
        saver_of(tmp_path / "run", tensors).save(step, tensors, {"model": asdict(MODEL)})
    return tmp_path / "run"


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_parameters_are_written_and_nothing_else(run_folder: Path, tmp_path: Path, dtype: str | None) -> None:
    out, said = console()
    export.run(checkpoint=run_folder, out=tmp_path / "out", format="safetensors", dtype=dtype, console=out)
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = parameters(2)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor if dtype is None else tensor.bfloat16())
        assert found[name].dtype == (tensor.dtype if dtype is None else torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert TypeAdapter(ModelConfig).validate_python(config) == MODEL
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert f"parameters of {run_folder}/step-00000002" in said.getvalue()
    with pytest.raises(FileExistsError, match="out exists: choose another folder"):
        export.run(checkpoint=run_folder, out=tmp_path / "out", format="safetensors", dtype=None, console=out)


def test_a_model_for_transformers_has_the_same_weights(run_folder: Path, tmp_path: Path) -> None:
    export.run(checkpoint=run_folder / "step-00000001", out=tmp_path / "out", format="huggingface", dtype=None)
    config = huggingface_config(tmp_path / "out")
    model = Transformer(config, seed=9)
    load_huggingface(tmp_path / "out", config, parts_of(model))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in parameters(1).items())


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
        export.run(checkpoint=newest, out=tmp_path / "out", format="safetensors", dtype=None, console=out)
    with pytest.raises(DamageError, match=r"has no readable manifest.json"):
        export.run(checkpoint=tmp_path, out=tmp_path / "out", format="safetensors", dtype=None, console=out)
    assert not (tmp_path / "out").exists()
