"""What every test shares: hypothesis without per-example deadlines, since the machine may be busy with other ranks; an
order in which no process is left with a long file at the end."""

import os
import tempfile

import pytest
from hypothesis import settings

# Files of few tests that take long, by how their paths begin; these go first.
LONG = ("docs/", "trainer/", "loader/fleet/", "tools/units/test_ray", "field/test_p2", "benchmarks/")

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test finds what another run, or a user, keeps in the cache.
os.environ["SEQMESH_CACHE"] = tempfile.mkdtemp(prefix="seqmesh-test-cache-")
settings.register_profile("seqmesh", deadline=None)
settings.load_profile("seqmesh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))
