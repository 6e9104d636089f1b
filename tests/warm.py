"""Python programs that start at once: forked from a server that has loaded what they import, torch alone takes seconds.

    with forked(["-m", "seqmesh.tools.cli", "train", "job.yaml"]) as process: ...    # as `python -m ...`

What torchrun starts in such a program is forked from it. In all else they are like processes that `python` starts:
a session of their own, their arguments and environment in /proc, exit functions. Only the seed of hashes is shared.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TextIO

SECONDS = 120.0

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch.distributed", "seqmesh.trainer.train", "seqmesh.tools.cli", "seqmesh.tools.launch"]
CONTEXT.set_forkserver_preload(PRELOADED)


class Program:
    """A started program, with what `subprocess.Popen` has of the same names."""

    def __init__(self, process: BaseProcess, output: Connection) -> None:
        assert process.pid is not None
        self._process, self._output = process, output
        self.pid = process.pid
        self.stdout: TextIO = os.fdopen(os.dup(output.fileno()), "r")
        output.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("the program", timeout or 0)
        return code

    def communicate(self, timeout: float = SECONDS) -> tuple[str, None]:
        """What it says until its end, before which it is killed after so many seconds."""
        killer = threading.Timer(timeout, os.killpg, [self.pid, signal.SIGKILL])
        killer.start()
        try:
            said = self.stdout.read()
            self.wait(timeout)
        finally:
            killer.cancel()
        return said, None

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def forked(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    before: Callable[[], None] | None = None,
    errors: Path | None = None,
) -> Iterator[Program]:
    """A running program; killed at the end of the block if it still runs. arguments: as of `python`. before: called in
    the new process first; must pickle. errors: a file for its second stream, which otherwise goes where the first does.
    """
    output, sink = CONTEXT.Pipe(duplex=False)
    began, begin = CONTEXT.Pipe(duplex=False)
    call = (list(arguments), folder or Path.cwd(), dict(environment), before, errors, sink, begin)
    process = CONTEXT.Process(target=_main, args=call)
    process.start()
    sink.close()
    begin.close()
    began.recv()
    began.close()
    program = Program(process, output)
    try:
        yield program
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        program.stdout.close()


def ran(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A program at its end, as `subprocess.run` gives it."""
    command = [*map(str, arguments)]
    with tempfile.NamedTemporaryFile() as errors:
        path = Path(errors.name)
        with forked(command, environment=os.environ | {"COLUMNS": "200"}, errors=path) as program:
            said, _ = program.communicate()
            return subprocess.CompletedProcess(command, program.wait(), said, path.read_text())


def _main(
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    before: Callable[[], None] | None,
    errors: Path | None,
    sink: Connection,
    begin: Connection,
) -> NoReturn:
    os.setsid()
    begin.send(None)
    begin.close()
    os.dup2(sink.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if errors else 1, 2)
    sink.close()
    os.chdir(folder)
    if before:
        before()
    _forking_ranks()
    _become(arguments, environment)


def _become(arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Be the program that `python ARGUMENTS` is, to the end."""
    os.environ.clear()
    os.environ.update(environment)
    _say_in_proc([sys.executable, *arguments], environment)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # they are files
    code: object = 1
    try:
        _run([argument for argument in arguments if argument != "-u"])
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _say_in_proc(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Overwrite what the kernel shows of arguments and environment; as much of both as there is room for."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts_and_ends = [int(field) for field in fields[45:49]]
    newest_first = [f"{name}={value}" for name, value in reversed([*environment.items()])]
    for (start, end), words in zip((starts_and_ends[:2], starts_and_ends[2:]), (arguments, newest_first), strict=True):
        room = end - start
        data = "".join(f"{word}\0" for word in words).encode()[: room - 1]
        ctypes.memmove(start, data.ljust(room, b"\0"), room)


def _forking_ranks() -> None:
    """torchrun, where this process comes to run it, forks what it would start."""
    handler = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")
    handler.__dict__["Popen"] = _Rank


def _let_go_of_files() -> None:
    """Of what a forked process has from the other. Their numbers stay taken: objects that are left will close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):  # that of the listing
                os.fstat(number)
                os.dup2(nothing, number, inheritable=False)


class _Rank:
    """A forked rank; what torchrun asks of its `Popen`."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            _let_go_of_files()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            _become(list(args[1:]), env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("the rank", timeout)
            time.sleep(0.01)
        return code
