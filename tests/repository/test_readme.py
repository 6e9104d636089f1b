"""What the README says is true."""

import re
from pathlib import Path

import pytest

from tests.support import long_tail, make_set

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_embedding_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_set(tmp_path / "shards", long_tail(3000, 4000), vocab=4096, shard_tokens=20_000)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict[str, object] = {}
    exec(example, scope)
    state = scope["state"]
    assert isinstance(state, dict)
    assert state["stream"]["epoch"] == [1]
    assert state["stream"]["step"] >= 3


def test_both_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()


def test_every_command_shown_exists() -> None:
    from seqmesh.tools.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"^seqmesh (\w+)", README, re.MULTILINE)) <= known


def test_the_training_guide_lists_every_setting(tmp_path: Path) -> None:
    import yaml

    from seqmesh.trainer.config import load_config, save_config

    (listed,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    (tmp_path / "job.yaml").write_text(listed)
    config = load_config(tmp_path / "job.yaml")
    save_config(config, tmp_path / "resolved.yaml")
    resolved, shown = yaml.safe_load((tmp_path / "resolved.yaml").read_text()), yaml.safe_load(listed)
    for name in ("ranks", "stages", "cost", "offload"):  # the trainer's to set
        del resolved["loader"][name]
    assert resolved == shown
