"""Roofs of reading: documents copied by memcpy from where they lie to one buffer, nothing checked, nothing added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba.core import cgutils, types
from numba.extending import intrinsic

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array


def _copy(_context: Any, _target: Any, _source: Any, _count: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source, count = arguments
        to, of = (builder.inttoptr(address, cgutils.voidptr_t) for address in (target, source))
        cgutils.raw_memcpy(builder, to, of, count, 1)  # type: ignore[no-untyped-call]  # numba leaves it untyped
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


copy_bytes = cast("Callable[[int, int, int], None]", intrinsic(_copy))
"""Inside compiled routines: `copy_bytes(target, source, count)` of addresses."""


@jit
def raw_gather(addresses: Int64Array, sizes: Int64Array, target: int) -> int:
    """Copy sizes[i] bytes at addresses[i] one after the other to the address `target`; returns the bytes copied."""
    row = 0
    for i in range(len(addresses)):
        copy_bytes(target + row, addresses[i], sizes[i])
        row += sizes[i]
    return row
