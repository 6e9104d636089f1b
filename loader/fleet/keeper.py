"""`Keeper`: the Ray actor that keeps a fleet's loader process on the machine where Ray has placed it.

It holds no batch and no rank's state: where Ray starts it again, on whichever machine, it starts a loader process for
the same job, and the ranks go on there. Ends with its actor, or is ended by `stop`.
"""

from __future__ import annotations

import socket
from dataclasses import replace

from seqmesh.loader.errors import LoaderError
from seqmesh.loader.fleet.places import Place
from seqmesh.loader.folder import remove_orphans, runtime_place
from seqmesh.loader.machine import machine
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings


class Keeper:
    """node: id of the node it was meant for. port: where ranks of other machines come in, if there are keys; 0: a free
    one. restarts, standby, timeout: see `LoaderProcess`."""

    def __init__(
        self,
        node: str,
        settings: LoaderSettings,
        options: ServeOptions,
        *,
        port: int,
        restarts: int,
        standby: bool,
        timeout: float,
    ) -> None:
        """Start the loader process. A failure is kept for `where`: Ray would only wrap it in a traceback."""
        import ray

        self._node = node
        self._on = ray.get_runtime_context().get_node_id()
        self._host = ray.util.get_node_ip_address()
        self._process: LoaderProcess | None = None
        self._remote = self._failure = ""
        try:
            if options.keys:
                self._remote = _address(self._host, port)
            self._process = LoaderProcess(
                settings,
                timeout=timeout,
                restarts=restarts,
                standby=standby,
                options=replace(options, also=self._remote or None),
            )
        except (LoaderError, ValueError, OSError) as error:
            self._failure = str(error)

    def where(self) -> Place:
        """Where the loader is, and how it does."""
        process = self._process
        if process and not self._failure:
            try:
                process.check()
            except LoaderError as error:
                self._failure = str(error)
        return Place(
            node=self._node,
            on=self._on,
            host=self._host,
            machine=machine(),
            local=process.endpoint if process else "",
            remote=self._remote,
            pid=process.pid if process else 0,
            restarts=process.restarted if process else 0,
            alive=not self._failure,
            trouble=self._failure,
        )

    def stop(self) -> None:
        """End the loader process and remove its folder, and those of others that Ray has killed here: where it ends an
        actor by force, it gives the loader process no time to clear up."""
        if self._process:
            self._process.stop()
        remove_orphans(runtime_place())

    def __ray_shutdown__(self) -> None:
        """Ray calls it where it ends the actor without force."""
        self.stop()


def _address(host: str, port: int) -> str:
    """A tcp address of this machine. A port that is asked for may be in use by what is not ours: the loader says so."""
    name = f"[{host}]" if ":" in host else host
    if port == 0:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            port = free.getsockname()[1]
    return f"tcp://{name}:{port}"
