"""What a conversion loses: everything that the data has and the new format does not hold, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from seqmesh.loader.catalog import ALL, FormatName
from seqmesh.loader.chunks import TARGETS
from seqmesh.loader.formats.megatron import HEADER_BYTES
from seqmesh.tools.sets.reading import InputSet

CARRIED = ("doc_id", "source", TARGETS)


def losses(given: InputSet, to: FormatName) -> Iterator[str]:
    """Says nothing of what the data does not have either."""
    catalog = given.catalog
    if catalog.format == "megatron":
        if (sequences := _sequences(given)) > len(given):
            yield f"not kept: which {sequences:,} sequences the {len(given):,} documents consist of"
    else:
        others = [name for name in _columns(given) if name not in (catalog.column, *CARRIED)]
        if others:
            yield f"not kept: the columns {', '.join(others)}"
        if to == "megatron":
            yield from _unnamed(given)
    if catalog.format == "seqmesh":
        yield from _unmarked(given, to)


def has_spans(given: InputSet) -> bool:
    """Whether some label of a document does not count."""
    return bool((given.catalog.supervised != np.maximum(given.catalog.lengths - 1, 0)).any())


def _unnamed(given: InputSet) -> Iterator[str]:
    if "doc_id" in _columns(given) and len(given):
        yield "not kept: the ids of documents (doc_id); megatron has none"
    if given.catalog.sources not in ((), (ALL,)):
        yield f"not kept: the sources of documents ({', '.join(given.catalog.sources[:5])}); megatron has none"
    if has_spans(given):
        yield "not kept: supervised spans (targets): everything will be supervised; megatron has none"


def _unmarked(given: InputSet, to: FormatName) -> Iterator[str]:
    manifest = given.manifest
    eod = "" if manifest.eod_id is None else f", and that id {manifest.eod_id} ends documents"
    yield f"not kept: the vocabulary's size, {manifest.vocab_size}{eod}; who reads {to} data must be told"


def _columns(given: InputSet) -> list[str]:
    """Of the first file. Those of Parquet files at a URL are not asked for: only what is read is fetched."""
    catalog = given.catalog
    if catalog.format != "parquet" or not catalog.parts:
        return given.columns()
    if not catalog.location.is_local:
        return list(CARRIED)
    import pyarrow.parquet as pq

    names: list[str] = pq.read_schema(catalog.location.path / catalog.parts[0].file).names
    return names


def _sequences(given: InputSet) -> int:
    """Sequences of all of a Megatron dataset's files."""
    catalog = given.catalog
    names = dict.fromkeys(f"{part.file[:-4]}.idx" for part in catalog.parts)
    heads = (catalog.location.read(name, 0, HEADER_BYTES) for name in names)
    return sum(int(np.frombuffer(head, "<u8", 1, 18)[0]) for head in heads)
