"""Settings in a YAML file, before anybody has looked at what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Refuses a name that stands twice in a mapping; YAML's own would let the last one win without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value} stands twice", key.start_mark)
            seen.append(key.value)
        return node


def read_mapping(path: Path | str) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises OSError where it can not be read, ValueError where it is something
    else."""
    try:
        found = yaml.load(Path(path).read_text(), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a mapping of settings")
    return found
