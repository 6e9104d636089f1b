"""Waiting for file descriptors."""

from __future__ import annotations

import select


def first_readable(*descriptors: int, seconds: float | None = None) -> int | None:
    """Wait for the first of the descriptors that can be read, or is at its end; of several, the last: to be stopped
    matters most. None when time is up. `poll`, since `select` takes no descriptor over 1023."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(None if seconds is None else seconds * 1000)}
    return next((descriptor for descriptor in reversed(descriptors) if descriptor in ready), None)
