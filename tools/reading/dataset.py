"""Folders that are Hugging Face datasets: which of their files hold the rows, in which order.

`Dataset.save_to_disk` leaves Arrow files and a state.json that lists them; `DatasetDict.save_to_disk` a folder for each
split and a dataset_dict.json; the cache of `load_dataset` Arrow files and a dataset_info.json. Not done here: reading
the files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

STATE_NAME = "state.json"
SPLITS_NAME = "dataset_dict.json"
INFO_NAME = "dataset_info.json"


def dataset_files(filesystem: Any, folder: str, shown: str) -> list[str] | None:
    """The names of the dataset's files in its order, None where the folder is no dataset.

    Raises ValueError, naming the splits, where it holds several, and where its description is not one.
    """
    if filesystem.exists(f"{folder}/{SPLITS_NAME}"):
        splits = _described(filesystem, folder, shown, SPLITS_NAME).get("splits")
        names = [str(split) for split in splits] if isinstance(splits, list) else []
        raise ValueError(
            f"{shown} is a saved dataset of the splits {', '.join(names) or '(none)'}: give the folders of those to "
            f"read, such as {shown}/{next(iter(names), 'train')}"
        )
    if filesystem.exists(f"{folder}/{STATE_NAME}"):
        return _listed(_described(filesystem, folder, shown, STATE_NAME), shown)
    if filesystem.exists(f"{folder}/{INFO_NAME}"):
        return _cached(filesystem, folder, shown)
    return None


def without_descriptions(names: Sequence[str]) -> list[str]:
    """File names of a folder without those that describe saved datasets somewhere below it: they are no documents."""
    holders = {folder for name in names if name.endswith(".arrow") for folder in map(str, PurePosixPath(name).parents)}
    described = {STATE_NAME, SPLITS_NAME, INFO_NAME}
    return [
        name
        for path, name in ((PurePosixPath(name), name) for name in names)
        if path.name not in described or str(path.parent) not in holders
    ]


def _listed(state: dict[str, Any], shown: str) -> list[str]:
    try:
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{shown}/{STATE_NAME} is not that of a saved dataset: it lists no files") from error
    if state.get("_indices_data_files"):
        raise ValueError(f"{shown} holds rows chosen by an index apart: save it again after flatten_indices()")
    if odd := [name for name in names if "/" in name or name.startswith(".")]:
        raise ValueError(f"{shown}/{STATE_NAME} lists {odd[0]!r}, which is no file of that folder")
    return names


def _cached(filesystem: Any, folder: str, shown: str) -> list[str] | None:
    found = sorted(path[len(folder) :].lstrip("/") for path in filesystem.glob(f"{folder}/*.arrow"))
    splits = _described(filesystem, folder, shown, INFO_NAME).get("splits")
    if found and isinstance(splits, dict) and len(splits) > 1:
        raise ValueError(
            f"{shown} holds the splits {', '.join(map(str, splits))} of a dataset side by side: choose files by a "
            f"pattern, such as '{shown}/*-{next(iter(splits))}*.arrow'"
        )
    return found or None


def _described(filesystem: Any, folder: str, shown: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(filesystem.cat_file(f"{folder}/{name}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown}/{name} is not that of a saved dataset: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{shown}/{name} is not that of a saved dataset: it is no object")
    return found
