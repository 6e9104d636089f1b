"""What can go wrong while documents are served. Each message names the thing: file and row, or rank and step.

LoaderError
├── ShardError          a shard set is missing something, truncated or damaged
├── RemoteError         a storage did not give what it was asked for, however often
├── StoreError          local copies of a set have no room
├── WireError           a message that is not ours, of another version, or over a limit
├── CreditError         batches that a rank still uses hold all the credit it gave
├── ServingError        the loader failed after it had started to serve: a fault of ours, not of the data
└── LoaderTimeoutError  no answer within the deadline (a TimeoutError as well)
"""

from __future__ import annotations


class LoaderError(RuntimeError):
    """The loader cannot go on."""


class ShardError(LoaderError):
    """A file of a shard set is missing, truncated or not what the manifest says."""


class RemoteError(LoaderError):
    """A storage refused, stayed silent, or gave something else than was asked for."""


class StoreError(LoaderError):
    """Local copies of a set have no room: the limit is too low, or the disk is full."""


class WireError(LoaderError):
    """A message was refused."""


class CreditError(LoaderError):
    """Batches that are still in use hold all the credit."""


class ServingError(LoaderError):
    """The loader failed while it served, for a reason nobody foresaw."""


class LoaderTimeoutError(LoaderError, TimeoutError):
    """The other side did not answer within the deadline."""
