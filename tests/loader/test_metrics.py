"""What a loader process says of itself over HTTP: counted where it happens, and right."""

import re
import socket as network
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from seqmesh.loader.client import Client
from seqmesh.loader.counters import Counters
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.metrics import exposing
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, connection, take, wait_until
from tests.support import make_set, settings_for

CREDIT = 4000  # bytes: more than a few batches

Samples = dict[tuple[str, str], float]  # by name, without the prefix, and the value of the label: rank or source


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), [10] * 80)
    return settings_for(data, tokens_per_step=40, capacity=10, ranks=2).resolved()


@pytest.fixture(scope="module")
def process(settings: LoaderSettings) -> Iterator[LoaderProcess]:
    with LoaderProcess(settings, options=ServeOptions(metrics="127.0.0.1:0")) as process:
        yield process


def scrape(process: LoaderProcess) -> Samples:
    (address,) = re.findall(r"metrics at (http://[^\"]+)", process.log.read_text())
    with urllib.request.urlopen(address, timeout=SECONDS) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix("seqmesh_loader_"), "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def totals(samples: Samples) -> Samples:
    return {key: value for key, value in samples.items() if key[0].endswith("_total")}


def test_counters_only_rise_and_tell_what_was_done(settings: LoaderSettings, process: LoaderProcess) -> None:
    feed = Feed(settings)
    clients = [Client(process.endpoint, rank=rank, credit=CREDIT, timeout=SECONDS) for rank in range(2)]
    before, seen = scrape(process), Samples()
    for client in clients:
        client.subscribe(Position(feed.start))
    for taken in range(1, 6):
        take(clients[0], 1)
        after = scrape(process)
        assert all(after[key] >= value for key, value in totals(seen).items())
        assert after["delivered_total", "0"] <= taken
        assert after["sent_total", "0"] >= taken  # ahead of the rank
        seen = after
    every = take(clients[1])
    for client in clients:
        client.close()
    wait_until(lambda: scrape(process)["under_way_bytes", "1"] == 0)
    done = scrape(process)
    sent = {rank: done["sent_total", rank] for rank in "01"}
    assert done["delivered_total", "0"] == 5 < sent["0"]
    assert done["delivered_total", "1"] == sent["1"] == len(every) == 40
    assert done["delivered_tokens_total", "1"] == 400
    assert done["under_way_bytes", "0"] == 0
    assert done["read_batches_total", ""] == sum(sent.values())
    assert done["read_tokens_total", ""] == 10 * sum(sent.values())
    assert done["sent_bytes_total", "0"] + done["sent_bytes_total", "1"] == done["read_bytes_total", ""]
    assert done["hellos_total", "0"] == 1
    assert done["planned_steps_total", ""] >= 20
    assert done["planned_tokens_total", ""] == 40 * done["planned_steps_total", ""]
    assert done["plan_seconds_total", ""] > before["plan_seconds_total", ""] > 0
    assert done["read_seconds_total", ""] > 0
    assert done["step", ""] == 19
    assert done["served_tokens_total", "all"] == 800


def test_what_is_refused_is_counted(process: LoaderProcess) -> None:
    before = scrape(process)["refused_total", ""]
    with connection(process.endpoint) as stranger:
        for _ in range(7):
            stranger.send(b"nonsense")
        wait_until(lambda: scrape(process)["refused_total", ""] == before + 7)


@pytest.mark.parametrize("address", ["9400", "localhost", ":9400", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:65536"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=f"metrics is '{address}': must be HOST:PORT"), exposing(address, Counters()):
        pytest.fail("it serves")


def test_a_port_that_is_taken_is_named(settings: LoaderSettings, tmp_path: Path) -> None:
    with network.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(OSError, match=f"metrics can not be served at {address}: "),
            exposing(address, Counters()),
        ):
            pytest.fail("it serves")
        with pytest.raises(LoaderError, match=f"exit code 2: metrics can not be served at {address}"):
            LoaderProcess(settings, options=ServeOptions(metrics=address), log=tmp_path / "log")
