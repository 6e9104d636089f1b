"""Which exchange a ring uses, where the caller leaves it open: integers in, alike on all members.

Passing blocks on (`circuit`) pays a message's delay and a merge for each member, and hides what it moves behind the
attention of a block. Gathering (`gather`) pays one delay and merges nothing, but what it moves is seen, as far as the
rest of the pack does not hide it, and all of the document's keys lie in memory at once. So a document is gathered while
moving all its keys takes no longer than the delays it saves, and passed on from there. A window is always gathered:
little is moved then, and blocks would pass through members that see nothing of them.
"""

from __future__ import annotations

EXCHANGES = ("auto", "ring", "gather")

# What moves in the time that one more member costs a ring. Measured with gloo only, 4 and 6 ranks on 2 busy cores:
# gathering saved 0.5 ms of CPU time for each and pass, 1 ms or more by the clock, and gloo moves about 1.2 GB/s. Faster
# networks have shorter delays too. It also bounds what gathering holds in memory.
BYTES_PER_MEMBER = 1 << 20


def choose(exchange: str, *, size: int, tokens: int, row_bytes: int, window: int | None) -> str:
    """Returns "ring" or "gather". tokens: of the document, over `size` members; row_bytes: of one row of k and v."""
    if exchange != "auto":
        return exchange
    fits = tokens * row_bytes <= (size - 1) * BYTES_PER_MEMBER
    return "gather" if fits or window is not None else "ring"
