"""`Order`: what an embedding process asks of the loader process it starts, and the exit codes it may get back."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass

from seqmesh.loader.settings import LoaderSettings

# What the owner writes to end the process. It may be killed before it can clear up itself: hence the second word.
STOP = b"stop\n"
STOP_AND_CLEAR_UP = b"stop and clear up\n"

STOPPED = 0  # by its owner, or because its owner is gone
REFUSED = 2  # the settings, the data or the endpoint
FAILED = 3  # while serving
# After these the same would happen again, or somebody wanted the end: no reason to start another process.
FINAL = {STOPPED, REFUSED} | {code for n in (signal.SIGINT, signal.SIGTERM) for code in (128 + n, -n)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """settings: the job's. endpoint: where to listen. owner: process id whose end is the loader's end too. folder: to
    be removed when the owner is gone, since nobody else will; empty: none."""

    settings: LoaderSettings
    endpoint: str
    owner: int
    folder: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "settings": self.settings.to_json().decode(),
                "endpoint": self.endpoint,
                "owner": self.owner,
                "folder": self.folder,
            }
        )

    @classmethod
    def from_json(cls, text: bytes | str) -> Order:
        """Raises ValueError for anything else than what `to_json` gives."""
        try:
            fields = json.loads(text)
            settings = LoaderSettings.from_json(fields["settings"])
            return cls(
                settings=settings,
                endpoint=str(fields["endpoint"]),
                owner=int(fields["owner"]),
                folder=str(fields["folder"]),
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"not an order for a loader process: {error!r}") from error
