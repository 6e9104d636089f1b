import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from seqmesh.trainer.checkpoint import (
    CheckpointConfig,
    CheckpointError,
    checkpoints,
    gather_tensors,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    verify,
)
from seqmesh.trainer.optim import OptimConfig, make_optimizer

STATE = {"loader": {"stream": {"position": 3}}, "ranks": 2}


def make_job(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    return model, make_optimizer(model.parameters(), OptimConfig(lr=0.1))


def do_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    torch.autograd.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = make_job()
    for _ in range(3):
        do_step(model, optimizer)
    path = save_checkpoint(tmp_path, 3, gather_tensors(model, optimizer), STATE, keep=2)
    for _ in range(3):
        do_step(model, optimizer)
    other, other_optimizer = make_job(seed=1)
    state = load_checkpoint(path, other, other_optimizer)
    assert state["step"] == 3
    assert {key: state[key] for key in STATE} == STATE
    for _ in range(3):
        do_step(other, other_optimizer)
    assert weights(other) == weights(model)


def test_a_checkpoint_before_the_first_update_loads(tmp_path: Path) -> None:
    model, optimizer = make_job()
    path = save_checkpoint(tmp_path, 1, gather_tensors(model, optimizer), STATE, keep=1)
    other, other_optimizer = make_job(seed=1)
    load_checkpoint(path, other, other_optimizer)
    assert weights(other) == weights(model)


def test_only_the_newest_are_kept_and_no_litter(tmp_path: Path) -> None:
    model, optimizer = make_job()
    (tmp_path / ".step-00000009.tmp").mkdir()  # a kill left it
    for step in (2, 4, 10):
        save_checkpoint(tmp_path, step, gather_tensors(model, optimizer), STATE, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000004", "step-00000010"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    model, optimizer = make_job()
    save_checkpoint(tmp_path, 2, gather_tensors(model, optimizer), {"mark": 1}, keep=2)
    path = save_checkpoint(tmp_path, 2, gather_tensors(model, optimizer), {"mark": 2}, keep=2)
    assert json.loads((path / "state.json").read_text())["mark"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = ["model.safetensors", "optimizer.safetensors", "state.json"]
DAMAGES = [(name, damage) for name in FILES for damage in (flip_bit, cut, Path.unlink)]


@pytest.mark.parametrize(("name", "damage"), [*DAMAGES, ("manifest.json", cut), ("manifest.json", Path.unlink)])
def test_damage_is_found_and_the_checkpoint_before_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    model, optimizer = make_job()
    do_step(model, optimizer)
    first = save_checkpoint(tmp_path, 1, gather_tensors(model, optimizer), STATE, keep=2)
    second = save_checkpoint(tmp_path, 2, gather_tensors(model, optimizer), STATE, keep=2)
    damage(second / name)
    with pytest.raises(CheckpointError, match=name):
        verify(second)
    said: list[str] = []
    assert newest_checkpoint(tmp_path, said.append) == first
    assert "step-00000002" in said[0]
    assert name in said[0]


def test_every_bit_of_the_files_counts(tmp_path: Path) -> None:
    model, optimizer = make_job()
    do_step(model, optimizer)
    path = save_checkpoint(tmp_path, 1, gather_tensors(model, optimizer), STATE, keep=2)
    whole = (path / "model.safetensors").read_bytes()
    for bit in range(0, 8 * len(whole), 97):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (path / "model.safetensors").write_bytes(flipped)
        with pytest.raises(CheckpointError, match="checksum differs"):
            verify(path)
    (path / "model.safetensors").write_bytes(whole)
    verify(path)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, gather_tensors(*make_job()), STATE, keep=1)
    other = nn.Linear(4, 3)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_checkpoint(path, other, make_optimizer(other.parameters(), OptimConfig()))


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path, print) is None
    assert checkpoints(tmp_path / "nowhere") == []


def test_unfit_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointConfig(keep=0)
