"""How many global batches a job has, counted without planning or reading any of them.

`count_steps` walks the stream exactly as serving it does, the epochs' ends, mixtures and windows included, and is as
fast as the shuffle: what is announced is what is delivered. It knows no ranks. `StepCounter` does it in a thread, so
that a loader goes on serving meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator

from seqmesh.loader.feed import Feed
from seqmesh.loader.rows import plan_window, window_start
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.sources import Sources, last_epochs, shares_at
from seqmesh.loader.stream import NO_LIMIT, StreamState, begin, draw, skip
from seqmesh.packer.lengths import Int64Array

REMEMBERED_COUNTS = 8  # a job asks for one, or one after each resumption

log = logging.getLogger("seqmesh.loader")


def count_steps(state: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources) -> int:
    """Global batches of the whole job that stands at a state: those before it, and all that follow.

    lengths [N]: of all documents of the set. Raises ValueError where the job has no end, and as `stream.draw` and
    `rows.Window.step` do.
    """
    for after in walk_steps(state, lengths, settings, sources):
        state = after
    return state.step


def walk_steps(
    state: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources
) -> Iterator[StreamState]:
    """States further and further on, each after a short while; the last one is the job's end."""
    after: StreamState | None = state
    while after is not None:
        yield after
        check_end(after.step, settings, sources)
        after = _further(after, lengths, settings, sources)


def check_end(step: int, settings: LoaderSettings, sources: Sources) -> None:
    """Raises ValueError where sources that are passed for ever keep the job from ending, and the weights, which could
    change that, stay as they are from this step on."""
    mixture = settings.mixture
    if mixture and any(change.step > step for change in mixture.changes):
        return
    shares, epochs = shares_at(step, settings, sources), last_epochs(settings, sources)
    drawn = [number for number, share in enumerate(shares) if share]
    endless = [sources.names[number] for number in drawn if epochs[number] is None]
    if not endless or (mixture and mixture.exhausted == "stop" and len(endless) < len(drawn)):
        return
    where = f" for {', '.join(endless)} in the mixture" if mixture else ""
    raise ValueError(f"epochs is None{where}: the job has no end, so its steps can not be counted; set epochs")


def _further(state: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources) -> StreamState | None:
    if settings.batching == "rows":
        return _after_window(state, lengths, settings, sources)
    if settings.delay is not None or state.window_step:
        drawn = draw(state, lengths, settings, sources)
        return drawn[1] if drawn else None
    if (begun := begin(state, settings, sources)) is None:
        return None
    changes = (change.step for change in (settings.mixture.changes if settings.mixture else ()))
    ahead = min((step - state.step for step in changes if step > state.step), default=NO_LIMIT)
    return skip(begun, lengths, settings, sources, ahead)


def _after_window(
    state: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources
) -> StreamState | None:
    begun = window_start(state, settings, sources)
    window = plan_window(begun, lengths, settings, sources) if begun is not None else None
    if window is None:
        return None
    window.check_step(state.window_step)
    return window.state(window.rows.steps)


class StepCounter:
    """Counts in a thread of its own, one question at a time, and remembers the answers."""

    def __init__(self, feed: Feed) -> None:
        self._arguments = feed.shards.lengths, feed.settings, feed.sources
        self._counted: OrderedDict[StreamState, int | ValueError] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def count(self, state: StreamState) -> int | None:
        """As `count_steps`; None while it counts: ask again. Raises what that raises."""
        found = self._counted.get(state)
        if isinstance(found, ValueError):
            raise found
        if found is None and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, args=(state,), name="step counter", daemon=True)
            self._thread.start()
        return found

    def close(self) -> None:
        """Stop counting, within a moment."""
        self._stopped = True
        if self._thread:
            self._thread.join()

    def _run(self, state: StreamState) -> None:
        try:
            steps = state.step
            for after in walk_steps(state, *self._arguments):
                if self._stopped:
                    return
                steps = after.step
            self._note(state, steps)
        except ValueError as error:
            self._note(state, error)
        except Exception as error:
            log.exception("could not count the steps from step %d on", state.step)
            self._note(state, ValueError(f"the loader failed while it counted: {error!r}"))

    def _note(self, state: StreamState, found: int | ValueError) -> None:
        while len(self._counted) >= REMEMBERED_COUNTS:
            self._counted.popitem(last=False)
        self._counted[state] = found
