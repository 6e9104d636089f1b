"""The architecture holds: imports run downwards, in no circle, and the cheap rooms stay cheap."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each room and what it may import, besides itself.
ROOMS = {
    "packer": set[str](),
    "kernels": set[str](),
    "loader": {"packer"},
    "trainer": {"packer", "kernels", "loader"},
    "benchmarks": {"packer", "kernels", "loader", "trainer", "tools"},
    "tools": {"packer", "kernels", "loader", "trainer", "benchmarks"},
}


def modules() -> dict[str, Path]:
    return {
        ".".join(("seqmesh", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }


def loaded_nodes(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported: not those in functions or under TYPE_CHECKING."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from loaded_nodes(node.orelse)
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from loaded_nodes(getattr(node, name, []))


def imports_of(path: Path, *, everywhere: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else loaded_nodes(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & set(modules())


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_run_downwards_only(name: str) -> None:
    room = name.split(".")[1]
    others = {imported.split(".")[1] for imported in imports_of(modules()[name], everywhere=True)} - {room}
    assert others <= ROOMS[room]


def test_there_is_no_circle() -> None:
    graph = {name: imports_of(path, everywhere=False) - {name} for name, path in modules().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


TOKENIZERS = ("engine", "engines", "file", "patterns", "quicktok_engine", "tiktoken_engine", "training")


def test_tools_import_benchmarks_one_way() -> None:
    """`tools` runs benchmarks; a benchmark may use the shard writer and the parts that it measures, no command."""
    parts = {"corpus", "shard_writer", "units.cut", "units.encoder", "verify"}
    parts |= {f"tokenizers.{name}" for name in TOKENIZERS}
    for name, path in modules().items():
        if name.startswith("seqmesh.benchmarks"):
            used = {m for m in imports_of(path, everywhere=True) if m.startswith("seqmesh.tools")}
            assert used - {"seqmesh.tools"} <= {f"seqmesh.tools.{part}" for part in parts}


def imported_by(code: str) -> set[str]:
    script = f"import sys; {code}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    return set(output.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import seqmesh.packer, seqmesh.loader, seqmesh.trainer", {"numba", "torch", "pyarrow", "zmq", "numpy"}),
        ("import seqmesh.tools.cli", {"numba", "torch", "pyarrow", "zmq", "numpy", "tokenizers", "matplotlib"}),
        ("import seqmesh.loader.server, seqmesh.loader.process, seqmesh.loader.client", {"torch"}),
        ("import seqmesh.loader.fleet.cluster, seqmesh.tools.fleet", {"torch", "ray"}),
        ("import seqmesh.tools.serve, seqmesh.tools.prepare, seqmesh.tools.inspect_set", {"torch"}),
        ("from seqmesh.packer import pack; pack([1], 2)", {"torch", "pyarrow", "zmq"}),
    ],
)
def test_what_is_not_needed_is_not_imported(code: str, absent: set[str]) -> None:
    assert not imported_by(code) & absent


@pytest.mark.parametrize("room", ["packer", "loader", "trainer"])
def test_every_public_name_is_there_and_listed_in_order(room: str) -> None:
    module = __import__(f"seqmesh.{room}", fromlist=["*"])
    assert module.__all__ == sorted(module.__all__) == dir(module)
    for name in module.__all__:
        assert getattr(module, name).__module__.startswith(f"seqmesh.{room}.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing
