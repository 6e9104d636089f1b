"""Settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """every: steps between checkpoints (the last step is always saved). keep: complete checkpoints to keep. background:
    whether steps go on while the files are written."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    every: int = 100
    keep: int = 2
    background: bool = True

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
