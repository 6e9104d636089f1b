"""Mixtures weighed documents where tokens were meant, and a change of weights in mid-run repeated or lost documents."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings, make_settings
from seqmesh.loader.state import StreamState
from seqmesh.loader.stream import served
from tests.support import make_set

SHORT, LONG = 100, 1000  # tokens of a document of A, of B
A, B = 1200, 120  # documents of each

TOKENS = {"tokens_per_step": 10_000, "capacity": 5_000}
ROWS = {"batching": "rows", "rows_per_step": 4, "window": 66, "capacity": 2_500}  # 6 of B come with 60 of A


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = [LONG if n % 11 == 10 else SHORT for n in range(A + B)]
    names = ["B" if n % 11 == 10 else "A" for n in range(A + B)]
    return make_set(tmp_path_factory.mktemp("set"), lengths, sources=names, shard_tokens=100_000)


@pytest.fixture(params=[TOKENS, ROWS], ids=["tokens", "rows"])
def batching(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def mixed(data: Path, batching: dict[str, Any], a: float, b: float, **mixture: Any) -> LoaderSettings:
    sources = {"A": {"weight": a}, "B": {"weight": b}}
    return make_settings({"data": str(data), "seed": 5, "mixture": {"sources": sources} | mixture} | batching)


def take(loader: Loader, tokens: int) -> list[int]:
    """Documents of the next steps, until there are so many tokens."""
    found: list[int] = []
    for batch in loader:
        found += batch.document_ids.tolist()
        tokens -= batch.tokens
        if tokens <= 0 and batch.last_in_step:
            break
    return found


def tokens_of(documents: list[int]) -> dict[str, int]:
    counts = Counter("B" if document % 11 == 10 else "A" for document in documents)
    return {"A": counts["A"] * SHORT, "B": counts["B"] * LONG}


def test_weights_are_of_tokens_and_may_change_without_repeating_or_losing_a_document(
    data: Path, batching: dict[str, Any]
) -> None:
    with Loader(mixed(data, batching, 0.5, 0.5), rank=0, mode="inline") as loader:
        first = take(loader, 100_000)
        state = json.loads(json.dumps(loader.state_dict()))
    found = tokens_of(first)
    assert found["A"] / sum(found.values()) == pytest.approx(0.5, abs=0.02)
    with Loader(mixed(data, batching, 2, 1), rank=0, mode="inline") as loader:
        loader.load_state_dict(state)
        second = take(loader, 60_000)
        after = loader.state_dict()["stream"]
    both = Counter(first + second)
    assert max(both.values()) == 1  # within the epoch of each
    if batching is TOKENS:
        found = tokens_of(second)
        assert found["A"] / sum(found.values()) == pytest.approx(2 / 3, abs=0.02)
        assert served(StreamState.from_dict(after), ("A", "B")) == tokens_of(first + second)
        with Loader(mixed(data, batching, 2, 1), rank=0, mode="inline") as loader:
            loader.load_state_dict(state | {"stream": after})
            rest = take(loader, 40_000)
        a = [document for document in first + second + rest if document % 11 != 10]
        assert sorted(a[:A]) == [document for document in range(A + B) if document % 11 != 10]


def test_two_hundred_thousand_tokens_are_half_and_half(data: Path) -> None:
    with Loader(mixed(data, TOKENS, 0.5, 0.5), rank=0, mode="inline") as loader:
        found = tokens_of(take(loader, 200_000))
    assert found["A"] / sum(found.values()) == pytest.approx(0.5, abs=0.02)
    assert sum(found.values()) >= 200_000


def test_a_source_of_weight_0_is_never_drawn(data: Path, batching: dict[str, Any]) -> None:
    with Loader(mixed(data, batching | {"epochs": 1}, 1, 0), rank=0, mode="inline") as loader:
        assert tokens_of(take(loader, 10**9)) == {"A": A * SHORT, "B": 0}


@pytest.mark.parametrize(("rule", "share_of_a"), [("continue", 1.0), ("stop", 0.0)])
def test_an_exhausted_source_follows_the_stated_rule(data: Path, rule: str, share_of_a: float) -> None:
    settings = mixed(data, TOKENS | {"epochs": 1}, 1, 2, exhausted=rule)
    with Loader(settings, rank=0, mode="inline") as loader:
        found = tokens_of(take(loader, 10**9))
    assert found["B"] == B * LONG
    while_both = B * LONG / 2  # of A
    assert found["A"] == pytest.approx(while_both + share_of_a * (A * SHORT - while_both), abs=10_000)


def test_the_settings_are_kept_when_the_set_is_shuffled_or_not(data: Path) -> None:
    for shuffle in (True, False):
        with Loader(mixed(data, TOKENS | {"shuffle": shuffle}, 0.5, 0.5), rank=0, mode="inline") as loader:
            found = tokens_of(take(loader, 100_000))
        assert found["A"] / sum(found.values()) == pytest.approx(0.5, abs=0.02)
