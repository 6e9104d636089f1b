"""Cost files: what was written is read, and nothing else is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.cost_file import cost_digest, read_cost, write_cost
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError
from seqmesh.packer.cost import CostModel
from seqmesh.packer.fit import Sample, Seconds, make_fit
from tests.support import make_set, settings_for

SAMPLES = [Sample(tokens=n, pairs=n * n, seconds=n * 1e-5) for n in (10, 20, 30)]
FIT = make_fit(Seconds(fixed=1e-3, linear=1e-5, quadratic=1e-8, row_near=1e-6, window=4096), SAMPLES)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_cost(tmp_path / "cost.json", FIT, {"cpu": "some"})
    return tmp_path / "cost.json"


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_written_cost_model_reads_back(file: Path) -> None:
    assert read_cost(file) == FIT.cost
    found = json.loads(file.read_text())
    assert found["version"] == 1
    assert found["unit_seconds"] == FIT.unit
    assert set(found["fit"]) == {"median", "worst", "r_squared", "rounding", "crossover"}
    assert found["environment"] == {"cpu": "some"}
    assert list(file.parent.iterdir()) == [file]


def test_a_model_without_attention_has_no_crossover(tmp_path: Path) -> None:
    fit = make_fit(Seconds(fixed=0.0, linear=1e-5, quadratic=0.0), SAMPLES)
    write_cost(tmp_path / "cost.json", fit, {})
    assert json.loads((tmp_path / "cost.json").read_text())["fit"]["crossover"] is None
    assert read_cost(tmp_path / "cost.json") == fit.cost


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version: Input should be 1"),
        ({"surprise": 1}, "surprise: is not a setting"),
        ({"cost": {"linear": 1, "cubic": 2}}, "cost.cubic: is not a setting"),
        ({"cost": {"linear": 1.5}}, "cost.linear: Input should be a valid integer"),
        ({"cost": {"linear": "7"}}, "cost.linear: Input should be a valid integer"),
        ({"cost": {"linear": -7}}, "cost: linear is -7: must not be negative"),
        ({"cost": {"linear": 1 << 70}}, r"cost.linear is \d+: must be at most 2\*\*62"),
        ({"cost": None}, "cost: "),
        ({"unit_seconds": 0.0}, "unit_seconds is 0.0: must be positive"),
        ({"unit_seconds": "1"}, "unit_seconds: Input should be a valid number"),
    ],
)
def test_an_unfit_file_is_refused_by_name_and_field(file: Path, changes: dict[str, Any], message: str) -> None:
    edit(file, **changes)
    with pytest.raises(ValueError, match=rf"cost\.json is not a valid cost file: {message}"):
        read_cost(file)


def test_missing_fields_are_named(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text("{}")
    with pytest.raises(ValueError, match=r"version: Field required; cost: Field required"):
        read_cost(tmp_path / "cost.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_what_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cost.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"cost\.json is not a valid cost file"):
        read_cost(tmp_path / "cost.json")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match="is no cost file"):
            read_cost(path)


def test_the_digest_is_that_of_every_field() -> None:
    base = CostModel(linear=5, quadratic=2)
    assert cost_digest(base) == cost_digest(CostModel(quadratic=2, linear=5))
    names = ("fixed", "linear", "quadratic", "row_near", "row_far", "window")
    changed: list[dict[str, Any]] = [*({name: 77} for name in names), {"other_windows": (None,)}]
    assert len({cost_digest(base), *(cost_digest(replace(base, **change)) for change in changed)}) == 8
    assert len(cost_digest(base)) == 32


def test_inside_a_step_another_cost_is_refused_and_between_steps_it_is_not(tmp_path: Path) -> None:
    """Counting tokens, short documents fill the rank with one long document up; counting pairs, all go there."""
    lengths = [*[50] * 3, *[10] * 9] * 2
    settings = settings_for(make_set(tmp_path, lengths), ranks=2, tokens_per_step=240, shuffle=False)
    other = replace(settings, cost=CostModel(linear=1, quadratic=100))
    with Loader(settings, rank=0, mode="inline") as loader:
        batches = iter(loader)
        assert not next(batches).last_in_step
        inside = loader.state_dict()
        while not (batch := next(batches)).last_in_step:
            pass
        between = loader.state_dict()
    with Loader(other, rank=0, mode="inline") as loader:
        loader.load_state_dict(inside)
        with pytest.raises(LoaderError, match=r"taken inside step 0 under plan \w+, this mesh plans \w+: use the same"):
            next(iter(loader))
        loader.load_state_dict(between)
        assert next(iter(loader)).step == batch.step + 1
