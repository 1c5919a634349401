"""Hugging Face datasets, on the hub or saved in a folder, read through the `datasets` library.

The library takes seconds to import, so it is imported only when such a source is opened. It downloads once, keeps Arrow
files in its own cache and then works offline. Rows are read in batches of the needed columns, so memory does not grow
with the dataset.

A download that is complete before step 1 cannot fail at step 10,000, but needs the disk space. `data.stream_window`
reads rows over the network instead (`streaming=True`), at the revision that the run began with.
Where the Hub does not answer one question, only the cache is read: the library would try for half a minute.
The library refuses datasets that run their own Python code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from shardwise.core.errors import DataError
from shardwise.core.extras import install
from shardwise.data.readers import Record, TextPiece, checked_text, missing_key, pieces
from shardwise.data.source import SourcePosition
from shardwise.data.tables import without_nulls

_PATIENCE = 10.0
"""Seconds that the Hub may take to say whether it has a dataset."""
_ROWS_AT_A_TIME = 256
"""Rows read at a time."""


def split_of(name: str) -> tuple[str, str | None]:
    """Split `PLACE#SPLIT` into (PLACE, SPLIT), and `PLACE` into (PLACE, None)."""
    dataset, mark, split = name.rpartition("#")
    return (dataset, split or None) if mark else (name, None)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def rows_of_saved(name: str, folder: Path, split: str | None) -> Any:
    """The `datasets.Dataset` saved in `folder`; if it has splits, the named one, else `train`.

    Without the format that it was saved with (`set_format`), which turns values into arrays and leaves out columns.
    """
    datasets = _datasets_library(name)
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # Arrow, JSON or file errors: the folder is damaged
        raise DataError(
            "unreadable dataset", where=name, why=f"{type(error).__name__}: {error}", fix="save it again"
        ) from None
    if not isinstance(loaded, datasets.DatasetDict):
        if split is not None:
            raise DataError(
                f"no split '{split}'", where=name, why="it was saved without splits", fix="leave it out"
            )
        return loaded.with_format(None)
    if (split or "train") not in loaded:
        raise DataError(
            f"no split '{split or 'train'}'",
            where=name,
            why=f"it has {', '.join(loaded)}",
            fix="name one as SOURCE#SPLIT",
        )
    return loaded[split or "train"].with_format(None)


def rows_of_hub(name: str) -> Any:
    """The `datasets.Dataset` named `ID[:CONFIG][#SPLIT]`, downloaded if it is not cached."""
    datasets = _datasets_library(name)
    dataset, split = split_of(name)
    repository, _, config = dataset.partition(":")
    with _loading(name), nullcontext() if _revision(repository, name) else _offline(datasets):
        return datasets.load_dataset(repository, name=config or None, split=split or "train")


def stream_of_hub(name: str) -> tuple[Any, str]:
    """The `datasets.IterableDataset` named `ID[:CONFIG][#SPLIT]`, and its revision on the Hub."""
    datasets = _datasets_library(name)
    dataset, split = split_of(name)
    repository, _, config = dataset.partition(":")
    with _loading(name):
        revision = _revision(repository, name)
        if not revision:
            raise ConnectionError("the Hub cannot be reached, and a stream is read from there")
        chosen = {"name": config or None, "split": split or "train", "revision": revision}
        return datasets.load_dataset(repository, streaming=True, **chosen), revision


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn errors of the Hub and the library into DataErrors."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # network, hub, licence, split or configuration
        raise DataError(
            "cannot load dataset",
            where=name,
            why=f"no local file of this name, and from the hub: {type(error).__name__}: {error}",
            fix="check data.source (FILE, or ID[:CONFIG][#SPLIT]) and the network",
        ) from None


def _revision(repository: str, name: str) -> str:
    """The dataset's revision; "" if the Hub cannot be reached. One attempt: `load_dataset` makes six in half a minute.

    Raises DataError if the Hub has no such dataset, or does not give it to this login.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return str(HfApi().dataset_info(repository, timeout=_PATIENCE).sha)
    except GatedRepoError:
        fix = "ask for access on its page, and log in: hf auth login"
        raise DataError("no access to this dataset", where=name, why="its owner grants it", fix=fix) from None
    except RepositoryNotFoundError:
        why = "the Hub has none of this name, or a private one; and there is no local file"
        raise DataError(
            "no such dataset", where=name, why=why, fix="check data.source, or log in: hf auth login"
        ) from None
    except Exception:  # no network, a proxy, a server's fault: cached datasets can still be read
        return ""


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """In this block only the cache of downloaded datasets is read, at once."""
    from huggingface_hub import constants

    settings = [(constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    # Both libraries read the environment when they are imported, so the variables come too late.
    before = [getattr(module, key, False) for module, key in settings]
    for module, key in settings:
        setattr(module, key, True)
    try:
        yield
    finally:
        for (module, key), value in zip(settings, before, strict=True):
            setattr(module, key, value)


def pieces_of_rows(name: str, rows: Any, text_key: str, before: int = 0) -> Iterator[TextPiece]:
    """The documents of a `datasets.Dataset`: one per row, from the feature `text_key`. `before` is for its errors."""
    if text_key not in rows.column_names:
        raise missing_key(text_key, list(rows.column_names), name)
    number = before
    for batch in rows.select_columns([text_key]).iter(batch_size=_ROWS_AT_A_TIME):
        for value in batch[text_key]:
            number += 1
            yield from pieces(checked_text(value, text_key, f"{name}: row {number}"))


def pieces_of_stream(
    name: str, rows: Any, text_key: str, position: SourcePosition
) -> Iterator[tuple[TextPiece, SourcePosition]]:
    """The documents of a `datasets.IterableDataset` from a position on: a state of the dataset, and rows after it."""
    # A position is a state of the dataset, and how many rows were read after it.
    state, skip = position or (None, 0)
    if rows.column_names and text_key not in rows.column_names:
        raise missing_key(text_key, list(rows.column_names), name)
    chosen = rows.select_columns([text_key])
    if state is not None:
        chosen.load_state_dict(state)
    try:
        for number, row in enumerate(chosen, 1):
            # Rows are counted from the state: it is renewed every so many rows, and with it the count is 0.
            if (since := number % _ROWS_AT_A_TIME) == 0:
                state = chosen.state_dict()
            if number > skip:
                for piece in pieces(checked_text(row[text_key], text_key, f"{name}: a row of the stream")):
                    yield piece, [state, since]
    except DataError:
        raise
    except Exception as error:  # the network, or a damaged shard
        raise DataError(
            "the stream broke off",
            where=name,
            why=f"{type(error).__name__}: {error}",
            fix="run the same command again: it goes on from the last checkpoint",
        ) from None


def records_of_rows(name: str, rows: Any, keys: Sequence[str]) -> Iterator[Record]:
    """The rows of a `datasets.Dataset` with its features among `keys`, or with all features if it has none of them."""
    names = [key for key in rows.column_names if key in keys] or rows.column_names
    number = 0
    for batch in rows.select_columns(names).iter(batch_size=_ROWS_AT_A_TIME):
        for values in zip(*(batch[key] for key in names), strict=True):
            number += 1
            fields = dict(zip(names, map(without_nulls, values), strict=True))
            yield Record(fields, f"{name}: row {number}")


def _datasets_library(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "cannot read a Hugging Face dataset",
            where=name,
            why="no local file of this name, and the package datasets is not installed",
            fix=f"check data.source, or {install('hf')}",
        ) from None
    return datasets
