"""Which machine this is, as long as it runs."""

from __future__ import annotations

from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """A name of this machine until it is started anew; the same in all its containers."""
    return BOOT.read_text().strip()
