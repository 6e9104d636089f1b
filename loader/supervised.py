"""How many labels of documents, or of pieces of them, are supervised: what the loss of a step is divided by."""

from __future__ import annotations

import numpy as np

from seqmesh.loader.shards import ShardSet
from seqmesh.loader.spans import count_supervised
from seqmesh.packer.lengths import Int64Array


def supervised_counts(shards: ShardSet, documents: Int64Array, offsets: Int64Array, lengths: Int64Array) -> Int64Array:
    """Supervised labels [D] of the lengths[i] tokens from offsets[i] on of documents[i], each a document of its own:
    its last token has no label, whatever follows it in the shard.

    Those of whole documents come from the lengths index; others are recounted from the spans. Raises ShardError where
    a shard's spans are damaged.
    """
    counts = shards.supervised[documents]
    cut = np.flatnonzero(lengths != shards.lengths[documents])
    if len(cut):
        spans = shards.spans(documents[cut])
        if spans is None:
            counts[cut] = np.maximum(lengths[cut] - 1, 0)
        else:
            counts[cut] = count_supervised(spans.address, spans.count, offsets[cut], lengths[cut])
    return counts
