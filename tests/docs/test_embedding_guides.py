"""Every guide is a program: run whole, killed in the middle or started again, some on two ranks."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import numpy as np
import pytest

from tests.warm import CONTEXT, PRELOADED, Program, forked

GUIDES = Path(__file__).parents[2] / "docs" / "embedding"
SECONDS = 200
KILLED_AT = 12  # steps
NEEDS = {"huggingface": ("transformers", "accelerate"), "lightning": ("lightning",)}
PREPARE = "seqmesh prepare corpus.jsonl --out shards --tokenizer train:400"
TWO_RANKS = ("pytorch", "huggingface")  # the others do the same; each costs three imports of everything


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """What is forked has them, where nothing was forked before; else each run imports its own."""
    CONTEXT.set_forkserver_preload([*PRELOADED, "transformers.trainer", "lightning.pytorch"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        ensure_running()
    CONTEXT.set_forkserver_preload(PRELOADED)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command that the guides show, of short texts and some long ones."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "ing", "or", "un")]
    with (folder / "corpus.jsonl").open("w") as file:
        for length in np.clip(rng.lognormal(3.0, 1.0, 280), 1, 300).astype(int):
            file.write(json.dumps({"text": " ".join(rng.choice(words, length))}) + "\n")
    command = [sys.executable, "-m", "seqmesh.tools.cli", *PREPARE.split()[1:]]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=SECONDS)
    return folder / "shards"


def write_script(guide: str, folder: Path, shards: Path) -> Path:
    """The Python blocks of a guide as one script, in a folder with shards."""
    folder.mkdir()
    (folder / "shards").symlink_to(shards)
    blocks = re.findall(r"```python\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL)
    script = folder / "train.py"
    script.write_text("\n".join(blocks))
    return script


def running(script: Path, *launcher: str) -> AbstractContextManager[Program]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return forked(
        [*launcher, str(script)], folder=script.parent, environment=environment, errors=script.parent / "errors"
    )


def finish(process: Program, script: Path) -> list[str]:
    """What a run says of its steps and at its end."""
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, (script.parent / "errors").read_text()
    return [line for line in output.splitlines() if re.match("step|rate|weights|resumed", line)]


def kill_in_the_middle(process: Program, script: Path) -> None:
    for line in process.stdout:
        if line.startswith(f"step {KILLED_AT} "):
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.wait(SECONDS)
    assert process.returncode == -signal.SIGKILL, (script.parent / "errors").read_text()


def losses(lines: Sequence[str]) -> dict[int, float]:
    found = (re.match(r"step (\d+) loss ([\d.]+)", line) for line in lines)
    return {int(match[1]): float(match[2]) for match in found if match}


@pytest.mark.parametrize("guide", ["pytorch", "huggingface", "lightning"])
def test_a_guide_runs_and_after_a_kill_goes_on_exactly(guide: str, shards: Path, tmp_path: Path) -> None:
    for module in NEEDS.get(guide, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    whole, broken, both = (write_script(guide, tmp_path / name, shards) for name in ("whole", "broken", "both"))
    with running(whole) as first, running(broken) as second:
        kill_in_the_middle(second, broken)
        expected = finish(first, whole)
    of_two = running(both, "-m", "torch.distributed.run", "--nproc-per-node=2") if guide in TWO_RANKS else None
    with running(broken) as third, of_two or contextlib.nullcontext() as fourth:
        rest = finish(third, broken)
        spread = finish(fourth, both) if fourth else None
    check_whole(expected)
    check_resumed(rest, expected, range(5, len(losses(expected)), 5))  # it may have gone on a little
    if spread:
        assert losses(spread) == pytest.approx(losses(expected), rel=1e-4)


@pytest.mark.parametrize("guide", ["torchtitan", "megatron"])
def test_a_guide_runs_and_resumes_from_its_newest_checkpoint(guide: str, shards: Path, tmp_path: Path) -> None:
    script = write_script(guide, tmp_path / "run", shards)
    with running(script) as whole:
        expected = finish(whole, script)
    for later in script.parent.glob("run/step-[1-9]?"):  # torchtitan's keeps all of them
        shutil.rmtree(later)
    with running(script) as again:
        rest = finish(again, script)
    check_whole(expected)
    check_resumed(rest, expected, [5 if guide == "torchtitan" else len(losses(expected)) // 5 * 5])


def check_resumed(rest: Sequence[str], expected: Sequence[str], steps: Sequence[int]) -> None:
    """After one of these steps exactly what comes in a run that was not interrupted, weights included."""
    resumed = re.match(r"resumed from .*?(\d+)(\.ckpt)?$", rest[0])
    assert resumed and int(resumed[1]) in steps
    assert list(rest[1:]) == list(expected[int(resumed[1]) :])


def check_whole(lines: Sequence[str]) -> None:
    """Every step once, losses that fall, a learning rate that ends with the last step."""
    found = losses(lines)
    assert list(found) == list(range(1, len(found) + 1))
    assert len(found) > 2 * KILLED_AT
    values = list(found.values())
    assert np.mean(values[-5:]) < np.mean(values[:5]) - 0.5
    rates = [float(line.rpartition(" ")[2]) for line in lines if re.search(r"\brate ", line)]
    assert rates[-1] == pytest.approx(0.0, abs=1.01 * 3e-3 / len(found))  # Hugging Face says that of the last step
    assert lines[-1].startswith("weights ")


def test_the_index_names_every_guide_and_all_say_how_to_prepare() -> None:
    pages = {page.name for page in GUIDES.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", (GUIDES / "README.md").read_text())) == pages
    assert all(PREPARE in (GUIDES / page).read_text() for page in pages)
