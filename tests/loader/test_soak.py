"""A little of what `make soak` does for long."""

import pytest

from seqmesh.loader.settings import LoaderSettings
from tests.soak import SAMPLES, Use, check_flat, run_batches, run_kills, run_reconnects, small_batches


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return small_batches(tmp_path_factory.mktemp("set"))


def test_memory_and_descriptors_stay_where_they_are(settings: LoaderSettings) -> None:
    check_flat(run_batches(settings, 20_000))


def test_a_rank_may_leave_and_come_back_a_hundred_times(settings: LoaderSettings) -> None:
    run_reconnects(settings, 100)


def test_a_loader_may_be_killed_again_and_again(settings: LoaderSettings) -> None:
    assert len(run_kills(settings, 3)) == 3


@pytest.mark.parametrize(("memory", "files", "words"), [(1 << 20, 0, "grew by"), (0, 1, "left descriptors open")])
def test_what_grows_is_found(memory: int, files: int, words: str) -> None:
    uses = [[Use(memory * n, 10 + files * n)] for n in range(SAMPLES)]
    with pytest.raises(AssertionError, match=words):
        check_flat(uses)
