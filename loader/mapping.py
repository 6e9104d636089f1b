"""Settings in a YAML file, before anybody has looked at what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_mapping(path: Path | str) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises OSError where it can not be read, ValueError where it is something
    else."""
    try:
        found = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a mapping of settings")
    return found
