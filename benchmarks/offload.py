"""`seqmesh bench offload`: what offload and recompute leave of a micro-batch's activations on the device, and take.

The real model, forward and backward, on one document on one rank. Kept are the bytes that all layers hold between
forward and backward, counted exactly; a step's time is that of forward and backward. On a CPU a copy to the host is one
from memory to memory by the thread that computes: nothing hides it, so that the times are the worst that can be.

    kept_<candidate>    bytes that are kept, over those without offload and recompute
    time_<candidate>    time of a step, the same
    bandwidth           bytes per second of a copy out and back: what `offload.bandwidth` of a training job asks for
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from seqmesh.benchmarks.harness import Results, Row, Spread, chosen_peers, interleave, ratio, row
from seqmesh.kernels.layout import Layout
from seqmesh.trainer.activations import bytes_per_token
from seqmesh.trainer.host import Host
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.offload import Offloader, offloaded
from seqmesh.trainer.recompute import Recompute, set_recompute

PEERS: tuple[str, ...] = ()
COPIED_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """tokens: of the micro-batch. repeats: of every candidate."""

    width: int
    layers: int
    tokens: int
    repeats: int


QUICK = Size(width=128, layers=6, tokens=1_024, repeats=3)
FULL = Size(width=256, layers=8, tokens=2_048, repeats=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """ratio: of the activations that go to the host."""

    recompute: Recompute = "none"
    ratio: float = 0.0


PLAIN = "none"
CANDIDATES = {
    PLAIN: Candidate(),
    "half": Candidate(ratio=0.5),
    "all": Candidate(ratio=1.0),
    "selective": Candidate(recompute="selective"),
    "selective_all": Candidate(recompute="selective", ratio=1.0),
    "full": Candidate(recompute="full"),
}


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Time all candidates by turns; then copies alone."""
    chosen_peers(PEERS, against)
    return compare(QUICK if quick else FULL) + bandwidth(COPIED_BYTES, repeats=5)


def compare(size: Size) -> Results:
    """Rows of the times and of the kept bytes, and their ratios."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = {name: Step(size, candidate, device) for name, candidate in CANDIDATES.items()}
    seconds = interleave({name: partial(timed, step.run, device) for name, step in steps.items()}, size.repeats)
    times = {name: step_row(name, step, seconds[name]) for name, step in steps.items()}
    kept = {name: row("kept", name, Spread.of([step.kept()]), "bytes") for name, step in steps.items()}
    ratios = [
        ratio(f"{figure}_{name}", rows[name], rows[PLAIN])
        for figure, rows in (("kept", kept), ("time", times))
        for name in CANDIDATES
        if name != PLAIN
    ]
    return Results(rows=(*times.values(), *kept.values()), ratios=tuple(ratios))


class Step:
    """A candidate's model and its offload."""

    def __init__(self, size: Size, candidate: Candidate, device: torch.device) -> None:
        heads = size.width // 64
        self._config = ModelConfig(
            vocab_size=512, width=size.width, layers=size.layers, heads=heads, kv_heads=max(1, heads // 2)
        )
        self._candidate, self._tokens = candidate, size.tokens
        self._model = Transformer(self._config, seed=0).to(device)
        set_recompute(self._model.blocks, candidate.recompute)
        self._offloader = Offloader(self._model.blocks, Host.of(device))
        self._ids = torch.arange(size.tokens, device=device) % self._config.vocab_size
        self._positions = torch.arange(size.tokens, device=device)
        self._bounds = torch.tensor([0, size.tokens], dtype=torch.int32, device=device)

    def run(self) -> None:
        self._offloader.moved.nbytes = self._offloader.moved.tensors = 0
        with offloaded(self._offloader, self._candidate.ratio):
            layout = Layout(self._bounds, self._tokens)
            loss, _ = self._model(self._ids, self._positions, layout, self._ids)
            torch.autograd.backward(loss)

    @property
    def moved(self) -> int:
        """Bytes that the last run moved to the host."""
        return self._offloader.moved.nbytes

    def kept(self) -> int:
        saved = bytes_per_token(self._config, self._candidate.recompute, torch.float32) * self._tokens
        return round(saved) - self.moved


def step_row(name: str, step: Step, seconds: list[float]) -> Row:
    return row("step", name, Spread.of(seconds).scaled(1e3), "ms", kept=step.kept(), moved=step.moved)


def bandwidth(nbytes: int, *, repeats: int) -> Results:
    """Of copies out and back, both under way at once where the device can."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    host = Host.of(device)
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    out, back = host.pool.take(nbytes, host.out), host.pool.take(nbytes, host.back)
    target = torch.empty_like(there)

    def copy() -> None:
        host.out.copy(out[:nbytes], there)
        host.back.copy(target, back[:nbytes])
        for lane in (host.out, host.back):
            lane.wait(lane.mark())

    seconds = interleave({"copies": partial(timed, copy, device)}, repeats)["copies"]
    at_once = 1 if device.type == "cuda" else 2  # one thread makes one copy after the other
    return Results(rows=(row("bandwidth", "out and back", Spread.of(seconds).rate(at_once * nbytes), "bytes/s"),))


def timed(turn: Callable[[], None], device: torch.device) -> float:
    """Seconds of one turn; CPU seconds of this process on a CPU."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begin = clock()
    turn()
    if device.type == "cuda":  # not yet run on a GPU
        torch.cuda.synchronize(device)
    return clock() - begin
