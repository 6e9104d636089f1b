"""The command line as a person meets it: help, version, errors in a sentence."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqmesh.loader.embedded import Loader
from tests.support import killed_after, make_set
from tests.warm import ran

COMMANDS = [
    "prepare",
    "inspect",
    "verify",
    "merge",
    "append",
    "split",
    "reshard",
    "convert",
    "cat",
    "pack",
    "plan",
    "serve",
    "fleet",
    "ledger",
    "doctor",
    "keys",
    "train",
    "export",
    "report",
    "bench",
    "demo",
]


def seqmesh(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return ran("-m", "seqmesh.tools.cli", *arguments)


def test_help_lists_every_command() -> None:
    result = seqmesh("--help")
    assert result.returncode == 0
    assert all(f"│ {command} " in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = seqmesh(command, "-h")
    assert result.returncode == 0
    assert "Usage:" in result.stdout
    assert result.stderr == ""


def test_an_extra_that_is_missing_is_named() -> None:
    code = "import sys; sys.modules['ray'] = None; from seqmesh.tools.cli import main; main()"
    command = [sys.executable, "-c", code, "fleet", "--settings", "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stderr == "error: this command needs ray: pip install 'seqmesh[ray]'\n"
    assert result.returncode == 1


def test_version() -> None:
    command = [sys.executable, "-m", "seqmesh.tools.cli", "--version"]  # a new interpreter, as a person starts it
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "seqmesh 0.1.0\n"


def test_text_to_shards_to_a_look_at_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hello hello hello"}\n{"text": "world"}\n')
    prepared = seqmesh("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "set", "--tokenizer", "train:300")
    assert prepared.returncode == 0, prepared.stderr
    assert "documents kept" in prepared.stdout
    assert "2" in seqmesh("inspect", tmp_path / "set").stdout
    assert "ok" in seqmesh("verify", tmp_path / "set").stdout
    assert "hello hello hello" in seqmesh("inspect", tmp_path / "set", "--show", "0").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "/nowhere"], "error: /nowhere"),
        (["verify", "/nowhere"], "error: /nowhere is not a finished shard set"),
        (["report", "/nowhere"], "error: /nowhere holds no training run"),
        (["train", "/nowhere.yaml"], "No such file"),
        (["bench", "everything"], "error: name is 'everything': must be one of"),
        (["serve", "/nowhere", "--tokens-per-step", "8", "--capacity", "4"], "is not a finished shard set"),
        (["serve", "/nowhere", "--tokens-per-step", "8", "--capacity", "0"], "capacity is 0: must be at least 1"),
        (["prepare", "/nowhere", "--out", "/tmp/x", "--tokenizer", "train:300"], "/nowhere"),
    ],
)
def test_errors_are_sentences_unless_the_traceback_is_asked_for(arguments: list[str], message: str) -> None:
    result = seqmesh(*arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in seqmesh("--debug", *arguments).stderr


def test_a_misspelt_option_is_a_usage_error() -> None:
    result = seqmesh("prepare", "--speed", "9")
    assert result.returncode == 2
    assert "No such option: --speed" in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_serve_serves_until_it_is_told_to_stop(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, number: signal.Signals, code: int
) -> None:
    data = make_set(tmp_path / "set", [5, 9, 3])
    runtime = tmp_path_factory.mktemp("r")  # paths of sockets must be short
    arguments = ["serve", str(data), "--tokens-per-step", "32", "--capacity", "16", "--epochs", "1"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "seqmesh.tools.cli", *arguments]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
        killed_after(process),
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"serving {data} for rank 0 at ipc://{runtime}/seqmesh-")
        with Loader(endpoint=line.split()[-1], rank=0) as loader:
            assert sum(batch.tokens for batch in loader) == 17
        process.send_signal(number)
        deadline = time.monotonic() + 10
        while process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert process.returncode == code
    assert list(runtime.iterdir()) == []


def test_serve_does_not_take_a_socket_from_another(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", [5])
    arguments = ["serve", str(data), "--tokens-per-step", "8", "--capacity", "8", "--endpoint", f"ipc://{tmp_path}/s"]
    command = [sys.executable, "-m", "seqmesh.tools.cli", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as first, killed_after(first):
        assert first.stdout is not None
        first.stdout.readline()
        second = seqmesh(*arguments)
        assert second.returncode == 1
        assert "another process listens there" in second.stderr
        with Loader(endpoint=f"ipc://{tmp_path}/s", rank=0) as loader:
            assert next(iter(loader)).tokens == 5
        first.terminate()


def test_serve_takes_its_settings_from_a_file_and_options_go_before_them(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", [5, 9, 3])
    file = tmp_path / "loader.yaml"
    file.write_text(f"data: {data}\nbatching: rows\nrows_per_step: 2\ncapacity: 16\nranks: 2\nepochs: 1\n")
    endpoint = f"ipc://{tmp_path}/s"
    arguments = ["serve", "--settings", str(file), "--ranks", "1", "--endpoint", endpoint, "--log-json"]
    command = [sys.executable, "-m", "seqmesh.tools.cli", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process, killed_after(process):
        assert process.stdout is not None
        process.stdout.readline()
        with Loader(endpoint=endpoint, rank=0) as loader:
            assert (loader.settings.batching, loader.settings.ranks, loader.settings.seed) == ("rows", 1, 0)
            assert sum(batch.tokens for batch in loader) == 17
        process.terminate()
    file.write_text("rows: 3\n")
    assert "does not make loader settings: data: Field required" in seqmesh("serve", "--settings", file).stderr


def test_keys_are_made_once(tmp_path: Path) -> None:
    made = seqmesh("keys", tmp_path / "keys")
    assert (made.returncode, made.stderr) == (0, "")
    again = seqmesh("keys", tmp_path / "keys")
    assert (again.returncode, "File exists" in again.stderr) == (1, True)


def test_serve_listens_on_this_machine_only(tmp_path: Path) -> None:
    data = make_set(tmp_path, [5])
    result = seqmesh("serve", data, "--tokens-per-step", "8", "--capacity", "8", "--endpoint", "tcp://0.0.0.0:5555")
    assert result.returncode == 1
    assert "must be ipc://PATH or a loopback address" in result.stderr
