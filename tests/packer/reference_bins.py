"""Slow and obvious versions of the packing methods, and a judge of best-fit packings."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy


@dataclass
class Bin:
    """A bin in the making."""

    room: int
    extra_room: int
    documents: list[int] = field(default_factory=list)


@dataclass
class Case:
    """Documents and the limits of a bin."""

    sizes: Sequence[int]
    capacity: int
    max_documents: int = 10**9
    extra: Sequence[int] | None = None
    extra_capacity: int = 10**9

    def need(self, document: int) -> int:
        return self.extra[document] if self.extra else 0

    def fits(self, document: int, into: Bin) -> bool:
        return (
            self.sizes[document] <= into.room
            and self.need(document) <= into.extra_room
            and len(into.documents) < self.max_documents
        )

    def open(self) -> Bin:
        return Bin(self.capacity, self.extra_capacity)

    def put(self, document: int, into: Bin) -> None:
        assert self.fits(document, into)
        into.room -= self.sizes[document]
        into.extra_room -= self.need(document)
        into.documents.append(document)


def bins_of(bins: Sequence[Bin], count: int) -> list[int]:
    found = [-1] * count
    for number, each in enumerate(bins):
        for document in each.documents:
            found[document] = number
    return found


def first_fit(case: Case, order: Sequence[int]) -> list[int]:
    bins: list[Bin] = []
    for document in order:
        chosen = next((each for each in bins if case.fits(document, each)), None)
        if chosen is None:
            chosen = case.open()
            bins.append(chosen)
        case.put(document, chosen)
    return bins_of(bins, len(case.sizes))


def next_fit(case: Case) -> list[int]:
    bins: list[Bin] = []
    for document in range(len(case.sizes)):
        if not bins or not case.fits(document, bins[-1]):
            bins.append(case.open())
        case.put(document, bins[-1])
    return bins_of(bins, len(case.sizes))


def order_keeping(case: Case, lookahead: int) -> list[int]:
    """With a second resource: of each size only the earliest document is a candidate."""
    bins: list[Bin] = []
    left = list(range(len(case.sizes)))
    while left:
        into = case.open()
        case.put(left.pop(0), into)
        while left:
            last = left[0] + lookahead
            earliest: dict[int, int] = {}
            for document in left:
                if document <= last:
                    earliest.setdefault(case.sizes[document], document)
            fitting = [document for document in earliest.values() if case.fits(document, into)]
            if not fitting:
                break
            chosen = max(fitting, key=lambda document: case.sizes[document])
            case.put(chosen, into)
            left.remove(chosen)
        bins.append(into)
    return bins_of(bins, len(case.sizes))


def concat(lengths: Sequence[int], capacity: int, multiple: int = 1) -> list[list[tuple[int, int]]]:
    """(document, position) of every token of every bin, padding as position −1."""
    tokens = []
    for document, length in enumerate(lengths):
        tokens += [(document, position) for position in range(length)]
        tokens += [(document, -1)] * (-length % multiple)
    return [tokens[begin : begin + capacity] for begin in range(0, len(tokens), capacity)]


def is_best_fit(case: Case, bin_of: Sequence[int]) -> bool:
    """Whether some run of best-fit decreasing gives these bins: each document, from the longest on, in one of the bins
    that hold it and have the least room, a new one only where no bin holds it. Equals may come in any order."""
    bins: dict[int, Bin] = {}
    for size in sorted(set(case.sizes), reverse=True):
        waiting = [document for document, other in enumerate(case.sizes) if other == size]
        while waiting:
            for document in waiting:
                fitting = [number for number, each in bins.items() if case.fits(document, each)]
                least = min((bins[number].room for number in fitting), default=None)
                chosen = bin_of[document]
                if chosen in bins and chosen in fitting and bins[chosen].room == least:
                    break
                if not fitting and chosen not in bins:
                    bins[chosen] = case.open()
                    break
            else:
                return False
            case.put(document, bins[chosen])
            waiting.remove(document)
    return True


def fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """The optimum, by HiGHS: binary x[document, bin] and used[bin], bins used in order."""
    model = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy leaves it untyped
    model.setOptionValue("output_flag", False)
    places = range(len(sizes))
    used = [model.addBinary() for _ in places]
    inside = [[model.addBinary() for _ in places] for _ in sizes]
    for document, row in enumerate(inside):
        model.addConstr(sum(row[: document + 1], start=row[0] * 0) == 1)  # document d is in one of the first d + 1 bins
    for place in places:
        load = sum((size * inside[document][place] for document, size in enumerate(sizes)), start=used[place] * 0)
        model.addConstr(load <= capacity * used[place])
    model.minimize(sum(used, start=used[0] * 0))
    return round(model.getObjectiveValue())
