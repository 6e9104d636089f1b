"""A Ray cluster of two nodes on this machine, and what `prepare` does there, told in a line of JSON.

Run as `python -m tests.ray_prepare FOLDER TOKENIZER` by `tests.ray_spaces`. FOLDER holds the inputs: `in`, and `lines`
for standard input.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster
from ray.util import placement_group, remove_placement_group

from seqmesh.tools.cluster import connected
from seqmesh.tools.inputs import find_files
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.prepare_report import Progress
from seqmesh.tools.tokenizers.file import load_tokenizer
from seqmesh.tools.units import cut, ray_crew
from seqmesh.tools.units.crew import Job
from seqmesh.tools.units.cut import Unit, units
from seqmesh.tools.units.filters import Filters
from tests.ray_cluster import MEMORY
from tests.serving import SECONDS, wait_until

SHARD_TOKENS = 2000
WORKERS = 3


class Deadly:
    """A file system that ends the process which opens a file in it."""

    def open(self, *_: object) -> None:
        os._exit(1)


def workers() -> list[int]:
    """Processes of the crew, which is all that these nodes run."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _is_worker(path)]


def _is_worker(path: Path) -> bool:
    try:
        return path.read_bytes().startswith(b"ray::_Worker")
    except OSError:
        return False


def with_faults(options: PrepareOptions, cluster: Any, second: Any) -> dict[str, Any]:
    """A run on whose way a worker is killed, and then a node with two of three workers is removed. Some of its lines
    are standard input, which is here alone."""
    updates = travelled = 0
    travelling = ray_crew.travelling

    def counted(unit: Unit) -> Unit:
        nonlocal travelled
        sent = travelling(unit)
        travelled += sum(reading.data is not None for reading in sent.readings if reading.file.name == "stdin")
        return sent

    def hurt(_: Progress) -> None:
        nonlocal updates
        updates += 1
        if updates == 20:
            wait_until(lambda: len(workers()) == WORKERS)
            os.kill(workers()[0], signal.SIGKILL)
        if updates == 60:
            cluster.remove_node(second)

    ray_crew.travelling = counted
    with (options.out.parent / "lines").open() as sys.stdin:
        prepare(options, progress=hurt)
    return {"updates": updates, "travelled": travelled}


def said_by(call: Callable[[], object]) -> str:
    """What is said of a run that can not be."""
    try:
        call()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "it went well"


def crew_of_one(job: Job, address: str, path: Path) -> dict[str, Any]:
    """What it is asked for ahead, files that its node does not see as they are, a unit that kills whoever has it."""
    files = find_files([str(path)])
    work = list(units(files))[:8]
    found: dict[str, Any] = {"ahead": [], "in order": []}
    drawn = 0

    def source() -> Iterator[Unit]:
        nonlocal drawn
        for unit in work:
            drawn += 1
            yield unit

    away, data = path.with_suffix(".away"), path.read_bytes()
    with ray_crew.ray_crew(job, files, workers=1, address=address) as crew:
        for taken, (unit, _) in enumerate(crew.encode(source()), 1):
            found["ahead"].append(drawn - taken)
            found["in order"].append(unit is work[taken - 1])
        path.rename(away)
        found["not seen"] = said_by(lambda: [*crew.encode(work)])
        path.write_bytes(data[:-1])
        found["another file"] = said_by(lambda: [*crew.encode(work)])
        away.rename(path)
        reading = work[0].readings[0]
        deadly = replace(work[0], readings=(replace(reading, file=replace(reading.file, filesystem=Deadly())),))
        ray_crew.TRIES, tries = 2, ray_crew.TRIES
        found["deadly"] = said_by(lambda: [*crew.encode([deadly])])
        ray_crew.TRIES = tries
        found["afterwards"] = len([*crew.encode(work)])
    return found


def no_crews(job: Job, address: str, path: Path) -> dict[str, str]:
    """Of a cluster with other packages, and of one where others have everything."""
    files = find_files([str(path)])
    work = list(units(files))[:1]

    def encode() -> None:
        with ray_crew.ray_crew(job, files, workers=1, address=address) as crew:
            list(crew.encode(work))

    versions = ray_crew.versions
    ray_crew.versions = lambda: versions() | {"tokenizers": "0.0.1"}
    found = {"another version": said_by(encode)}
    ray_crew.versions = versions
    taken = placement_group([{"CPU": 1}] * WORKERS)
    taken.wait(SECONDS)
    ray_crew.PLACING_SECONDS = 1.0
    found["no room"] = said_by(encode)
    remove_placement_group(taken)
    return found


def main(folder: Path, tokenizer: Path) -> None:
    cut.UNIT_BYTES = 4000
    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=MEMORY)
    second = cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    options = PrepareOptions(
        inputs=(str(folder / "in"), "-"),
        out=folder / "out",
        tokenizer=str(tokenizer),
        engine="tokenizers",
        shard_tokens=SHARD_TOKENS,
        workers=WORKERS,
        on="ray",
        ray_address=cluster.address,
    )
    job = Job(tokenizer=load_tokenizer(tokenizer), engine="tokenizers", filters=Filters())
    path = folder / "in" / "a.jsonl"
    placing = ray_crew.PLACING_SECONDS
    with connected(cluster.address, what="this"):
        found = crew_of_one(job, cluster.address, path) | no_crews(job, cluster.address, path)
    ray_crew.PLACING_SECONDS = placing
    found["faults"] = with_faults(options, cluster, second)
    wait_until(lambda: not workers())
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
