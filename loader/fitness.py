"""Whether a set can be served as the settings ask. Looked at once, before the first step; only lengths are needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqmesh.loader.mixture import SHARES
from seqmesh.loader.settings import LoaderSettings, Overlong
from seqmesh.loader.sources import Sources, check_names, one_source, policies, shares_at
from seqmesh.packer.lengths import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Supply:
    """What one epoch of a source gives. called: what messages say it is."""

    called: str
    pieces: int
    tokens: int


def check_documents(lengths: Int64Array, settings: LoaderSettings, sources: Sources | None = None) -> None:
    """Refuse data that can not be served as asked: documents that are too long, sources that are not there, have no
    tokens or too few for their weight. Raises ValueError naming the document or the source."""
    sources = sources or one_source(len(lengths))
    if settings.mixture is not None:
        check_names(settings.mixture, sources.names, settings.data)
    steps = [0, *(change.step for change in settings.mixture.changes)] if settings.mixture else [0]
    shares = [shares_at(step, settings, sources) for step in steps]
    supplies: dict[int, _Supply] = {}
    for number, policy in enumerate(policies(settings, sources)):
        if any(at_step[number] for at_step in shares):
            supplies[number] = _supply(number, policy, lengths, settings, sources)
    for step, at_step in zip(steps, shares, strict=True):
        _check_shares(step, at_step, supplies, settings)


def _supply(number: int, policy: Overlong, lengths: Int64Array, settings: LoaderSettings, sources: Sources) -> _Supply:
    called = settings.data + (f", source {sources.names[number]!r}" if settings.mixture else "")
    documents, longest = sources.of(number), settings.longest
    own = lengths[documents] if len(sources.documents) else lengths
    if int(own.sum()) == 0:
        raise ValueError(f"{called}: holds no tokens to serve")
    over = own > longest
    if policy == "error" and over.any():
        first = int(np.argmax(over))
        raise ValueError(
            f"{called}: document {int(documents[first])} has {int(own[first])} tokens, max_document is {longest} "
            f"({int(np.count_nonzero(over))} documents are over): raise max_document, or set overlong to truncate, "
            "split or drop"
        )
    kept = np.minimum(own, longest) if policy == "truncate" else own[~over] if policy == "drop" else own
    if int(kept.sum()) == 0:
        raise ValueError(f"{called}: every document is over max_document, {longest}: all were dropped")
    pieces = int(np.maximum(-(-kept // longest), 1).sum())
    if settings.tail == "drop" and settings.rows_per_step is not None and pieces < settings.rows_per_step:
        raise ValueError(
            f"{called}: has {pieces} documents to serve, fewer than rows_per_step, {settings.rows_per_step}: with tail "
            "'drop' all of an epoch could be dropped; use 'pad', or fewer rows"
        )
    return _Supply(called=called, pieces=pieces, tokens=int(kept.sum()))


def _check_shares(step: int, shares: tuple[int, ...], supplies: dict[int, _Supply], settings: LoaderSettings) -> None:
    """Of a source no document comes twice in a batch, or window: with less than its share of one in an epoch it would
    always fall behind."""
    drawn = {number: share for number, share in enumerate(shares) if share}
    if len(drawn) == 1:
        return  # each batch ends with its epoch
    if settings.tokens_per_step is not None:
        unit, whole, name = "tokens", settings.tokens_per_step, "tokens_per_step"
        parts = {number: share / SHARES for number, share in drawn.items()}
    else:
        unit, whole, name = "documents", settings.documents_per_window, "window"
        rates = {n: share * supplies[n].pieces / max(supplies[n].tokens, 1) for n, share in drawn.items()}
        parts = {number: rate / sum(rates.values()) for number, rate in rates.items()}
    for number, part in parts.items():
        supply = supplies[number]
        has = supply.tokens if unit == "tokens" else supply.pieces
        needs = round(whole * part)
        if has < needs:
            raise ValueError(
                f"{supply.called}: has {has} {unit} to serve, fewer than its share of {name} from step {step} on, "
                f"{needs} of {whole}, so it can not keep its weight: lower the weight, or {name} to "
                f"{int(has / part)}"
            )
