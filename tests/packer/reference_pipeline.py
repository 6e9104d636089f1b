"""The 1F1B schedule, slow and obvious: a queue of operations for each stage of each rank, in exact fractions."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

FORWARD, BACKWARD = 0, 1


class Piece(NamedTuple):
    rank: int
    wave: int
    document: int
    cost: int


def schedule(stage: int, stages: int, count: int) -> list[tuple[int, int]]:
    """(direction, micro-batch) in the order in which a stage works: fill, backward and forward in turn, drain."""
    warm_up = min(stages - stage, count)
    operations = [(FORWARD, batch) for batch in range(warm_up)]
    for batch in range(count):
        operations.append((BACKWARD, batch))
        if warm_up + batch < count:
            operations.append((FORWARD, warm_up + batch))
    return operations


def companions(pieces: Sequence[Piece]) -> dict[tuple[int, int], set[int]]:
    """The ranks that a micro-batch (rank, wave) keeps pace with, itself among them."""
    found = {(piece.rank, piece.wave): {piece.rank} for piece in pieces}
    changed = True
    while changed:
        changed = False
        for a in pieces:
            for b in pieces:
                if a.document == b.document or b.rank in found[a.rank, a.wave]:
                    merged = found[a.rank, a.wave] | found[b.rank, b.wave]
                    if a.wave == b.wave and merged != found[a.rank, a.wave]:
                        found[a.rank, a.wave] = merged
                        changed = True
    return found


def finish_times(pieces: Sequence[Piece], ranks: int, stages: int) -> dict[tuple[int, int], tuple[Fraction, Fraction]]:
    """When the first stage begins and ends with each micro-batch (rank, wave)."""
    times: dict[tuple[int, int], int] = {}
    for piece in pieces:
        times[piece.rank, piece.wave] = times.get((piece.rank, piece.wave), 0) + piece.cost
    together = companions(pieces)
    counts = [max((piece.wave + 1 for piece in pieces if piece.rank == rank), default=0) for rank in range(ranks)]
    queues = {(rank, stage): schedule(stage, stages, counts[rank]) for rank in range(ranks) for stage in range(stages)}
    free = dict.fromkeys(queues, Fraction(0))
    began: dict[tuple[int, int, int, int], Fraction] = {}
    ended: dict[tuple[int, int, int, int], Fraction] = {}

    def ready(rank: int, stage: int, operation: tuple[int, int]) -> Fraction | None:
        """When a stage could begin if it were alone; None while that is not known."""
        direction, wave = operation
        if not queues[rank, stage] or queues[rank, stage][0] != operation:
            return None
        if direction == FORWARD:
            source = (rank, wave, stage - 1, FORWARD) if stage > 0 else None
        else:
            source = (rank, wave, stage + 1, BACKWARD) if stage < stages - 1 else (rank, wave, stage, FORWARD)
        if source is not None and source not in ended:
            return None
        return max(free[rank, stage], ended[source] if source else Fraction(0))

    while any(queues.values()):
        moved = False
        for (rank, stage), queue in queues.items():
            if not queue:
                continue
            direction, wave = operation = queue[0]
            members = sorted(together.get((rank, wave), {rank}))
            begins = [ready(member, stage, operation) for member in members]
            known = [begin for begin in begins if begin is not None]
            if len(known) < len(members):
                continue
            moved = True
            longest = max(times.get((member, wave), 0) for member in members)
            end = max(known) + Fraction(longest * (1 + direction), 3 * stages)
            for member in members:
                queues[member, stage].pop(0)
                free[member, stage] = ended[member, wave, stage, direction] = end
                began[member, wave, stage, direction] = max(known)
        assert moved, "dead-lock"
    return {place: (began[(*place, 0, FORWARD)], ended[(*place, 0, BACKWARD)]) for place in times}
