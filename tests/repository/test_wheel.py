"""What is built is what is in the tree, and it runs where there is nothing else."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("packer", "loader", "kernels", "trainer", "tools", "benchmarks")


def build(kind: str, folder: Path) -> Path:
    """Build with the backend of pyproject.toml, in this environment."""
    code = f"from hatchling.build import build_{kind} as b; print(b(r'{folder}'))"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    return folder / output.stdout.split()[-1]


def output_of(command: list[str | Path], folder: Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, timeout=120).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def tracked(*folders: str) -> set[str]:
    """Files of these folders, without what only running leaves there."""
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_exactly_the_rooms(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in code} == {"seqmesh"}
    assert code == {f"seqmesh/{name}" for name in tracked(*ROOMS)}


def test_every_room_is_typed_and_only_the_right_ones_are_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert all(f"seqmesh/{room}/py.typed" in names for room in ROOMS)
    # A folder `kernels` or `tools` that were a package would hide the distributions of that name at the root.
    assert not {"seqmesh/kernels/__init__.py", "seqmesh/tools/__init__.py", "seqmesh/__init__.py"} & names


def test_the_source_archive_does_not_follow_the_link(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert not any(".pyroot" in name for name in inside)
    assert tracked(*ROOMS) <= inside
    assert {"README.md", "LICENSE", "pyproject.toml", "constraints.txt"} <= inside


def test_the_installed_wheel_runs_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    """An empty environment, with this one's dependencies on its path but not the repository."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    output_of([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], tmp_path)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")) + "\n")
    # The dependencies' folder has a .pth line of its own for the repository, but such lines are not followed twice.
    assert output_of([tmp_path / "venv" / "bin" / "seqmesh", "--version"], tmp_path) == "seqmesh 0.1.0\n"
    code = "import seqmesh.packer.bins as b; print(b.__file__, b.pack([3, 2, 1], 3).count)"
    where, count = output_of([python, "-c", code], tmp_path).split()
    assert where.startswith(str(site))
    assert count == "2"
