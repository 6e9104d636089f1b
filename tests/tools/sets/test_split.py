"""split and reshard: every document exactly once, where and in which order it should be."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.loader.manifest import read_manifest
from seqmesh.packer.permute import permutation, shuffle_key
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.sets import reading
from seqmesh.tools.sets.reshard import reshard_set
from seqmesh.tools.sets.split import (
    Part,
    drawn,
    folder_name,
    parse_part,
    run,
    share_sizes,
    split_by_source,
    split_set,
    spread,
)
from seqmesh.tools.shard_writer import write_shards
from tests.tools.sets.sets import FAST, a_set, assert_whole, bytes_of, rows_of

shares = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(lambda w: [Fraction(n, sum(w)) for n in w])


@given(count=st.integers(0, 500), shares=shares, seed=st.integers(0, 9))
def test_every_document_goes_to_one_set_and_sizes_are_exact(count: int, shares: list[Fraction], seed: int) -> None:
    sizes = share_sizes(count, shares)
    assert sum(sizes) == count
    assert all(abs(size - count * share) < 1 for size, share in zip(sizes, shares, strict=True))
    for member in (drawn(sizes, seed), spread(sizes)):
        assert np.bincount(member, minlength=len(sizes)).tolist() == sizes


@given(count=st.integers(1, 300), small=st.integers(1, 100))
def test_every_takes_even_distances(count: int, small: int) -> None:
    sizes = [count - min(small, count), min(small, count)]
    gaps = np.diff(np.flatnonzero(spread(sizes) == 1))
    if len(gaps):
        assert gaps.max() - gaps.min() <= 1


def test_different_seeds_choose_differently() -> None:
    assert (drawn([900, 100], 0) != drawn([900, 100], 1)).any()
    for part in np.split(drawn([5000, 5000], 0), 10):  # everywhere alike: 500 ± 16
        assert 420 < part.sum() < 580


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 30), max_size=40),
    shares=shares,
    seed=st.one_of(st.none(), st.integers(0, 3)),
    shard_tokens=st.integers(1, 80),
    block=st.sampled_from([5, 1 << 20]),
)
def test_splits_are_disjoint_and_complete(
    lengths: list[int], shares: list[Fraction], seed: int | None, shard_tokens: int, block: int
) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_TOKENS", block)
        folder = Path(name)
        documents = [np.full(length, number) for number, length in enumerate(lengths)]
        sources = ["even" if number % 2 == 0 else "odd" for number in range(len(lengths))]
        targets = [[(0, 1)] if number % 3 == 0 else None for number in range(len(lengths))]
        write_shards(folder / "set", documents, sources=sources, targets=targets, shard_tokens=50)
        parts = [Part(out=folder / f"out{number}", share=share) for number, share in enumerate(shares)]
        split_set(str(folder / "set"), parts, seed=seed, shard_tokens=shard_tokens)
        found = [rows_of(part.out) for part in parts]
        whole = rows_of(folder / "set")
        assert sorted((row for rows in found for row in rows), key=lambda row: int(row[0])) == whole
        for rows, part in zip(found, parts, strict=True):
            assert [int(row[0]) for row in rows] == sorted(int(row[0]) for row in rows)
            assert_whole(part.out)


def test_a_split_by_source_gives_each_its_set(tmp_path: Path) -> None:
    names = ["web", "a/b", "..", "web", "code", "x", "y"]
    a_set(tmp_path / "set", 70, sources=names * 10)
    made = split_by_source(str(tmp_path / "set"), tmp_path / "out")
    whole = rows_of(tmp_path / "set")
    assert set(made) == set(names)
    for name in made:
        assert rows_of(tmp_path / "out" / folder_name(name)) == [row for row in whole if row[1] == name]
        assert made[name].sources == (name,)
        assert_whole(tmp_path / "out" / folder_name(name))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(map(folder_name, made))
    assert folder_name("..") == "%2E%2E"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a=0.5", "b=0.4"], "the shares add up to 0.9: must be 1"),
        (["a=0.5", "b=x"], "'b=x' is not OUT=SHARE"),
        (["a=0", "b=1"], "'a=0' is not OUT=SHARE.*above 0"),
        (["a=1/2", "./a=1/2"], "two of the sets have the same name"),
    ],
)
def test_unfit_shares_are_refused(
    tmp_path: Path, texts: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a_set(tmp_path / "set", 5)
    with pytest.raises(ValueError, match=message):
        split_set("set", [parse_part(text) for text in texts])
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_nothing_is_left_of_a_split_where_one_folder_is_taken(tmp_path: Path) -> None:
    data = str(a_set(tmp_path / "set", 5))
    (tmp_path / "b").mkdir()
    parts = [parse_part(f"{tmp_path}/{name}=1/2") for name in "ab"]
    with pytest.raises(FileExistsError, match="b exists already"):
        split_set(data, parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "set"]


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    common = {"data": str(a_set(tmp_path / "set", 5)), "shard_tokens": 10}
    with pytest.raises(ValueError, match="--by-source takes one folder"):
        run(outs=["a=1"], seed=None, every=False, by_source=True, **common)  # type: ignore[arg-type]  # of a mapping
    with pytest.raises(ValueError, match="seed and every are both set"):
        run(outs=["a=1"], seed=1, every=True, by_source=False, **common)  # type: ignore[arg-type]  # of a mapping


def test_a_resharded_set_is_what_prepare_makes_with_that_size(
    tmp_path: Path, texts: list[str], tokenizer_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts[:30]):
        (tmp_path / "in" / f"{number:02d}.txt").write_text(text)
    for size in (700, 2500):
        prepare(
            PrepareOptions(
                inputs=(str(tmp_path / "in"),),
                out=tmp_path / str(size),
                tokenizer=str(tokenizer_path),
                shard_tokens=size,
            )
        )
    for old, new in ((700, 2500), (2500, 700)):
        reshard_set(str(tmp_path / str(old)), tmp_path / f"to-{new}", shard_tokens=new)
        assert bytes_of(tmp_path / f"to-{new}") == bytes_of(tmp_path / str(new))


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_a_shuffled_set_has_the_order_of_the_loader(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqmesh.tools.sets.reshard.BLOCK_TOKENS", block)
    a_set(tmp_path / "set", 83, sources=["web", "code", "web"] * 27 + ["x", "x"], targets=[None, [(0, 1)]] * 41 + [[]])
    reshard_set(str(tmp_path / "set"), tmp_path / "out", shard_tokens=40, shuffle_seed=3)
    whole = rows_of(tmp_path / "set")
    assert rows_of(tmp_path / "out") == [whole[place] for place in permutation(83, shuffle_key(3, 0)).tolist()]
    assert_whole(tmp_path / "out")


def test_a_set_at_a_url_is_resharded_and_split(tmp_path: Path) -> None:
    folder = a_set(tmp_path / "set", 40)
    fsspec.filesystem("memory").put(str(folder), "/split-set", recursive=True)
    for seed in (None, 5):
        for data, name in (("memory://split-set", f"far-{seed}"), (str(folder), f"near-{seed}")):
            reshard_set(data, tmp_path / name, shard_tokens=99, shuffle_seed=seed)
        assert bytes_of(tmp_path / f"far-{seed}") == bytes_of(tmp_path / f"near-{seed}")
    split_set("memory://split-set", [parse_part(f"{tmp_path}/{name}=0.5") for name in "ab"])
    assert sorted(rows_of(tmp_path / "a") + rows_of(tmp_path / "b")) == sorted(rows_of(folder))


def test_a_set_without_documents_is_split_and_resharded(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [])
    split_set(str(tmp_path / "set"), [parse_part(f"{tmp_path}/{name}=0.5") for name in "ab"])
    reshard_set(str(tmp_path / "set"), tmp_path / "c", shuffle_seed=1)
    for name in "abc":
        assert_whole(tmp_path / name)
        assert read_manifest(tmp_path / name).documents == 0
