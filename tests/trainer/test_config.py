from pathlib import Path

import pytest
import yaml

from seqmesh.loader.cost_file import write_cost
from seqmesh.packer.fit import Sample, Seconds, make_fit
from seqmesh.trainer.config import load_config, save_config
from seqmesh.trainer.train import loader_settings

JOB = {
    "run": "runs/x",
    "steps": 10,
    "loader": {"data": "set", "tokens_per_step": 100, "capacity": 50},
    "model": {"vocab_size": 10, "width": 8, "layers": 1, "heads": 2, "kv_heads": 1},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path / "job.yaml"


def test_overrides_reach_their_fields(job: Path) -> None:
    config = load_config(job, ["steps=20", "optim.lr=1e-3", "loader.epochs=null", "optim.betas=[0.8, 0.9]"])
    assert (config.steps, config.optim.lr, config.loader.epochs) == (20, 1e-3, None)
    assert config.optim.betas == (0.8, 0.9)
    assert config.loader.capacity == 50


def test_the_resolved_configuration_reads_back_to_the_same(job: Path, tmp_path: Path) -> None:
    config = load_config(job, ["seed=7"])
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "stepz: is not a setting"),
        ("model.widht=3", "model.widht: is not a setting"),
        ("steps=0", "steps is 0: must be at least 1"),
        ("steps=many", "steps: Input should be a valid integer"),
        ("model.width=7", "model: width is 7: must be an even multiple of heads, 2"),
        ("loader.capacity=-5", "loader: capacity is -5"),
        ("loader.ranks=2", "set by the trainer"),
        ("optim.lr=fast", "optim.lr: Input should be a valid number"),
        ("steps", "'steps' is not an override"),
        ("=3", "is not an override"),
        ("steps.deep=3", "steps is a value, not a group"),
        ("timeout=0", "timeout is 0"),
    ],
)
def test_a_bad_setting_is_named(job: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(job, [override])


@pytest.mark.parametrize("content", [b"[1, 2]", b"", b"a: [1", b"\xa1\xff"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"job.yaml (must hold a mapping|is not valid YAML)"):
        load_config(tmp_path / "job.yaml")


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("run: x\nsteps: 3\n")
    with pytest.raises(ValueError, match=r"loader: .*; model: "):
        load_config(tmp_path / "job.yaml")


def test_ranks_are_balanced_by_the_models_shape_or_by_a_cost_file(job: Path, tmp_path: Path) -> None:
    assert loader_settings(load_config(job), 2).cost == load_config(job).model.shape.cost_model()
    fit = make_fit(Seconds(fixed=1e-3, linear=1e-5, quadratic=1e-8), [Sample(tokens=9, pairs=9, seconds=1.0)])
    write_cost(tmp_path / "cost.json", fit, {})
    config = load_config(job, [f"cost={tmp_path}/cost.json"])
    assert loader_settings(config, 2).cost == fit.cost
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config
    windowed = load_config(job, [f"cost={tmp_path}/cost.json", "model.layers=2", "model.windows=[7, null]"])
    assert windowed.cost_model() == fit.cost.through([7, None])


def test_a_cost_file_that_can_not_be_used_is_refused_at_once(job: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.json is no cost file"):
        load_config(job, [f"cost={tmp_path}/nothing.json"])
    (tmp_path / "bad.json").write_text('{"version": 1, "unit_seconds": 1.0, "cost": {"linear": -1}, "fit": {}}')
    with pytest.raises(ValueError, match=r"bad\.json is not a valid cost file: cost: linear is -1: must"):
        load_config(job, [f"cost={tmp_path}/bad.json"])
