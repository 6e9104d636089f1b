"""A Loader in the loops of others: read ahead, wrapped in data loaders, in processes of every kind, in a notebook."""

import asyncio
import copy
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from seqmesh.loader.embedded import REMEMBERED_STEPS, Loader
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.settings import LoaderSettings
from tests.support import long_tail, make_set, settings_for

SECONDS = 100


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), long_tail(300, 40), shard_tokens=2000)
    return settings_for(data, capacity=48, ranks=2, epochs=2)


@pytest.fixture(params=["inline", "process"])
def loader(request: pytest.FixtureRequest, made: LoaderSettings) -> Iterator[Loader]:
    with Loader(made, rank=1, mode=request.param) as opened:
        yield opened


def names(batches: Any) -> list[tuple[int, int, list[int]]]:
    """Which batches these are."""
    return [(batch.step, batch.wave, batch.document_ids.tolist()) for batch in batches]


def test_the_state_after_a_step_is_known_also_to_who_reads_ahead(loader: Loader) -> None:
    states = {0: loader.state_dict()}
    assert loader.state_dict(step=0) == states[0]
    every = []
    for batch in loader:
        every.append(batch)
        if batch.last_in_step:
            states[batch.step + 1] = loader.state_dict()
            known = [step for step in states if step > batch.step + 1 - REMEMBERED_STEPS]
            assert [loader.state_dict(step=step) for step in known] == [states[step] for step in known]
    last = every[-1].step + 1
    assert last > REMEMBERED_STEPS
    for step in (0, last - REMEMBERED_STEPS, last + 1):
        with pytest.raises(ValueError, match=f"step is {step}: .* after {last - REMEMBERED_STEPS + 1} to {last} steps"):
            loader.state_dict(step=step)
    again = last - 3
    loader.load_state_dict(loader.state_dict(step=again))
    assert loader.state_dict(step=again) == states[again]
    with pytest.raises(ValueError, match=f"after {again} to {again} steps"):
        loader.state_dict(step=last)
    assert names(loader) == names(batch for batch in every if batch.step >= again)
    assert loader.steps == last


def test_no_end_of_a_step_is_known_right_after_a_state_from_inside_of_one(loader: Loader) -> None:
    batches = iter(loader)
    while (batch := next(batches)).last_in_step:
        pass
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="none is yet"):
        loader.state_dict(step=batch.step)
    assert loader.steps > batch.step


def test_iterating_again_goes_on(loader: Loader) -> None:
    first = [batch for batch, _ in zip(loader, range(3), strict=False)]  # takes a fourth from the iterator
    state = loader.state_dict()
    rest = list(loader)
    assert first
    assert list(loader) == []
    loader.load_state_dict(state)
    assert names(loader) == names(rest)


def test_inside_torch_data_loaders(loader: Loader) -> None:
    start = loader.state_dict()
    expected = names(loader)
    loader.load_state_dict(start)
    plain: DataLoader[Any] = DataLoader(loader, batch_size=None)
    assert names(plain) == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
def test_inside_the_stateful_data_loader(made: LoaderSettings, loader: Loader) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    start = loader.state_dict()
    expected = names(loader)
    loader.load_state_dict(start)
    wrapped = stateful(loader, batch_size=None, num_workers=0)
    batches = iter(wrapped)
    first = names(next(batches) for _ in range(7))
    state = wrapped.state_dict()
    with Loader(made, rank=1, mode="inline") as other:
        resumed = stateful(other, batch_size=None, num_workers=0)
        resumed.load_state_dict(state)
        assert first + names(resumed) == expected
    assert first + names(batches) == expected


def test_worker_processes_are_refused_in_words(loader: Loader) -> None:
    forking: DataLoader[Any] = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(LoaderError, match=r"rank 1: .* set num_workers to 0"):
        list(forking)
    spawning: DataLoader[Any] = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch guesses at what may be wrong, and then says what is
        with pytest.raises(TypeError, match=r"can not be pickled or copied.*num_workers to 0"):
            list(spawning)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="can not be pickled or copied"):
            attempt(loader)
    assert list(loader)  # the loader itself is none the worse


def test_in_a_thread_and_beside_a_running_event_loop(made: LoaderSettings) -> None:
    """As in a notebook, whose cells run while a loop does."""
    with Loader(made, rank=0, mode="inline") as alone:
        expected = names(alone)
    got: list[Any] = []

    def read() -> None:
        with Loader(made, rank=0) as loader:
            got.append(names(loader))

    async def cell() -> None:
        read()
        await asyncio.to_thread(read)

    asyncio.run(cell())
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert got == [expected] * 3


def run(script: str, *arguments: str, stdin: bool = False) -> list[str]:
    """Lines that a Python script prints in a process of its own."""
    command = [sys.executable, *(["-i", "-q"] if stdin else ["-c", script]), *arguments]
    done = subprocess.run(
        command, input=script if stdin else None, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CHILD = """
    from seqmesh.loader import Loader, LoaderSettings
    def read(settings, rank, results):
        with Loader(LoaderSettings.from_json(settings), rank=rank) as loader:
            results.put((rank, sum(batch.tokens for batch in loader), loader.steps))
"""


def test_in_children_that_are_spawned_or_come_from_a_fork_server(made: LoaderSettings, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(textwrap.dedent(CHILD))
    script = f"""
    import multiprocessing as mp, sys
    sys.path.insert(0, {str(tmp_path)!r})
    from child import read
    if __name__ == "__main__":
        children = []
        for rank, method in enumerate(("spawn", "forkserver")):
            context = mp.get_context(method)
            results = context.Queue()
            child = context.Process(target=read, args=(sys.argv[1], rank, results))
            child.start()
            children.append((child, results))
        for child, results in children:
            print(results.get(timeout=90))
            child.join()
            print(child.exitcode)
    """
    lines = run(textwrap.dedent(script), made.to_json().decode())
    expected = []
    for rank in range(2):
        with Loader(made, rank=rank, mode="inline") as loader:
            expected += [str((rank, sum(batch.tokens for batch in loader), loader.steps)), "0"]
    assert lines == expected


def test_in_a_script_without_a_guard_and_typed_into_an_interpreter(made: LoaderSettings, tmp_path: Path) -> None:
    """The loader process starts by its own command, so it never runs the script again."""
    body = """
    from seqmesh.loader import Loader, LoaderSettings
    print("once")
    loader = Loader(LoaderSettings.from_json({!r}), rank=0)
    print(sum(batch.tokens for batch in loader), loader.steps)
    """
    script = textwrap.dedent(body).format(made.to_json().decode())
    with Loader(made, rank=0, mode="inline") as loader:
        expected = ["once", f"{sum(batch.tokens for batch in loader)} {loader.steps}"]
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr
    assert run(script, stdin=True) == expected
