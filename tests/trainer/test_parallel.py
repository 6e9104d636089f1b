"""What crosses between ranks, and what they say when one does not do as the others."""

from pathlib import Path

import pytest
import torch

from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings
from seqmesh.trainer.parallel import RankError, Ranks
from tests.ranks import run_ranks
from tests.support import make_set, settings_for

ALONE = Ranks(0, 1, torch.device("cpu"))


def exchange(ranks: Ranks) -> tuple[list[float], int, list[str]]:
    values = torch.tensor([1.0, float(ranks.rank)])
    ranks.sum_(values)
    ranks.wait_for_all()
    said = [ranks.first_text(f"from {ranks.rank}" if ranks.rank in speakers else "") for speakers in ((), (1, 2), (0,))]
    return values.tolist(), ranks.from_first(10 + ranks.rank), said


def test_sums_numbers_and_texts_reach_everybody() -> None:
    assert run_ranks(exchange, 3) == [([3.0, 3.0], 10, ["", "from 1", "from 0"])] * 3
    assert exchange(ALONE) == ([1.0, 0.0], 10, ["", "", "from 0"])


def disagree(ranks: Ranks, texts: list[str]) -> str:
    try:
        ranks.agree(texts[ranks.rank], "the plan of step 7")
    except RankError as error:
        return str(error)
    return "agreed"


def test_ranks_that_differ_are_named_with_what_they_have_on_every_rank() -> None:
    assert run_ranks(disagree, 3, ["aa", "aa", "aa"]) == ["agreed"] * 3
    message = "the plan of step 7 differs: rank 0 has aa, rank 2 has bb"
    assert run_ranks(disagree, 3, ["aa", "aa", "bb"]) == [message] * 3
    assert run_ranks(disagree, 2, ["aa", ""]) == ["the plan of step 7 differs: rank 0 has aa, rank 1 has none"] * 2
    assert disagree(ALONE, ["aa"]) == "agreed"


def first_plan(ranks: Ranks, settings: list[LoaderSettings]) -> str:
    """Each rank asks a loader of its own, as machines do; the plans are compared before any work."""
    with Loader(settings[ranks.rank], rank=ranks.rank, mode="inline") as loader:
        batch = next(iter(loader))
    try:
        ranks.agree(batch.plan, f"the plan of step {batch.step + 1}")
        ranks.agree(batch.next_plan, f"the plan of step {batch.step + 2}")
    except RankError as error:
        return str(error)
    return "agreed"


def test_loaders_that_plan_differently_are_found_before_the_ranks_wait_for_each_other(tmp_path: Path) -> None:
    data = make_set(tmp_path, [9] * 60)
    ours, theirs = settings_for(data, ranks=2), settings_for(data, ranks=2, capacity=45)
    assert run_ranks(first_plan, 2, [ours, ours]) == ["agreed"] * 2
    for message in run_ranks(first_plan, 2, [ours, theirs]):
        assert message.startswith("the plan of step 1 differs: rank 0 has ")
        assert ", rank 1 has " in message


def fail_with(ranks: Ranks, message: str) -> str:
    try:
        with ranks.naming_the_lost("step 3"):
            raise RuntimeError(message)
    except RankError as error:
        return f"named: {error}"
    except RuntimeError as error:
        return f"passed on: {error}"


def test_only_failed_exchanges_are_blamed_on_ranks() -> None:
    (named, _) = run_ranks(fail_with, 2, "gloo: Connection closed by peer")
    assert named == "named: step 3: no answer in time, though all ranks are alive (gloo: Connection closed by peer)"
    assert run_ranks(fail_with, 2, "shapes do not fit") == ["passed on: shapes do not fit"] * 2
    with pytest.raises(RuntimeError, match="Connection"), ALONE.naming_the_lost("step 3"):
        raise RuntimeError("Connection refused")
