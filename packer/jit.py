"""The one decorator for compiled routines, and the machine instructions that numba does not offer by itself.

Compiled code is kept beside the package, else in the user's cache folder (numba's own order, `NUMBA_CACHE_DIR` before
both), else in a private temporary folder, so that a read-only installation without a home works too. Compiled routines
release the interpreter lock.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, ParamSpec, TypeVar, cast

import numba
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]  # numba's stubs forget to export it
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic

CONSTANTS = (bool, int, float, str, tuple)

P = ParamSpec("P")
R = TypeVar("R")


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` on first call, cached on disk, without the interpreter lock."""
    try:
        return _compiled(function)
    except RuntimeError:  # numba: "no locator available", neither the package nor the user's cache can be written
        os.environ["NUMBA_CACHE_DIR"] = str(_private_folder())  # for processes that this one starts, too
        numba.config.reload_config()  # type: ignore[no-untyped-call]  # numba leaves it untyped
        return _compiled(function)


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    routine: Any = numba.njit(nogil=True)(function)
    routine._cache = _Cache(function)  # type: ignore[no-untyped-call]  # numba leaves it untyped
    return cast("Callable[P, R]", routine)


class _Cache(FunctionCache):
    """Numba looks whether the file of a routine has changed, not whether those of the routines that it calls have,
    whose code is part of its own: so after an update it would go on with parts of the version before."""

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        key = super()._index_key(signature, codegen)  # type: ignore[no-untyped-call]  # numba leaves it untyped
        return (*key, _digest(self._py_func))


@cache
def _digest(function: Any) -> str:
    """Of the code of a function, of all compiled routines below it, and of the constants that they use."""
    hasher, found = hashlib.sha256(), [function]
    for each in found:  # grows while it is read
        values: list[Any] = []
        for code in _codes(each.__code__):
            hasher.update(code.co_code + repr(code.co_names).encode())
            values += [each.__globals__[name] for name in code.co_names if name in each.__globals__]
            values += code.co_consts
        hasher.update(repr([value for value in values if isinstance(value, CONSTANTS)]).encode())
        found += [v.py_func for v in values if isinstance(v, Dispatcher) and v.py_func not in found]
    return hasher.hexdigest()


def _codes(code: CodeType) -> list[CodeType]:
    """A function's code, and that of what is defined inside of it."""
    return [code, *(each for inner in code.co_consts if isinstance(inner, CodeType) for each in _codes(inner))]


def _private_folder() -> Path:
    """A folder that only this user can write, the same one for all processes of the user where that is possible."""
    folder = Path(tempfile.gettempdir()) / f"seqmesh-numba-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return folder if ours else Path(tempfile.mkdtemp(prefix="seqmesh-numba-"))


def _count_trailing_zeros(_context: Any, word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return numba.types.int64(word), generate


def _address_to_pointer(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return numba.types.voidptr(address), generate


def _prefetch(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        flag, place = ir.IntType(32), ir.IntType(8).as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [place, flag, flag, flag])
        routine = builder.module.declare_intrinsic("llvm.prefetch", [place], signature)
        to_read, keep, data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(routine, [builder.inttoptr(arguments[0], place), to_read, keep, data])
        return _target.get_dummy_value()

    return numba.types.void(address), generate


# These are for use inside compiled routines only.
trailing_zeros = cast("Callable[[Any], int]", intrinsic(_count_trailing_zeros))
"""Index of the lowest set bit of a uint64; 64 for zero."""

prefetch = cast("Callable[[Any], None]", intrinsic(_prefetch))
"""Begin to bring the cache line at an integer address, without waiting for it. Any address will do."""

pointer = cast("Callable[[Any], Any]", intrinsic(_address_to_pointer))
"""An integer address as a pointer."""

array_at = cast("Callable[[Any, tuple[int, ...], Any], Any]", carray)
"""`array_at(pointer, shape, dtype)`: the memory at a pointer as an array, not copied, not checked."""
