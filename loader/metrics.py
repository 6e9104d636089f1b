"""Prometheus metrics of a loader process, made from its `Counters` whenever somebody asks: counting costs nothing more.

`exposing("127.0.0.1:9400", counters)` serves them at http://127.0.0.1:9400/metrics while its block runs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from seqmesh.loader.counters import Counters
from seqmesh.loader.storage.bringer import StoreCounters

PREFIX = "seqmesh_loader"
TOTALS = {
    "planned_steps": "Steps planned",
    "planned_tokens": "Tokens of the steps planned",
    "plan_seconds": "Seconds spent planning",
    "read_batches": "Micro-batches gathered from the shards",
    "read_tokens": "Tokens gathered from the shards",
    "read_bytes": "Bytes of the blocks gathered",
    "read_seconds": "Seconds spent gathering",
    "refused": "Messages refused that were not the protocol's",
}
RANK_TOTALS = {
    "sent": "Micro-batches sent, again after a fault included",
    "sent_bytes": "Bytes of the micro-batches sent",
    "delivered": "Micro-batches that the rank acknowledged",
    "delivered_tokens": "Tokens of the micro-batches that the rank acknowledged",
    "hellos": "Sessions begun by the rank's processes",
}

STORE_TOTALS = {
    "fetched": ("parts_fetched", "Local copies of parts made, by fetching or decoding them"),
    "fetched_bytes": ("parts_fetched_bytes", "Bytes of the copies made"),
    "hits": ("parts_found", "Parts whose copy was there already"),
    "evicted": ("parts_evicted", "Copies removed to make room for others"),
    "failures": ("parts_fetch_failures", "Parts that could not be fetched or decoded"),
    "waited_seconds": ("parts_waited_seconds", "Seconds in which serving stood still until a part had come"),
}

log = logging.getLogger("seqmesh.loader")

CopiesSoFar = Callable[[], StoreCounters]


class LoaderCollector(Collector):
    """Turns counters into metric families, from whatever thread. copies: of parts that are not read in their place;
    None where all are."""

    def __init__(self, counters: Counters, copies: CopiesSoFar | None = None) -> None:
        self._counters = counters
        self._copies = copies

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        for name, words in TOTALS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", words, value=getattr(counters, name))
        yield GaugeMetricFamily(f"{PREFIX}_step", "Newest step that was planned", value=counters.step)
        served = CounterMetricFamily(f"{PREFIX}_served_tokens", "Tokens taken from each source", labels=["source"])
        for source, tokens in counters.served().items():
            served.add_metric([source], tokens)
        yield served
        ranks = dict(counters.ranks)
        for name, words in RANK_TOTALS.items():
            family = CounterMetricFamily(f"{PREFIX}_{name}", words, labels=["rank"])
            for rank, each in ranks.items():
                family.add_metric([str(rank)], getattr(each, name))
            yield family
        under_way = GaugeMetricFamily(f"{PREFIX}_under_way_bytes", "Bytes a rank has not let go of", labels=["rank"])
        for rank, each in ranks.items():
            under_way.add_metric([str(rank)], each.under_way_bytes)
        yield under_way
        if self._copies is not None:
            copies = self._copies()
            for field, (name, words) in STORE_TOTALS.items():
                yield CounterMetricFamily(f"{PREFIX}_{name}", words, value=getattr(copies, field))


@contextlib.contextmanager
def exposing(address: str | None, counters: Counters, copies: CopiesSoFar | None = None) -> Iterator[None]:
    """Serve the metrics at HOST:PORT; a port of 0 takes a free one, which the log tells. None: do nothing. copies: see
    `LoaderCollector`.

    Raises ValueError for another kind of address, OSError where it is taken.
    """
    if address is None:
        yield
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"metrics is {address!r}: must be HOST:PORT, for example 127.0.0.1:9400")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LoaderCollector(counters, copies))
    try:
        server, thread = start_http_server(int(port), addr=host, registry=registry)
    except OSError as error:
        raise OSError(f"metrics can not be served at {address}: {error.strerror or error}") from error
    log.info("metrics at http://%s:%d/metrics", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
