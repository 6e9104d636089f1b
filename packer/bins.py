"""Bin packing: which documents share one row, or micro-batch, of at most `capacity` tokens.

`pack(lengths, capacity)` gives each document a bin, by one of several methods. What is too long is refused unless a
policy says otherwise, lengths may be padded to a multiple before they are packed, and bins may have more limits than
their tokens. Nothing is lost without being counted. Only lengths are needed: no token is looked at or moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from seqmesh.packer.best_fit import MOST_DOCUMENTS, best_fit_decreasing
from seqmesh.packer.bounds import fewest_bins
from seqmesh.packer.concat import concat
from seqmesh.packer.groups import by_first_piece, group, share_out
from seqmesh.packer.in_order import first_fit, first_fit_decreasing, next_fit, order_keeping
from seqmesh.packer.lengths import Int64Array, as_integer, as_lengths
from seqmesh.packer.overlong import Pieces, check_policy, fit, without_supervision
from seqmesh.packer.permute import permutation, shuffle_key
from seqmesh.packer.rules import Rules, make_rules
from seqmesh.packer.totals import total, total_and_largest

LOOKAHEAD = 4096  # documents

Method = Callable[[Int64Array, Rules], tuple[Int64Array, int]]


def best_fit_shuffled(sizes: Int64Array, rules: Rules) -> tuple[Int64Array, int]:
    """Best-fit decreasing, the bins in an order drawn by the key: a bin's number says nothing about its lengths."""
    bin_of, count = best_fit_decreasing(sizes, rules)
    return permutation(count, rules.key)[bin_of], count


WHOLE: dict[str, Method] = {
    "best_fit_decreasing": best_fit_decreasing,
    "best_fit_shuffled": best_fit_shuffled,
    "first_fit": first_fit,
    "first_fit_decreasing": first_fit_decreasing,
    "next_fit": next_fit,
    "order_keeping": order_keeping,
}
"""Methods that leave in one piece what a bin holds."""

METHODS = (*WHOLE, "concat")
BY_LENGTH = ("best_fit_decreasing", "best_fit_shuffled", "first_fit_decreasing")
MOST_GROUPS = 8
IN_ORDER = ("concat", "next_fit", "order_keeping")  # bins come in the order of their first pieces


@dataclass(frozen=True, kw_only=True)
class Bins:
    """A packing of P pieces into `count` bins. A piece is a whole document unless documents were cut or split.

    lengths [P]: tokens of each piece. bin_of [P]: its bin, −1 for a document that was dropped (of which `concat` has no
    piece). order, offsets [count + 1]: pieces of bin b are order[offsets[b]:offsets[b + 1]] (CSR), in the order in
    which they were met. document [P], start [P]: the document of each piece and its first token there. All int64.

    tokens: those in bins. cut_tokens: those in none. overlong: documents that were longer than a bin. unsupervised:
    documents that lost all their supervised tokens (where it was said which those are).
    """

    rules: Rules
    multiple: int
    count: int
    lengths: Int64Array
    bin_of: Int64Array
    tokens: int
    cut_tokens: int
    overlong: Int64Array
    unsupervised: Int64Array
    sources: tuple[Int64Array, Int64Array] | None  # document and start, None where piece i is document i from its start
    met: Int64Array | None  # packed pieces in the order in which they were met, None for all by index

    @property
    def capacity(self) -> int:
        return self.rules.capacity

    @cached_property
    def document(self) -> Int64Array:
        return self.sources[0] if self.sources else np.arange(len(self.lengths))

    @cached_property
    def start(self) -> Int64Array:
        return self.sources[1] if self.sources else np.zeros(len(self.lengths), np.int64)

    @cached_property
    def _grouped(self) -> tuple[Int64Array, Int64Array]:
        return group(self.bin_of, self.met, self.count)  # when asked for: many need the bins alone

    @property
    def order(self) -> Int64Array:
        return self._grouped[0]

    @property
    def offsets(self) -> Int64Array:
        return self._grouped[1]

    def pieces(self, index: int) -> Int64Array:
        """The pieces of one bin."""
        return self.order[self.offsets[index] : self.offsets[index + 1]]

    def documents(self, index: int) -> Int64Array:
        """The documents of one bin, as often as it holds a piece of them."""
        pieces = self.pieces(index)
        return self.sources[0][pieces] if self.sources else pieces

    @property
    def fill(self) -> float:
        """Tokens over room, 1.0 where every bin is full; 1.0 for no bins. Padding counts as empty."""
        return self.tokens / (self.count * self.capacity) if self.count else 1.0

    @cached_property
    def bound(self) -> int:
        """No packing of these pieces has fewer bins (see `fewest_bins`), before their number is made a multiple."""
        sizes = padded(self.lengths, self.multiple)
        return fewest_bins(sizes, self.rules) if self.met is None else fewest_bins(sizes[self.met], self.rules)


def pack(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    method: str = "best_fit_decreasing",
    overlong: str = "error",
    multiple: int = 1,
    max_documents: int | None = None,
    extra: npt.ArrayLike | None = None,
    extra_capacity: int | None = None,
    bins_multiple: int = 1,
    lookahead: int = LOOKAHEAD,
    seed: int | None = None,
    epoch: int = 0,
    supervised_start: npt.ArrayLike | None = None,
) -> Bins:
    """Pack N documents into bins of `capacity` tokens.

    method: one of `METHODS`. overlong: what becomes of documents over the capacity, `error`, `truncate`, `split` or
    `drop`; `concat` cuts all documents where a bin ends, and takes `error` for `split`. multiple: lengths are padded to
    a multiple of this before they are packed (rings of R ranks want 2R, an 8-bit matmul its tile). max_documents: the
    most in one bin. extra [N]: what each document needs of a second resource (image patches, say), of which a bin has
    `extra_capacity`. bins_multiple: the number of bins is made a multiple of this (of the ranks) by sharing out bins
    with several documents: no bin is empty and no document comes twice. lookahead: documents that `order_keeping` sees
    ahead. seed, epoch: documents are met in an order drawn by these, not by index, so that each epoch has other
    neighbours. supervised_start [N]: each document's first supervised token, to list those that lose all of them.

    Deterministic: the answer depends on the values alone, not on the integer dtype. Raises ValueError for a bad length
    or option, naming it.
    """
    documents = as_lengths(lengths)
    everything, largest = total_and_largest(documents, "lengths")
    key = shuffle_key(as_integer("seed", seed or 0, 0), as_integer("epoch", epoch, 0))
    rules = make_rules(
        len(documents),
        capacity=capacity,
        max_documents=max_documents,
        extra=extra,
        extra_capacity=extra_capacity,
        lookahead=lookahead,
        key=key,
        drawn=seed is not None,
    )
    longest = longest_piece(rules.capacity, multiple)
    _check(method, overlong, bins_multiple, rules, len(documents))
    concatenated = method == "concat" and overlong in ("error", "split")  # which cuts everything as it needs to
    fitted = fit(documents, largest, max(largest, 1) if concatenated else longest, overlong, rules)
    met = _meeting_order(len(fitted.lengths), fitted.kept, rules)
    packed = _concatenated if method == "concat" else _whole
    packing = _to_multiple(packed(fitted, met, method, multiple, rules), bins_multiple, method)
    tokens = everything if packing.pieces is fitted and not len(fitted.overlong) else packing.tokens
    return Bins(
        rules=rules,
        multiple=multiple,
        count=packing.bins,
        lengths=packing.pieces.lengths,
        bin_of=packing.bin_of,
        tokens=tokens,
        cut_tokens=everything - tokens,
        overlong=fitted.overlong,
        unsupervised=_unsupervised(documents, fitted, supervised_start),
        sources=packing.pieces.sources,
        met=packing.met,
    )


class _Packing(NamedTuple):
    """Pieces, those that are packed in the order in which they were met (None: all by index), their bins."""

    pieces: Pieces
    met: Int64Array | None
    bin_of: Int64Array
    bins: int

    @property
    def tokens(self) -> int:
        return int((self.pieces.lengths if self.met is None else self.pieces.lengths[self.met]).sum())


def longest_piece(capacity: int, multiple: int) -> int:
    """The most tokens of one document in a bin. Raises ValueError where padding leaves room for none."""
    if as_integer("multiple", multiple, 1) > capacity:
        raise ValueError(f"multiple is {multiple}: must not be over the capacity, {capacity}")
    return capacity - capacity % multiple


def padded(lengths: Int64Array, multiple: int) -> Int64Array:
    """Lengths rounded up to a multiple. Raises ValueError where their sum is over 2**62 then."""
    if multiple == 1:
        return lengths
    sizes = -(-lengths // multiple) * multiple
    total(sizes, "padded lengths")
    return sizes


def _check(method: str, overlong: str, bins_multiple: int, rules: Rules, documents: int) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: must be one of {', '.join(METHODS)}")
    check_policy(overlong)
    as_integer("bins_multiple", bins_multiple, 1)
    if documents > MOST_DOCUMENTS:
        raise ValueError(f"{documents} documents: pack at most {MOST_DOCUMENTS} at once")
    if len(rules.extra) and (method == "concat" or overlong in ("truncate", "split")):
        what = "method='concat'" if method == "concat" else f"overlong={overlong!r}"
        raise ValueError(f"{what} cuts documents, and nobody knows where their extra is: leave one of the two out")


def _meeting_order(count: int, kept: Int64Array | None, rules: Rules) -> Int64Array | None:
    """The pieces to pack in the order in which they are met; None for all by index."""
    if not rules.drawn:
        return kept
    drawn = permutation(count, rules.key)
    if kept is None:
        return drawn
    packed = np.zeros(count, bool)
    packed[kept] = True
    return drawn[packed[drawn]]


def _whole(pieces: Pieces, met: Int64Array | None, method: str, multiple: int, rules: Rules) -> _Packing:
    """Pack pieces as they are.

    A method that goes by length does not see in which order equals are met, and would give a document of a length of
    its own the same neighbours in every epoch. So documents that were drawn are packed in groups, as many as leave
    nearly all bins full: at most one bin of each group is not.
    """
    sizes = padded(pieces.lengths, multiple)
    if met is None:
        return _Packing(pieces, met, *WHOLE[method](sizes, rules))
    groups = 1
    if rules.drawn and method in BY_LENGTH:
        groups = min(max(isqrt(int(sizes[met].sum()) // rules.capacity) // 4, 1), MOST_GROUPS)
    bin_of, count = np.full(len(sizes), -1, np.int64), 0
    for group_met in np.array_split(met, groups):
        found, bins = WHOLE[method](sizes[group_met], rules.of(group_met))
        bin_of[group_met] = count + found
        count += bins
    return _Packing(pieces, met, bin_of, count)


def _concatenated(pieces: Pieces, met: Int64Array | None, _method: str, multiple: int, rules: Rules) -> _Packing:
    """Cut pieces where bins end."""
    lengths = pieces.lengths if met is None else pieces.lengths[met]
    capacity = longest_piece(rules.capacity, multiple)
    document, start, bin_of, count = concat(padded(lengths, multiple), capacity, rules.max_documents)
    following = np.append(start[1:], 0)
    ends = np.where(following > start, following, lengths[document])
    sources = (document if met is None else met[document], start)
    return _Packing(replace(pieces, lengths=ends - start, sources=sources), None, bin_of, count)


def _to_multiple(packing: _Packing, multiple: int, method: str) -> _Packing:
    """Share bins out until their number is a multiple."""
    missing = -packing.bins % multiple
    if not missing:
        return packing
    bins = packing.bins + missing
    bin_of = share_out(packing.bin_of, packing.met, packing.bins, bins)
    return packing._replace(
        bin_of=by_first_piece(bin_of, packing.met, bins) if method in IN_ORDER else bin_of, bins=bins
    )


def _unsupervised(documents: Int64Array, pieces: Pieces, supervised_start: npt.ArrayLike | None) -> Int64Array:
    if supervised_start is None:
        return np.zeros(0, np.int64)
    starts = as_lengths(supervised_start, name="supervised_start")
    if len(starts) != len(documents):
        raise ValueError(f"supervised_start has {len(starts)} entries for {len(documents)} documents")
    return without_supervision(documents, pieces, starts)
