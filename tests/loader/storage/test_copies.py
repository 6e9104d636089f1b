import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.loader.storage.copies import Copies, Copy, victims

SECONDS = 20.0


def here(copies: Copies) -> set[str]:
    """Names of the whole copies."""
    return {path.name for path in copies.folder.glob("[!.]*") if path.suffix not in (".lock", ".tmp")}


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"x" * 1000)
    copies = Copies(tmp_path, 10, SECONDS)
    with copies.making("a"):
        assert copies.reserve("a", 10) is not None
        assert copies.reserve("b", 10) is None
    assert (tmp_path / "precious").exists()


def test_a_copy_that_is_removed_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Copies(tmp_path, 10, SECONDS)
    one.path("a").write_bytes(b"a")
    flock = fcntl.flock

    def lock(descriptor: int, kind: int) -> None:
        one.path("a").unlink(missing_ok=True)  # just before
        flock(descriptor, kind)

    monkeypatch.setattr("fcntl.flock", lock)
    assert one.hold("a") is None


def test_claims_are_seen_until_they_end(tmp_path: Path) -> None:
    one, other = Copies(tmp_path, 10, SECONDS), Copies(tmp_path, 10, SECONDS)
    assert not one.is_claimed()
    claims = [other.claim(), one.claim()]
    for claim in claims:
        assert one.is_claimed() and other.is_claimed()
        os.close(claim)
    assert not other.is_claimed()


Entries = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 50), st.booleans()), max_size=8)


@given(Entries, st.integers(-20, 200))
def test_victims_are_those_a_slow_search_finds(entries: list[tuple[int, int, bool]], excess: int) -> None:
    """Of all sets of copies that may go, in order of age without a gap, the smallest that is enough."""
    copies = [Copy(f"c{i}", size, used) for i, (used, size, _) in enumerate(entries)]
    free = {f"c{i}" for i, (_, _, is_free) in enumerate(entries) if is_free}
    oldest = [copy for copy in sorted(copies, key=lambda copy: (copy.used, copy.name)) if copy.name in free]
    prefixes = [oldest[:count] for count in range(len(oldest) + 1)]
    expected = next((some for some in prefixes if sum(copy.size for copy in some) >= excess), None)
    assert victims(copies, excess, lambda copy: copy.name in free) == expected


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(10, 40), st.booleans()), min_size=1, max_size=25))
def test_copies_on_a_disk_follow_a_slow_model(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool]]
) -> None:
    """Each step uses a part, made if it is not there, and keeps it held or lets it go."""
    limit, model, held = 100, dict[str, int](), dict[str, int]()
    copies = Copies(tmp_path_factory.mktemp("copies"), limit, SECONDS)
    for number, size, keeps in steps:
        name = f"p{number}"
        if name in model:
            model[name] = model.pop(name)  # the newest is the last
            descriptor = copies.hold(name)
        else:
            going, room = list[str](), limit - sum(model.values()) - size
            for other in [other for other in model if other not in held]:
                if room < 0:
                    going.append(other)
                    room += model[other]
            with copies.making(name) as ours:
                assert ours
                path = copies.reserve(name, size)
                assert (path is not None) == (room >= 0)
                if path is None:
                    continue
                path.write_bytes(b"x" * size)
                descriptor = copies.publish(path)
                copies.discard(path)
            model = {other: size for other, size in model.items() if other not in going} | {name: size}
        assert descriptor is not None
        if name not in held and keeps:
            held[name] = descriptor
        else:
            os.close(descriptor)
        assert here(copies) == set(model)
        assert copies.taken() == sum(model.values()) <= limit
    for descriptor in held.values():
        os.close(descriptor)
