"""What a loader process says of itself over HTTP: counted where it happens, and right."""

import logging
import re
import socket as network
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from seqmesh.loader.client import Client
from seqmesh.loader.counters import Counters
from seqmesh.loader.errors import LoaderError, ShardError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.metrics import exposing
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.server import copies_of
from seqmesh.loader.settings import Blocks, LoaderSettings
from seqmesh.loader.storage.cache import Cache
from seqmesh.tools.shard_writer import write_shards
from tests.formats import write_all
from tests.serving import SECONDS, connection, take, wait_until
from tests.support import VOCAB, documents_of, make_set, settings_for, walk

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
    return samples_at(process.log.read_text())


def samples_at(log: str) -> Samples:
    """Of the metrics whose address a log tells last."""
    address = re.findall(r"metrics at (http://[^\"\s]+)", log)[-1]
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


PARTS = ("fetched", "fetched_bytes", "found", "evicted", "fetch_failures", "waited_seconds")


def parts_of(samples: Samples) -> dict[str, float]:
    return {name: samples[f"parts_{name}_total", ""] for name in PARTS}


def test_copies_of_remote_parts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    local = write_shards(tmp_path / "set", documents_of([50] * 60), vocab_size=VOCAB, shard_tokens=500)
    files, size = len(local.shards), max(entry.bytes for entry in local.shards)
    system = fsspec.filesystem("memory")
    system.put(str(tmp_path / "set"), "/counted", recursive=True)
    settings = replace(settings_for(Path()), data="memory://counted", shuffle=False)
    for expected in ({"fetched": files, "found": 0}, {"fetched": 0, "found": files}):
        feed = Feed(settings, cache=Cache(folder=tmp_path / "roomy"))
        list(walk(feed, 0))
        with exposing("127.0.0.1:0", Counters(), copies_of(feed)):
            found = parts_of(samples_at(caplog.text))
        assert found.items() >= (expected | {"evicted": 0, "fetch_failures": 0}).items()
        assert (found["fetched_bytes"] > 0) == (expected["fetched"] > 0)
        feed.shards.close()
    feed = Feed(replace(settings, shuffle=Blocks(window=1)), cache=Cache(folder=tmp_path / "tight", limit=2 * size))
    list(walk(feed, 0))
    with exposing("127.0.0.1:0", Counters(), copies_of(feed)):
        found = parts_of(samples_at(caplog.text))
    assert found["fetched"] >= files
    assert found["evicted"] >= files - 2
    feed.shards.close()
    feed = Feed(settings, cache=Cache(folder=tmp_path / "new"))
    system.rm("/counted/shard-00001.arrow")
    with pytest.raises((ShardError, FileNotFoundError)):
        list(walk(feed, 0))
    with exposing("127.0.0.1:0", Counters(), copies_of(feed)):
        assert parts_of(samples_at(caplog.text))["fetch_failures"] >= 1
    feed.shards.close()
    system.rm("/counted", recursive=True)


def test_a_loader_process_tells_of_copies_only_where_there_are_any(process: LoaderProcess, tmp_path: Path) -> None:
    place = write_all(tmp_path, documents_of([40] * 30), vocab=VOCAB)["parquet"]
    settings = replace(settings_for(place), vocab_size=VOCAB)
    with LoaderProcess(
        settings, options=ServeOptions(metrics="127.0.0.1:0", cache=str(tmp_path / "cache"))
    ) as decoding:
        parts = parts_of(scrape(decoding))
        assert parts["fetched"] + parts["found"] >= 1  # the first batch's, before it was ready; a scan may have made it
    assert not any(name.startswith("parts") for name, _ in scrape(process))


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
