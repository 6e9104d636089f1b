"""`Supply`: the next batch of each reader as a message, its tokens gathered once into the rank's ring, or into a frame.

No sockets: `service` sends what comes of it, and says what readers have acknowledged and let go of.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from seqmesh.loader.arena import Block, Ring, Slot
from seqmesh.loader.feed import Draft, Feed
from seqmesh.loader.ledger.recorder import Recorder
from seqmesh.loader.reader import Reader, Sent
from seqmesh.loader.wire import Batch, block_checksum, encode


class Supply:
    """Batches of one feed for all readers of a machine. poison: overwrite recycled slots. recorder: of the ledger."""

    def __init__(self, feed: Feed, *, poison: bool, recorder: Recorder | None = None) -> None:
        self._feed = feed
        self._recorder = recorder
        self._counters = feed.counters
        self._poison = poison
        self._rings: dict[int, Ring] = {}

    def ring(self, rank: int) -> Ring:
        """The slots of a rank."""
        if rank not in self._rings:
            self._rings[rank] = Ring(poison=self._poison)
        return self._rings[rank]

    def find_memory(self, ticket: str) -> tuple[int, int] | None:
        """Descriptor and size of the memory that a ticket, `name client`, is for; None where there is none."""
        name, _, _ = ticket.partition(" ")
        return next((found for ring in self._rings.values() if (found := ring.descriptor(name))), None)

    def next_batch(self, reader: Reader, behind: Iterable[int]) -> list[Any] | None:
        """The reader's next batch as frames, which count as sent; None without credit or room for it, or at its end,
        which is noted. behind: its peers that will want this batch, too. Raises what `Feed.draft` and `Draft.write`
        raise."""
        return self._shared(reader, behind) if reader.transport == "shm" else self._framed(reader)

    def note_delivered(self, reader: Reader, before: int) -> None:
        """The reader has got its batches before this number."""
        counters = self._counters.ranks[reader.rank]
        for sent in reader.acknowledge(before):
            counters.delivered += 1
            counters.delivered_tokens += sent.tokens

    def note_lost(self, reader: Reader) -> None:
        """What is under way to the reader and not acknowledged has not come."""
        for sent in reader.unacknowledged() if self._recorder else ():
            if self._recorder and sent.begins >= 0:
                self._recorder.lost(sent.begins, (reader.rank, reader.peer))

    def take_back(self, reader: Reader, gone: Iterable[Sent]) -> None:
        """What a reader let go of: slots that may be used again."""
        for sent in gone:
            self._counters.ranks[reader.rank].under_way_bytes -= sent.size
            if sent.slot:
                self._rings[reader.rank].release(sent.slot, reader)

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()

    def _draft(self, reader: Reader) -> Draft | None:
        """The reader's next batch, if there is one, and credit for it, and its documents are here."""
        if reader.waiting is None:
            reader.waiting = self._feed.draft(reader.rank, reader.position)
            reader.ended = reader.waiting is None
        waiting = reader.waiting
        return waiting if waiting and reader.may_send(waiting.nbytes) and waiting.is_ready else None

    def _shared(self, reader: Reader, behind: Iterable[int]) -> list[Any] | None:
        """The slot that another peer has had filled, or a new one. A batch for which there is no room though the rank
        has got all before it goes as a frame: it is larger than the ring, or than what is free in one piece while this
        rank and others hold the rest."""
        ring = self.ring(reader.rank)
        slot = ring.find(reader.position)
        if slot is None:
            if (draft := self._draft(reader)) is None:
                return None
            slot = ring.make(reader.position, draft.nbytes, awaited=behind, urgent=reader.has_all)
            if slot is None:
                return self._framed(reader) if reader.has_all else None
            self._fill(slot, draft)
        if not reader.may_send(slot.size):
            return None
        ring.hand_out(slot, reader.peer, reader)
        frames = encode(_header(reader, slot.content, arena=slot.arena.name, offset=slot.offset))
        self._note_sent(reader, slot.content, slot)
        return frames

    def _framed(self, reader: Reader) -> list[Any] | None:
        if (draft := self._draft(reader)) is None:
            return None
        block = np.empty(draft.nbytes, np.uint8)
        self._gather(draft, block)
        frames = [*encode(_header(reader, draft, checksum=block_checksum(block))), block]
        self._note_sent(reader, draft, None)
        return frames

    def _fill(self, slot: Slot, draft: Draft) -> None:
        """Gather a batch into its slot; the slot is free again where that fails."""
        try:
            self._gather(draft, slot.block)
        except BaseException:
            slot.awaited.clear()
            self._rings[draft.rank].release(slot, None)
            raise
        slot.content = draft

    def _gather(self, draft: Draft, block: Block) -> None:
        begin = time.perf_counter()
        draft.write(block)
        self._counters.read_seconds += time.perf_counter() - begin
        self._counters.read_batches += 1
        self._counters.read_tokens += draft.tokens
        self._counters.read_bytes += draft.nbytes

    def _note_sent(self, reader: Reader, draft: Draft, slot: Slot | None) -> None:
        counters = self._counters.ranks[reader.rank]
        counters.sent += 1
        counters.sent_bytes += draft.nbytes
        counters.under_way_bytes += draft.nbytes
        begins = draft.step.before.step if draft.is_first else -1
        reader.note_sent(Sent(draft.nbytes, draft.tokens, slot, begins), draft.next_position)
        if self._recorder and draft.step.before.step != reader.step:
            self._record(self._recorder, reader, draft)

    def _record(self, recorder: Recorder, reader: Reader, draft: Draft) -> None:
        """The reader has come to another step."""
        reader.step = draft.step.before.step
        recorder.begin(draft.step, (reader.rank, reader.peer), anew=draft.is_first, continued=reader.continued)
        reader.continued = False


def _header(reader: Reader, draft: Draft, *, arena: str = "", offset: int = 0, checksum: int = 0) -> Batch:
    last = draft.next_position.wave == 0
    return Batch(
        session=reader.session,
        sequence=reader.sequence,
        scalars=draft.outline.scalars,
        lengths=list(draft.outline.lengths),
        after=draft.next_position.state.to_dict() if last else None,
        arena=arena,
        offset=offset,
        checksum=checksum,
    )
