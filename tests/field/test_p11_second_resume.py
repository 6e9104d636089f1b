"""A counter that restarts at zero after a restore, so that the second resume inside an epoch jumps back."""

import json
from pathlib import Path

import pytest

from seqmesh.loader.feed import Feed
from tests.support import make_set, settings_for, walk
from tests.warm import ran

# One process that restores a state, takes some documents, saves, and says which it took.
WORKER = """
import json, pathlib, sys
from seqmesh.loader import Loader, LoaderSettings
settings, state_file, count = LoaderSettings.from_json(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
with Loader(settings, rank=0, mode="inline") as loader:
    if state_file.exists():
        loader.load_state_dict(json.loads(state_file.read_text()))
    taken = [int(batch.document_ids[0]) for _, batch in zip(range(count), loader)]
    state_file.write_text(json.dumps(loader.state_dict()))
print(json.dumps(taken))
"""


@pytest.mark.parametrize("takes", [[30, 10, 1], [7, 7, 7, 7, 7]])
def test_every_resume_goes_on_where_the_last_one_stopped(tmp_path: Path, takes: list[int]) -> None:
    # One document of ten tokens a step: 100 items, one after the other.
    settings = settings_for(
        make_set(tmp_path / "set", [10] * 100), tokens_per_step=10, capacity=10, seed=7, epochs=None
    )
    order = [int(batch.document_ids[0]) for (_, batch), _ in zip(walk(Feed(settings), 0), range(100), strict=False)]
    assert sorted(order) == list(range(100))
    done = 0
    for count in takes:
        output = ran("-c", WORKER, settings.to_json().decode(), tmp_path / "state", str(count))
        assert output.returncode == 0, output.stderr
        taken = json.loads(output.stdout)
        assert taken == order[done : done + count]
        done += count
