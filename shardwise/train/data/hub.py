"""Datasets of Hugging Face: on the hub, or saved in a folder, read through their `datasets` library.

The library is imported when such a source is opened and not before: it takes seconds, and text files need
none of it. It downloads once, keeps Arrow files in its own cache and works offline from there; rows are read
in batches of the text column alone, so memory does not grow with the dataset.

Chosen over `streaming=True`: a download that is complete before step 1 cannot fail at step 10,000. The price
is the disk space. A dataset that needs Python code of its own to load is refused by the library, so here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.core.errors import DataError
from shardwise.train.data.readers import Piece, Record, checked, missing_key, pieces

_ROWS = 256
"""Rows read at a time."""


def split_of(name: str) -> tuple[str, str | None]:
    """`PLACE#SPLIT` as (PLACE, SPLIT), and `PLACE` as (PLACE, None)."""
    place, mark, split = name.rpartition("#")
    return (place, split or None) if mark else (name, None)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def rows_of_saved(name: str, folder: Path, split: str | None) -> Any:
    """The `datasets.Dataset` saved in `folder`; of several splits the one named, else `train`."""
    datasets = _import(name)
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # Arrow, JSON or file errors: whatever it is, the folder is damaged
        raise DataError(
            "unreadable dataset", where=name, why=f"{type(error).__name__}: {error}", fix="save it again"
        ) from None
    if not isinstance(loaded, datasets.DatasetDict):
        if split is not None:
            raise DataError(
                f"no split '{split}'", where=name, why="it was saved without splits", fix="leave it out"
            )
        return loaded
    if (split or "train") not in loaded:
        raise DataError(
            f"no split '{split or 'train'}'",
            where=name,
            why=f"it has {', '.join(loaded)}",
            fix="name one as SOURCE#SPLIT",
        )
    return loaded[split or "train"]


def rows_of_hub(name: str) -> Any:
    """The `datasets.Dataset` that `ID[:CONFIG][#SPLIT]` names, downloaded unless it was before."""
    datasets = _import(name)
    place, split = split_of(name)
    repository, _, config = place.partition(":")
    try:
        return datasets.load_dataset(repository, name=config or None, split=split or "train")
    except Exception as error:  # network, hub, licence, split, configuration: it cannot be had
        raise DataError(
            "cannot load dataset",
            where=name,
            why=f"no local file of this name, and from the hub: {type(error).__name__}: {error}",
            fix="check data.source (FILE, or ID[:CONFIG][#SPLIT]) and the network",
        ) from None


def pieces_of_rows(name: str, rows: Any, text_key: str) -> Iterator[Piece]:
    """The documents of a `datasets.Dataset`: its feature `text_key`, row by row."""
    if text_key not in rows.column_names:
        raise missing_key(text_key, list(rows.column_names), name)
    number = 0
    for batch in rows.select_columns([text_key]).iter(batch_size=_ROWS):
        for value in batch[text_key]:
            number += 1
            yield from pieces(checked(value, text_key, f"{name}: row {number}"))


def records_of_rows(name: str, rows: Any, keys: Sequence[str]) -> Iterator[Record]:
    """The rows of a `datasets.Dataset` with those of the features `keys` that it has, or else with all."""
    names = [key for key in rows.column_names if key in keys] or rows.column_names
    number = 0
    for batch in rows.select_columns(names).iter(batch_size=_ROWS):
        for values in zip(*(batch[key] for key in names), strict=True):
            number += 1
            yield Record(dict(zip(names, values, strict=True)), f"{name}: row {number}")


def _import(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "cannot read a Hugging Face dataset",
            where=name,
            why="no local file of this name, and the package datasets is not installed",
            fix="check data.source, or pip install 'shardwise[hf]'",
        ) from None
    return datasets
