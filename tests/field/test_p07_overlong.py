"""Field case: documents longer than a bin are cut or lost without a word, or a job fails long after it began.

Whatever is chosen, every token is accounted for, and what was cut, split or left out is listed by document. A document
that is cut before its first supervised token teaches nothing and is reported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from seqmesh.packer import pack
from tests.support import make_set

LENGTHS = [5, 2, 3, 1]
CAPACITY = 4


def test_truncate_keeps_ten_tokens_and_counts_the_one_it_cuts() -> None:
    bins = pack(LENGTHS, CAPACITY, overlong="truncate")
    assert (bins.tokens, bins.cut_tokens, bins.overlong.tolist()) == (10, 1, [0])
    assert bins.lengths.tolist() == [4, 2, 3, 1]
    assert bins.count == 3


def test_split_keeps_all_eleven_tokens_in_three_bins() -> None:
    bins = pack(LENGTHS, CAPACITY, overlong="split")
    assert (bins.tokens, bins.cut_tokens, bins.overlong.tolist()) == (11, 0, [0])
    assert bins.count == 3
    pieces = np.stack([bins.document, bins.start, bins.lengths], axis=1).tolist()
    assert pieces == [[0, 0, 4], [0, 4, 1], [1, 0, 2], [2, 0, 3], [3, 0, 1]]
    assert (np.bincount(bins.bin_of, weights=bins.lengths) <= CAPACITY).all()


def test_drop_lists_the_document_that_is_left_out() -> None:
    bins = pack(LENGTHS, CAPACITY, overlong="drop")
    assert (bins.tokens, bins.cut_tokens, bins.overlong.tolist()) == (6, 5, [0])
    assert bins.bin_of[0] == -1
    assert sorted(bins.order.tolist()) == [1, 2, 3]


def test_error_names_the_document_its_length_and_the_ways_out() -> None:
    with pytest.raises(
        ValueError, match=r"document 0 has 5 tokens: more than a bin holds, 4 \(1 such documents\)"
    ) as e:
        pack(LENGTHS, CAPACITY)
    assert all(way in str(e.value) for way in ("split", "truncate", "drop", "larger capacity"))


@pytest.mark.parametrize("method", ["best_fit_decreasing", "next_fit", "order_keeping", "best_fit_shuffled"])
@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_no_method_loses_a_token_uncounted(method: str, overlong: str) -> None:
    bins = pack(LENGTHS, CAPACITY, method=method, overlong=overlong)
    held = bins.bin_of >= 0
    assert bins.tokens == int(bins.lengths[held].sum()) == sum(LENGTHS) - bins.cut_tokens


@pytest.mark.parametrize(("first", "reported"), [(3, []), (4, [0]), (5, [])])
def test_a_document_cut_before_its_supervised_part_is_reported(first: int, reported: list[int]) -> None:
    starts = [first, 0, 0, 0]  # 4 is the first token after the cut; 5 is past the end: there was nothing to lose
    assert pack(LENGTHS, CAPACITY, overlong="truncate", supervised_start=starts).unsupervised.tolist() == reported
    assert pack(LENGTHS, CAPACITY, overlong="split", supervised_start=starts).unsupervised.tolist() == []


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "seqmesh.tools.cli", "pack", str(folder), "--capacity", "4", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_command_refuses_and_says_where_the_document_is(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", [3, 3, 1, 5], shard_tokens=6)
    result = command(folder)
    assert result.returncode == 1
    assert result.stderr == (
        f"error: {folder}/shard-00001.arrow, row 1 (document 3 of the set) has 5 tokens: more than a bin holds, 4 "
        "(1 such documents); choose --overlong split, truncate or drop, or a larger --capacity\n"
    )
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("overlong", "cut", "rows"),
    [
        ("truncate", 1, [(0, 0, 4), (1, 0, 2), (2, 0, 3), (3, 0, 1)]),
        ("split", 0, [(0, 0, 4), (0, 4, 1), (1, 0, 2), (2, 0, 3), (3, 0, 1)]),
        ("drop", 5, [(1, 0, 2), (2, 0, 3), (3, 0, 1)]),
    ],
)
def test_the_command_does_what_it_is_told(
    tmp_path: Path, overlong: str, cut: int, rows: list[tuple[int, int, int]]
) -> None:
    folder = make_set(tmp_path / "set", LENGTHS)
    output, table = tmp_path / "bins.arrow", tmp_path / "table.json"
    words = ["--overlong", overlong, "--method", "first_fit", "--output", str(output), "--json", str(table)]
    result = command(folder, *words)
    assert result.returncode == 0, result.stderr
    assert f"1 of them longer than a bin: {overlong}" in result.stdout
    assert json.loads(table.read_text())["comparison"]["results"][0]["cut_tokens"] == cut
    found = pa.ipc.open_file(str(output)).read_all().to_pylist()
    assert sorted((row["document"], row["start"], row["length"]) for row in found if row["bin"] >= 0) == rows
    assert [row["document"] for row in found if row["bin"] < 0] == ([0] if overlong == "drop" else [])
