import math
from pathlib import Path

import pytest
import torch
import yaml

from seqmesh.loader.cost_file import write_cost
from seqmesh.packer.fit import Sample, Seconds, make_fit
from seqmesh.tools.launch import run, show
from seqmesh.tools.starter import STARTER
from seqmesh.trainer.activations import bytes_per_token
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
        ("stepz=3", r"stepz: is not a setting; did you mean steps\?"),
        ("model.widht=3", r"model.widht: is not a setting; did you mean model.width\?"),
        ("lr=1e-3", r"lr: is not a setting; did you mean optim.lr\?"),
        ("loader.shuffle={windw: 3}", r"windw: is not a setting; did you mean window\?"),
        ("zzz=1", "zzz: is not a setting$"),
        ("1=2", "1: is not a setting"),
        ("optim=null", "optim: must be a group of settings, not null"),
        ("log=true", "log: must be a group of settings, not true"),
        ("steps=true", "steps is true: must be a number"),
        ("seed=no", "seed is false: must be a number"),
        ("steps=1.5", "steps: Input should be a valid integer"),
        ("steps=[1", r"'steps=\[1': what follows = is not valid YAML"),
        ("a..b=1", "'a..b=1' is not an override"),
        ("optim.betas.0=1", "optim.betas: Input should be a valid tuple"),
        ("optim.lr=.nan", "optim: lr is nan"),
        ("run=", "run: Input should be a valid string"),
        ("run=''", "run is empty"),
        ("gc_every=0", "gc_every is 0"),
        ("steps=0", "steps is 0: must be at least 1"),
        ("steps=many", "steps: Input should be a valid integer"),
        ("model.width=7", "model: width is 7: must be an even multiple of heads, 2"),
        ("loader.capacity=-5", "loader: capacity is -5"),
        ("loader.ranks=2", "set by the trainer"),
        ("loader.stages=2", "set by the trainer"),
        ("loader.offload={layers: 3, token_cost: 1}", "set by the trainer"),
        ("parallel.tensor=0", "parallel: tensor is 0: must be at least 1"),
        ("parallel={tensor: 3}", "heads is 2: must be a multiple of the tensor peers, 3"),
        ("parallel={tensor: 2}", "kv_heads is 1: must be a multiple of the tensor peers, 2"),
        ("parallel={stages: 2}", r"parallel.stages · parallel.parts is 2 · 1: at most as many as model.layers, 1"),
        ("parallel={parts: 2}", "parts is 2: one stage has all layers in one"),
        ("recompute=all", "recompute: Input should be 'none', 'selective' or 'full'"),
        ("offload={bandwidth: 0}", "offload: bandwidth is 0"),
        ("offload={bandwidth: 1e9}", "offload.flops is None: .* no cost file says nothing"),
        ("offload={bandwidth: 1e9, flops: 1e12}", "layers is 1: offload keeps 2 of them"),
        ("optim.lr=fast", "optim.lr: Input should be a valid number"),
        ("steps", "'steps' is not an override"),
        ("=3", "is not an override"),
        ("steps.deep=3", "steps is a value, not a group"),
        ("timeout=0", "timeout is 0"),
        ("timeout=.nan", "timeout is nan"),
        ("step_timeout=.inf", "step_timeout is inf"),
        ("heartbeat=-1", "heartbeat is -1"),
        ("peak_flops=0", "peak_flops is 0"),
    ],
)
def test_a_bad_setting_is_named(job: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(job, [override])


def test_the_starter_is_a_job(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(STARTER)
    config = load_config(tmp_path / "job.yaml")
    assert (config.steps, config.optim.warmup, config.log.tensorboard) == (1000, 50, False)


def test_a_resolved_job_that_is_printed_is_a_job(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(config=job, overrides=["optim.lr=2e-3"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "printed.yaml") == load_config(job, ["optim.lr=2e-3"])


def test_a_part_of_a_list_can_not_be_changed(job: Path) -> None:
    job.write_text(yaml.safe_dump(JOB | {"optim": {"betas": [0.8, 0.9]}}))
    with pytest.raises(ValueError, match=r"betas is a list: give all of it, as betas=\[...\]"):
        load_config(job, ["optim.betas.0=0.7"])


def test_a_group_with_nothing_under_it_takes_overrides(job: Path) -> None:
    job.write_text(yaml.safe_dump(JOB) + "optim:\nlog: {wandb: null}\n")
    config = load_config(job, ["optim.lr=2e-3", "log.wandb.project=p"])
    assert config.optim.lr == 2e-3
    assert config.log.wandb is not None
    assert config.log.wandb.project == "p"


@pytest.mark.parametrize("content", ["run: x\nsteps: 1\nsteps: 2\n", "run: x\nloader:\n  data: a\n  data: b\n"])
def test_a_setting_that_stands_twice_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"(?s)(steps|data) stands twice.*line [34]"):
        load_config(tmp_path / "job.yaml")


@pytest.mark.parametrize("content", [b"[1, 2]", b"", b"a: [1", b"\xa1\xff", b"run: x\n\tsteps: 1\n"])
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


def test_offload_is_planned_from_what_the_model_saves_and_the_time_of_a_unit(job: Path, tmp_path: Path) -> None:
    """A unit of the model's shape is 1/64 of the work of a pair; one of a cost file takes what that says."""
    offload = ["model.layers=4", "model.width=64", "offload={bandwidth: 1.0e9, flops: 2.0e12}"]
    config = load_config(job, offload)
    planned = config.planned_offload()
    assert planned is not None
    assert loader_settings(config, 2).offload == planned
    seconds = 3 * bytes_per_token(config.model, "none", torch.float32) / 1e9  # a third of the time is forward
    assert planned.layers == 4
    assert planned.token_cost == math.ceil(seconds / (config.model.shape.flops_per_pair / 64 / 2e12))
    less = load_config(job, [*offload, "recompute=full"]).planned_offload()
    assert less is not None
    assert 8 < planned.token_cost / less.token_cost < 20
    fit = make_fit(Seconds(fixed=0.0, linear=1e-5, quadratic=1e-9), [Sample(tokens=10, pairs=100, seconds=1e-4)])
    write_cost(tmp_path / "cost.json", fit, {})
    measured = load_config(job, [*offload[:2], "offload.bandwidth=1.0e9", f"cost={tmp_path / 'cost.json'}"])
    planned = measured.planned_offload()
    assert planned is not None
    assert planned.token_cost == math.ceil(seconds / fit.unit)
    windows = [*offload[:2], "offload.bandwidth=1.0e9", f"cost={tmp_path / 'cost.json'}", "model.windows=[7, null]"]
    finer = load_config(job, windows).planned_offload()
    assert finer is not None
    assert finer.token_cost == math.ceil(seconds / (fit.unit / 2))
    with pytest.raises(ValueError, match=r"cost\.json says it, too"):
        load_config(job, [*offload, f"cost={tmp_path / 'cost.json'}"])


def test_dimensions_that_do_not_fit_the_model_or_the_plans_are_refused_with_their_numbers(job: Path) -> None:
    model = ["model.layers=3", "model.kv_heads=2"]
    config = load_config(job, [*model, "parallel={tensor: 2, stages: 3}"])
    settings = loader_settings(config, 4)
    assert (settings.mesh.ranks, settings.mesh.stages) == (4, 3)
    assert (
        load_config(job, [*model, "parallel={tensor: 2}", "model.ffn_width=31", "model.experts=4"]).model.experts == 4
    )
    assert settings.order() == config.loader.order()  # global batches know nothing of it
    for override, message in (
        ("parallel={stages: 2, parts: 2}", r"stages · parallel.parts is 2 · 2: at most as many as model.layers, 3"),
        ("loader.mode=waves", "parallel.stages is 3: needs loader.mode 'free', 'waves' is chosen"),
        ("model.ffn_width=31", "the MLP's width is 31: must be a multiple of the tensor peers, 2"),
        ("model.experts=5", "experts is 5: must be a multiple of the tensor peers, 2"),
    ):
        with pytest.raises(ValueError, match=message):
            load_config(job, [*model, "parallel={tensor: 2, stages: 3}", override])


def test_processes_that_make_no_whole_replicas_are_refused_before_any_is_started(job: Path) -> None:
    with pytest.raises(ValueError, match=r"^3 processes: must be a multiple of .*, 1 · 2$"):
        run(config=job, overrides=["ranks=3", "model.layers=2", "parallel={stages: 2}"])
