"""Selective activation offload: a share of a micro-batch's activations is on the host between forward and backward.

Every activation of a layer gives its first rows to the host, as many as the plan's ratio says, and keeps the others
(ByteScale, arXiv 2502.21231, section 5.2). Layers are last in, first out: the last `KEPT_LAYERS` keep everything; when
a layer's backward begins, the copies back of the one below start. At no time does the device hold more than two whole
layers and the kept rows of all others, which is what plans count on (`packer.offload.memory_tokens`).

In a pipeline other micro-batches come between the forward and the backward of one, on all stages but the last. There
no layer keeps everything, and the copies back of the last one start when the backward does. A first stage has as many
micro-batches in flight as there are stages, each of so many layers fewer: again two whole layers, and kept rows of
as many others as the model has.

Gradients are those without offload, to the bit: what comes back is what went. Weights never move. With a ratio of 0 no
hook is installed. What is copied when is said to the lanes of `trainer.host`, which are the only part that knows CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from seqmesh.packer.offload import KEPT_LAYERS, Offload
from seqmesh.trainer.activations import Activation, Activations, layer_activations
from seqmesh.trainer.host import Host, Mark

# Copies to the host run beside the forward pass, which is a third of the time; those back beside the other two.
FORWARD_PART = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """bandwidth: bytes per second between device and host, the slower direction while both are busy. flops: matmul
    FLOPs per second that a process reaches, where no cost file says what a unit of cost takes."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    bandwidth: float
    flops: float | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}: must be positive and finite")

    def planned(self, layers: int, bytes_per_token: float, unit_seconds: float) -> Offload:
        """What plans are made with, for a model whose activations have so many bytes for each token in all layers.
        Raises ValueError for a model of too few layers."""
        seconds = FORWARD_PART * bytes_per_token / self.bandwidth
        return Offload(layers=layers, token_cost=max(1, math.ceil(seconds / unit_seconds)))


@dataclass(slots=True)
class Moved:
    """What went to the host so far; the same came back."""

    nbytes: int = 0
    tensors: int = 0


class Offloader:
    """Offload for the layers of a model that a process holds: their `forward` is replaced, in place. moved: in all
    micro-batches so far, or since somebody put another in its place."""

    def __init__(self, layers: Iterable[nn.Module], host: Host) -> None:
        self.moved = Moved()
        self.host = host
        self._layers = list(layers)
        self._running: _Pass | None = None
        self._leaving: _Pass | None = None  # its forward has ended, and its last copies may be under way
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self._forward, index, layer, layer.forward)

    def begin(self, ratio: float, *, kept: int) -> Pass:
        """A micro-batch, of whose activations this share is moved, but for the last `kept` layers."""
        return _Pass(self, len(self._layers) - kept, ratio) if ratio else Pass()

    @contextmanager
    def running(self, one: _Pass) -> Iterator[None]:
        self.let_go()
        self._running = one
        try:
            yield
        finally:
            self._running, self._leaving = None, one

    def let_go(self) -> None:
        """Of what has left since: only now, so that nothing that followed a forward had to wait for its copies."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.let_go()

    def _forward(self, index: int, layer: nn.Module, forward: Callable[..., Tensor], x: Tensor, *given: Any) -> Tensor:
        if self._running is None or not torch.is_grad_enabled():
            return forward(x, *given)
        return self._running.layer(index, layer_activations(layer, x, *given), partial(forward, x, *given))


class Pass:
    """One micro-batch through the layers of a process, first forward, then backward; this one moves nothing."""

    def forward(self) -> AbstractContextManager[None]:
        """To be open while the forward is run, and no other pass."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """To be open while the backward is; nothing is left on the host after it."""
        return nullcontext()


def offload(offloader: Offloader | None, ratio: float, *, at_once: bool = True) -> Pass:
    """A micro-batch's pass. at_once: whether its backward follows its forward. Raises ValueError for a ratio where
    there is no offloader: the plan counts on it."""
    if offloader is not None:
        return offloader.begin(ratio, kept=KEPT_LAYERS if at_once else 0)
    if ratio:
        raise ValueError(f"offload_ratio is {ratio}: the plan counts on offload, and there is none here")
    return Pass()


@contextmanager
def offloaded(offloader: Offloader | None, ratio: float) -> Iterator[None]:
    """Forward and backward of a micro-batch, one right after the other. Raises ValueError as `offload` does."""
    one = offload(offloader, ratio)
    with one.backward(), one.forward():
        yield


class _Pass(Pass):
    """Moves what the layers before number `moving` save."""

    def __init__(self, offloader: Offloader, moving: int, ratio: float) -> None:
        self._offloader, self._moving, self._ratio = offloader, moving, ratio
        self._host = offloader.host
        self._layers: dict[int, _Layer] = {}

    def forward(self) -> AbstractContextManager[None]:
        return self._offloader.running(self)

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._offloader.let_go()
        self._fetch(max(self._layers, default=0))
        try:
            yield
        finally:
            self._close()

    def layer(self, index: int, activations: Activations, run: Callable[[], Tensor]) -> Tensor:
        """Run a layer. The one before may still be copied meanwhile, those before it are done with."""
        if (leaving := self._layers.get(index - KEPT_LAYERS)) is not None:
            leaving.let_go()
        if index < self._moving:
            layer = self._layers[index] = _Layer(activations, self._ratio, self._host, self._offloader.moved)
            with saved_tensors_hooks(layer.pack, layer.unpack):
                out = run()
            layer.end_forward()
        else:
            out = run()
        hook = partial(self._begin_backward, index)
        out.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's own is not typed
        return out

    def let_go(self) -> None:
        for layer in self._layers.values():
            layer.let_go()

    def _begin_backward(self, index: int, _gradient: Tensor) -> None:
        self._fetch(index - 1)

    def _fetch(self, index: int) -> None:
        if (layer := self._layers.get(index)) is not None:
            layer.fetch()

    def _close(self) -> None:
        """Leave no copy under way and no buffer out, also where backward did not happen."""
        for lane in (self._host.out, self._host.back):
            lane.wait(lane.mark())
        for layer in self._layers.values():
            layer.close()
        self._layers.clear()


class _Layer:
    """What one layer has saved. The same activation, saved by several nodes, is one `_Part`."""

    def __init__(self, activations: Activations, ratio: float, host: Host, moved: Moved) -> None:
        self._activations, self._ratio, self._host, self._moved = activations, ratio, host, moved
        self._parts: dict[Hashable, _Part] = {}
        self._gone: Mark = None
        self._back: Mark = None

    def pack(self, saved: Tensor) -> Tensor | tuple[_Part, torch.Size]:
        """What autograd keeps in a tensor's place. Never itself: an output that its own node holds is never freed."""
        if (activation := self._activations.find(saved)) is None:
            return saved.detach()
        part = self._parts.get(activation.key)
        if part is None:
            part = self._parts[activation.key] = _Part(activation, math.ceil(activation.rows * self._ratio), self._host)
            self._moved.nbytes += part.held.nbytes
            self._moved.tensors += 1
        return part, saved.shape

    def end_forward(self) -> None:
        self._gone = self._host.out.mark()

    def let_go(self) -> None:
        """Of what is on the host by now."""
        self._host.out.wait(self._gone)
        for part in self._parts.values():
            part.let_go()

    def fetch(self) -> None:
        """Begin to bring everything back, if that has not begun."""
        if not self._parts:
            return
        parts, self._parts = self._parts, {}  # from now on autograd alone holds them, and frees what is used
        for part in parts.values():
            part.fetch(self._host)
        self._back = self._host.back.mark()
        for part in parts.values():
            self._host.pool.give(part.buffer, self._back)

    def unpack(self, packed: Tensor | tuple[_Part, torch.Size]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.fetch()
        self._host.back.wait(self._back)
        part, shape = packed
        return part.whole().view(shape)

    def close(self) -> None:
        for part in self._parts.values():
            self._host.pool.give(part.buffer, self._gone)
        self._parts = {}


class _Part:
    """An activation whose first rows are on the host. held: they, there; a view of `buffer`."""

    def __init__(self, activation: Activation, leaving: int, host: Host) -> None:
        self._source: Tensor | None = activation.values
        self._whole: Tensor | None = None
        self._form = torch.empty_like(activation.values, device="meta")
        self._device, self._dim, self._version = activation.values.device, activation.dim, activation.values._version
        rows = activation.values.movedim(activation.dim, 0)
        first = rows[:leaving]
        self.buffer = host.pool.take(first.nbytes, host.out)
        self.held = self.buffer[: first.nbytes].view(first.dtype).view(first.shape)
        host.out.copy(self.held, first)
        self._rest: Tensor | None = rows[leaving:].clone()  # a view would keep all of it

    def let_go(self) -> None:
        """Raises RuntimeError where what was copied was changed meanwhile."""
        if self._source is not None and self._source._version != self._version:
            raise RuntimeError(
                f"an activation of shape {list(self._source.shape)} was changed in place after it was saved"
            )
        self._source = None

    def fetch(self, host: Host) -> None:
        assert self._rest is not None
        self._whole = torch.empty_like(self._form, device=self._device)
        rows = self._whole.movedim(self._dim, 0)
        host.back.copy(rows[: len(self.held)], self.held)
        rows[len(self.held) :].copy_(self._rest)
        self._source = self._rest = None

    def whole(self) -> Tensor:
        assert self._whole is not None
        return self._whole
