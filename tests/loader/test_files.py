from pathlib import Path

import pytest
import xxhash

from seqmesh.loader.files import CHUNK_BYTES, atomic_path, atomic_write, checksum


def test_a_file_appears_whole(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", b"first")
    atomic_write(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"second"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", b"old")
    with pytest.raises(RuntimeError, match="in the middle"), atomic_path(tmp_path / "a") as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError("in the middle")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_checksum_is_xxh3_128_of_all_bytes(tmp_path: Path, size: int) -> None:
    data = b"x" * size
    (tmp_path / "a").write_bytes(data)
    assert checksum(tmp_path / "a") == xxhash.xxh3_128(data).hexdigest()
