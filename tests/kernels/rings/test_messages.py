"""Every message is awaited, and its buffers live until then."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from seqmesh.kernels.rings import messages
from seqmesh.kernels.rings.messages import exchange


class Work:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_every_work_is_held_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch #152938: with gloo, a message whose Work is dropped may never be done."""
    works: list[Work] = []

    def start(operations: list[tuple[object, torch.Tensor, int]]) -> list[Work]:
        works.extend(Work() for _ in operations)
        return works[-len(operations) :]

    fake = SimpleNamespace(isend="send", irecv="receive", batch_isend_irecv=start, P2POp=lambda *given: given)
    monkeypatch.setattr(messages, "dist", fake)
    sent, received = torch.ones(3, 2), torch.zeros(2, 2)
    alive = weakref.ref(sent)
    under_way = exchange([(sent, 1), (torch.ones(0, 2), 2)], [(received, 3), (torch.ones(0, 2), 1)])
    del sent
    gc.collect()
    assert alive() is not None
    assert under_way.bytes_sent == 24
    assert [work.waited for work in works] == [0, 0]  # none for messages without rows
    first, second = under_way.wait()
    assert first is received
    assert second.shape == (0, 2)
    assert [work.waited for work in works] == [1, 1]
    gc.collect()
    assert alive() is None


def test_nothing_to_say_needs_no_process_group() -> None:
    assert exchange([(torch.ones(0, 2), 1)], []).wait() == []
