"""`seqmesh doctor`: what loaders run on this machine, what killed ones have left, and whether the machine is fit.

Every check finds something that is ok, a warning or a problem, and says what to do about it. Nothing is changed but by
`clean`, which removes what dead processes left.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqmesh.loader.files import atomic_write
from seqmesh.tools.checkup import Finding, check_machine, check_port, places, size
from seqmesh.tools.leftovers import Leftover, find_leftovers, remove
from seqmesh.tools.output import check_folders, print_whole, print_written
from seqmesh.tools.running import RunningLoader, find_running

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
BUSY = 0.8  # of the descriptors that a process may open


def run(
    *,
    clean: bool = False,
    ports: tuple[int, ...] = (),
    json_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """The whole command. clean: remove leftovers. ports: say of each whether it is free. Ends by SystemExit with 1
    where there is a problem."""
    check_folders(json_path)
    console = console or Console()
    loaders, left = find_running(places()), find_leftovers(places())
    findings = [*check_machine(), *(check_port(port, loaders) for port in ports)]
    findings += [finding for loader in loaders for finding in check_loader(loader)]
    findings += check_leftovers(left, clean=clean)
    if loaders:
        print_whole(console, _loader_table(loaders))
    else:
        console.print("no loader of this user runs here")
    print_whole(console, _finding_table(findings))
    if json_path is not None:
        found = {
            "loaders": [loader.to_dict() for loader in loaders],
            "leftovers": [each.to_dict() for each in left],
            "findings": [asdict(finding) for finding in findings],
        }
        atomic_write(json_path, json.dumps(found, indent=1).encode() + b"\n")
        print_written(console, json_path)
    if any(finding.level == "problem" for finding in findings):
        raise SystemExit(1)


def check_loader(loader: RunningLoader) -> list[Finding]:
    name, endpoint = f"loader {loader.pid}", loader.entry.endpoint
    if loader.stopped:
        words = "it is stopped: its ranks wait until their timeout"
        return [Finding(name, "warning", words, f"kill -CONT {loader.pid}, or end it")]
    if not loader.listens:
        words = f"nobody listens at {endpoint}: ranks can not come (back)"
        return [Finding(name, "problem", words, f"end it (kill {loader.pid}) and start it again")]
    if loader.open_files > BUSY * loader.most_files > 0:
        words = f"{loader.open_files} of {loader.most_files} descriptors are open"
        return [Finding(name, "warning", words, "raise the limit of open files (ulimit -n) where it is started")]
    return [Finding(name, "ok", f"listens at {endpoint}")]


def check_leftovers(left: list[Leftover], *, clean: bool) -> list[Finding]:
    """One finding for each, removed where that is asked for."""
    if not left:
        return [Finding("leftovers", "ok", "none of killed loaders")]
    findings = []
    for each in left:
        words = f"{each.path} ({size(each.size)}) of process {each.pid}, which has ended"
        if not clean:
            findings.append(Finding("leftovers", "warning", words, "seqmesh doctor --clean removes it"))
        elif remove(each):
            findings.append(Finding("leftovers", "ok", f"removed {words}"))
        else:
            findings.append(Finding("leftovers", "warning", f"{words}: not removed", "it is in use, or not ours"))
    return findings


def _loader_table(loaders: list[RunningLoader]) -> Table:
    table = Table(box=SIMPLE, title="loaders", title_justify="left")
    for name in ("pid", "since", "endpoint", "data", "ranks", "memory", "of it rings", "readers"):
        table.add_column(name, justify="left" if name in ("since", "endpoint", "data", "readers") else "right")
    for loader in loaders:
        entry = loader.entry
        since, readers = f"{entry.since:%Y-%m-%d %H:%M:%S} UTC", " ".join(map(str, loader.readers)) or "-"
        memory = size(loader.resident), size(loader.shared)
        row = str(loader.pid), since, entry.endpoint, entry.data, str(entry.ranks), *memory, readers
        table.add_row(*map(Text, row))
    return table


def _finding_table(findings: list[Finding]) -> Table:
    table = Table(box=SIMPLE, title="checks", title_justify="left")
    for name in ("check", "", "found", "what to do"):
        table.add_column(name)
    for each in findings:
        level = Text(each.level, style=STYLES[each.level])
        table.add_row(each.check, level, Text(each.found), Text(each.advice))
    return table
