"""All attention back ends by name, and which of them does a request."""

from __future__ import annotations

from seqmesh.kernels.backends import cpu, flash2, flash3, flash4, flex, reference, torch_varlen
from seqmesh.kernels.backends.base import Backend, Request

AUTO = "auto"
FLASH = "flash"  # any of the versions of flash-attn

# The first that can do a request does it. The reference is not tried unasked: it would turn a missing library into a
# training run that is a hundred times slower.
BACKENDS: dict[str, Backend] = {
    "cpu": cpu.BACKEND,
    "flash3": flash3.BACKEND,
    "flash4": flash4.BACKEND,
    "flash2": flash2.BACKEND,
    "torch": torch_varlen.BACKEND,
    "flex": flex.BACKEND,
    "reference": reference.BACKEND,
}
BY_NAME_ONLY = ("reference",)


def choose(name: str, request: Request) -> Backend:
    """The back end called `name`; for "auto", and for "flash" among its versions, the first that can do the request.

    Raises ValueError for an unknown name, NotImplementedError with every candidate's reason where none can.
    """
    reasons = {}
    for candidate in _candidates(name):
        reason = BACKENDS[candidate].refusal(request)
        if reason is None:
            return BACKENDS[candidate]
        reasons[candidate] = reason
    listed = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    advice = "" if name in BY_NAME_ONLY else ". backend='reference' does anything, slowly"
    raise NotImplementedError(f"no attention back end can do this ({listed}){advice}")


def _candidates(name: str) -> list[str]:
    if name == AUTO:
        return [each for each in BACKENDS if each not in BY_NAME_ONLY]
    if name == FLASH:
        return [each for each in BACKENDS if each.startswith(FLASH)]
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}: must be {AUTO!r}, {FLASH!r}, or one of {', '.join(BACKENDS)}")
    return [name]
