"""`seqmesh split`: the documents of a shard set divided over several new ones, each document into exactly one.

By shares: the places 0 to N − 1 of all documents are put in a drawn order (a keyed bijection) and each set takes its
share of that order, so that sizes are exact, to one document, and the same seed always divides the same way. With
`every` nothing is drawn: each set takes documents at even distances. By source: one set for each. Documents keep their
order, whatever decides. Memory: the lengths of all documents, one new shard for each of at most AT_ONCE sets; where
there are more sets, the old one is read again for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from rich.console import Console

from seqmesh.loader.manifest import Manifest
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.permute import permutation, shuffle_key
from seqmesh.tools.sets.blocks import add_block
from seqmesh.tools.sets.carry import copy_tokenizer
from seqmesh.tools.sets.folder import new_folder
from seqmesh.tools.sets.progress import Share, ignore, progress_on, said_on, stretch
from seqmesh.tools.sets.reading import InputSet
from seqmesh.tools.sets.remake import writer_like
from seqmesh.tools.shard_writer import DEFAULT_SHARD_TOKENS

AT_ONCE = 4  # sets that are written in one pass

Membership = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A set to be made, and which share of the documents goes there."""

    out: Path
    share: Fraction


def parse_part(text: str) -> Part:
    """OUT=SHARE, the share as 0.01 or 1/100. Raises ValueError for anything else."""
    out, _, number = text.rpartition("=")
    try:
        share = Fraction(number)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is not OUT=SHARE, such as train=0.99") from None
    if not out or not 0 < share <= 1:
        raise ValueError(f"{text!r} is not OUT=SHARE, such as train=0.99: the share must be above 0 and at most 1")
    return Part(out=Path(out), share=share)


def share_sizes(count: int, shares: Sequence[Fraction]) -> list[int]:
    """How many of `count` documents each share is: all of them together. Raises ValueError for shares that are not."""
    if sum(shares) != 1:
        raise ValueError(f"the shares add up to {float(sum(shares)):g}: must be 1")
    ends = [int(count * sum(shares[: number + 1])) for number in range(len(shares))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def drawn(sizes: Sequence[int], seed: int) -> Membership:
    """Which set each document goes to, at random: a document's place in the drawn order says it."""
    found = np.empty(sum(sizes), np.uint16)
    start = 0
    for number, size in enumerate(sizes):
        found[permutation(len(found), shuffle_key(seed, 0), start, start + size)] = number
        start += size
    return found


def spread(sizes: Sequence[int]) -> Membership:
    """Which set each document goes to, where each set takes documents at even distances of what is left by those named
    after it."""
    found = np.zeros(sum(sizes), np.uint16)
    left: Int64Array = np.arange(len(found))
    for number in range(len(sizes) - 1, 0, -1):
        steps = np.arange(len(left) + 1) * sizes[number] // max(len(left), 1)
        taken = steps[1:] > steps[:-1]
        found[left[taken]] = number
        left = left[~taken]
    return found


def split_set(
    data: str,
    parts: Sequence[Part],
    *,
    seed: int | None = 0,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    progress: Share = ignore,
) -> list[Manifest]:
    """Divide by shares. seed: None for documents at even distances. Raises ValueError for shares that do not add up to
    1 and for another format, ShardError for a damaged shard, FileExistsError where one of the folders exists."""
    names = [part.out.absolute() for part in parts]
    if len(set(names)) < len(names):
        raise ValueError("two of the sets have the same name: give each a folder of its own")
    given = InputSet(data)
    sizes = share_sizes(len(given), [part.share for part in parts])
    member = spread(sizes) if seed is None else drawn(sizes, seed)
    with ExitStack() as stack:
        folders = [stack.enter_context(new_folder(part.out, inputs=[data])) for part in parts]
        return _divide(given, member, folders, shard_tokens, progress)


def split_by_source(
    data: str, out: Path, *, shard_tokens: int = DEFAULT_SHARD_TOKENS, progress: Share = ignore
) -> dict[str, Manifest]:
    """One set for each source that has documents, in a folder of `out` that is called like it (signs that no file name
    may have as %XX). Raises as `split_set`."""
    given = InputSet(data)
    codes = np.concatenate([np.zeros(0, np.uint16), *(given.codes(n) for n in range(len(given.catalog.parts)))])
    used, member = np.unique(codes, return_inverse=True)
    names = [given.catalog.sources[code] for code in used.tolist()]
    with new_folder(out, inputs=[data]) as folder:
        folders = [folder / folder_name(name) for name in names]
        made = _divide(given, member.astype(np.uint16), folders, shard_tokens, progress)
    return dict(zip(names, made, strict=True))


def folder_name(source: str) -> str:
    """A source's name as one of a folder."""
    name = quote(source, safe=" ")
    return name if name.strip(".") else name.replace(".", "%2E") or "%"


def run(
    *,
    data: str,
    outs: Sequence[str],
    seed: int | None,
    every: bool,
    by_source: bool,
    shard_tokens: int,
    console: Console | None = None,
) -> None:
    """The whole command. Raises ValueError for options that do not go together, too."""
    console = console or Console()
    if by_source and (every or seed is not None or len(outs) != 1 or "=" in outs[0]):
        raise ValueError("--by-source takes one folder, OUT, and neither --seed nor --every")
    if every and seed is not None:
        raise ValueError("seed and every are both set: --every draws nothing")
    with progress_on(console, "splitting", "tokens written") as progress:
        if by_source:
            found = split_by_source(data, Path(outs[0]), shard_tokens=shard_tokens, progress=progress)
            made = {str(Path(outs[0]) / folder_name(name)): manifest for name, manifest in found.items()}
        else:
            parts = [parse_part(text) for text in outs]
            chosen = None if every else seed or 0
            manifests = split_set(data, parts, seed=chosen, shard_tokens=shard_tokens, progress=progress)
            made = {str(part.out): manifest for part, manifest in zip(parts, manifests, strict=True)}
    for name, manifest in made.items():
        said_on(console)(f"{name}: {manifest.documents:,} documents, {manifest.tokens:,} tokens")


def _divide(
    given: InputSet, member: Membership, folders: Sequence[Path], shard_tokens: int, progress: Share
) -> list[Manifest]:
    made: list[Manifest] = []
    for first in range(0, len(folders), AT_ONCE):
        group = folders[first : first + AT_ONCE]
        heard = stretch(progress, first / len(folders), len(group) / len(folders))
        made += _write(given, member, first, group, shard_tokens, heard)
    return made


def _write(
    given: InputSet, member: Membership, first: int, folders: Sequence[Path], shard_tokens: int, progress: Share
) -> list[Manifest]:
    """The sets `first` and the following."""
    writers = [writer_like(given.manifest, folder, shard_tokens) for folder in folders]
    done, total = 0, max(given.tokens, 1)
    for block in given.blocks():
        goes = member[block.first : block.first + len(block)]
        for number, writer in enumerate(writers, first):
            mask = goes == number
            if mask.any():
                add_block(writer, block.chosen(mask), given.catalog.sources)
        done += int(block.lengths.sum())
        progress(done / total)
    for number, (writer, folder) in enumerate(zip(writers, folders, strict=True), first):
        writer.counts["documents_in"] = int((member == number).sum())
        copy_tokenizer([given], folder)
        writer.finish()
    return [writer.finish() for writer in writers]
