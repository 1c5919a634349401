"""Data sources: the standard library, files, or a Hugging Face dataset.

A source has an *identity* and a stream of documents. The identity is cheap to compute and changes with the content
(paths, sizes and modification times); it is the key of the cache. Files are read in the order of their paths as
strings, which is the same on every machine and file system.

`data.source` is resolved in this order: the word `stdlib`; an existing path; a glob; an id on the hub. A path comes
before an id, so data on the disk is not downloaded. The suffix gives the file type, not the content. In a folder, other
files (a README, a licence) and hidden files are ignored. A file that is named, or matched by a glob, must be readable.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.core.errors import DataError
from shardwise.core.paths import missing, only_a_path, path_of, seen_from
from shardwise.data.hub import (
    is_saved_dataset,
    pieces_of_rows,
    pieces_of_stream,
    records_of_rows,
    rows_of_hub,
    rows_of_saved,
    split_of,
    stream_of_hub,
)
from shardwise.data.readers import SUFFIXES, Record, TextPiece, is_data_file, read_file, read_records
from shardwise.data.source import Source, SourcePosition, after

_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)
"""Folders of the standard library that are left out: third-party code, and tests with malformed text."""

_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?(#[\w.-]+)?")
_GLOB = re.compile(r"[*?\[]")


class FileSource(Source):
    """A source in files, known by their paths, sizes and modification times."""

    def __init__(self, name: str, files: Iterable[Path], text_key: str) -> None:
        self.name = name
        self._text_key = text_key
        self._files = sorted(files, key=str)
        self._states = [_state_of(path) for path in self._files]

    def identity(self) -> object:
        return ["files", self._text_key, self._states]

    def content(self) -> object:
        states = zip(self._files, self._states, strict=True)
        return ["files", self._text_key, [[path.name, state[1]] for path, state in states]]

    def _check_unchanged(self) -> None:
        for path, state in zip(self._files, self._states, strict=True):
            if _state_of(path) != state:
                raise DataError(
                    "data file changed while it was read",
                    where=str(path),
                    fix="start again when nothing writes to it",
                )


class DataFiles(FileSource):
    """Data files, each read by its suffix."""

    def pieces(self) -> Iterator[TextPiece]:
        for path in self._files:
            yield from read_file(path, self._text_key)
        self._check_unchanged()

    def pieces_from(self, position: SourcePosition) -> Iterator[tuple[TextPiece, SourcePosition]]:
        first, skip = position or (0, 0)
        for number, path in enumerate(self._files[first:], first):
            for piece, ended in after(read_file(path, self._text_key, skip), 0):
                yield piece, [number, skip + ended]
            skip = 0
        self._check_unchanged()

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        for path in self._files:
            yield from read_records(path, keys)
        self._check_unchanged()

    def fields(self) -> frozenset[str]:
        return self._fields

    @cached_property
    def _fields(self) -> frozenset[str]:
        for path in self._files:
            try:
                first = next(read_records(path, ()), None)
            except DataError:  # malformed data is reported later, when all records are read
                break
            if first is not None:
                return frozenset(first.fields)
        return frozenset()


class StandardLibrary(FileSource):
    """The source of Python's standard library: 12 MB of text that every machine has; a file is a document."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = list(_library_files(root))
        if not files:
            raise DataError(
                "no standard library source",
                where=str(root),
                why="this Python came without it",
                fix="name other data as data.source",
            )
        super().__init__("stdlib", files, "")

    def pieces(self) -> Iterator[TextPiece]:
        for path in self._files:
            try:
                data = path.read_bytes()
                data.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # a malformed file of a distribution; CPython's own files all pass
            if b"\0" not in data:
                yield TextPiece(data, ends=True)


class SavedDataset(FileSource):
    """A folder written by `datasets`' `save_to_disk`, read through the library."""

    def __init__(self, name: str, folder: Path, split: str | None, text_key: str) -> None:
        super().__init__(name, (path for path in folder.rglob("*") if path.is_file()), text_key)
        self._folder = folder
        self._split = split

    def _rows(self) -> Any:
        return rows_of_saved(self.name, self._folder, self._split)

    def identity(self) -> object:
        return ["saved", self._split, super().identity()]

    def content(self) -> object:
        return super().content() if self._split is None else ["saved", self._split, super().content()]

    def pieces(self) -> Iterator[TextPiece]:
        yield from pieces_of_rows(self.name, self._rows(), self._text_key)
        self._check_unchanged()

    def pieces_from(self, position: SourcePosition) -> Iterator[tuple[TextPiece, SourcePosition]]:
        rows = self._rows()
        first = position or 0
        later = rows.select(range(first, len(rows)))
        for piece, ended in after(pieces_of_rows(self.name, later, self._text_key, first), 0):
            yield piece, first + ended

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        yield from records_of_rows(self.name, self._rows(), keys)
        self._check_unchanged()

    def fields(self) -> frozenset[str]:
        return frozenset(self._rows().column_names)


class HubDataset(Source):
    """A split of a dataset on the Hugging Face hub, downloaded when it is opened."""

    def __init__(self, name: str, text_key: str) -> None:
        self.name = name
        self._text_key = text_key
        self._rows = rows_of_hub(name)

    def identity(self) -> object:
        # The library's fingerprint names the downloaded revision; the length is a second check.
        return ["hub", self.name, self._text_key, str(self._rows._fingerprint), len(self._rows)]

    def pieces(self) -> Iterator[TextPiece]:
        return pieces_of_rows(self.name, self._rows, self._text_key)

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        return records_of_rows(self.name, self._rows, keys)

    def fields(self) -> frozenset[str]:
        return frozenset(self._rows.column_names)


class HubStream(HubDataset):
    """The same without a download: rows come over the network while they are read."""

    def __init__(self, name: str, text_key: str) -> None:
        # Not the base's: that would download the dataset.
        self.name = name
        self._text_key = text_key
        self._rows, self._revision = stream_of_hub(name)

    def identity(self) -> object:
        return ["hub stream", self.name, self._text_key, self._revision]

    def pieces(self) -> Iterator[TextPiece]:
        return (piece for piece, _ in self.pieces_from(None))

    def pieces_from(self, position: SourcePosition) -> Iterator[tuple[TextPiece, SourcePosition]]:
        return pieces_of_stream(self.name, self._rows, self._text_key, position)

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        return Source.records(self, keys)

    def fields(self) -> frozenset[str]:
        return frozenset({self._text_key})


def open_source(name: str, text_key: str, streamed: bool = False) -> Source:
    """The source of the recipe's `data.source`; `text_key` is the JSON key, column or feature.

    `streamed` leaves a dataset of the hub there, and reads its rows when they are needed.

    `name` is `stdlib`; a file, a folder (searched recursively) or a glob of txt, jsonl, csv (also .gz) and
    parquet files; a .json file; a folder written by `save_to_disk`, or ID[:CONFIG] on the Hugging Face hub,
    either of them with #SPLIT (`train` when left out); or a URL of an object store with such files.

    Raises:
        DataError: the source does not exist, or has no readable file.
    """
    if name == "stdlib":
        return StandardLibrary()
    if "://" in name:
        from shardwise.data.object_store import ObjectStore

        return ObjectStore(name, text_key)
    name = seen_from(name, Path.cwd())  # shorter in messages
    path = path_of(name)
    if path.exists() or path.is_symlink():
        return _local_source(name, path, None, text_key)
    # A file may have a # in its name, so the whole name comes first.
    location, split = split_of(name)
    path = path_of(location)
    if split is not None and path.exists():
        return _local_source(name, path, split, text_key)
    if _GLOB.search(name):
        return DataFiles(name, _files_of_glob(name), text_key)
    if is_data_file(path) or only_a_path(name) or not _DATASET_ID.fullmatch(name):
        near = difflib.get_close_matches(path.name, _names_next_to(path), 1)
        fix = f"did you mean {path.parent / near[0]}?" if near else "check data.source"
        raise DataError("no such data source", where=name or "data.source", why=missing(name), fix=fix)
    return HubStream(name, text_key) if streamed else HubDataset(name, text_key)


def _names_next_to(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path.parent))
    except OSError:
        return []


def _local_source(name: str, path: Path, split: str | None, text_key: str) -> Source:
    """The source at `path`, which exists (or is a broken link)."""
    if path.is_dir() and is_saved_dataset(path):
        return SavedDataset(name, path, split, text_key)
    if split is not None:
        raise DataError(
            "no splits in this source",
            where=name,
            why="only a Hugging Face dataset has splits",
            fix=f"leave out '#{split}'",
        )
    return DataFiles(name, _files_in(path) if path.is_dir() else [_named_file(path)], text_key)


def _library_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # In place: ``os.walk`` goes into the folders that are left in its list.
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _files_in(folder: Path) -> list[Path]:
    files = [path for path in _files_below(folder) if is_data_file(path, named=False)]
    if not files:
        raise DataError(
            "no data files in folder",
            where=str(folder),
            why=f"none ends in {', '.join(SUFFIXES)}",
            fix="put some there, or name another folder as data.source",
        )
    return [_named_file(path) for path in files]


def _files_below(folder: Path) -> Iterator[Path]:
    """The files in a folder and below that are not hidden.

    Links to folders are followed last: a folder that is also here itself is read once, under its own path.
    """
    folders = [folder]
    links = list[Path]()
    seen = set[Path]()
    while folders or links:
        current = folders.pop() if folders else links.pop(0)
        if (real := current.resolve()) in seen:
            continue
        seen.add(real)
        try:
            entries = sorted(path for path in current.iterdir() if not path.name.startswith("."))
        except OSError as error:
            why = error.strerror or str(error)
            raise DataError(
                "cannot read folder", where=str(current), why=why, fix="check the folder"
            ) from None
        for path in entries:
            if path.is_dir():
                (links if path.is_symlink() else folders).append(path)
            elif path.is_file() or path.is_symlink():
                yield path


def _files_of_glob(pattern: str) -> list[Path]:
    # A set: a pattern with ** twice gives a path several times.
    matches = {Path(text) for text in glob.glob(str(path_of(pattern)), recursive=True)}
    files = [_named_file(path) for path in matches if not path.is_dir()]
    if not files:
        raise DataError("glob matches no file", where=pattern, why=missing(pattern), fix="check data.source")
    return files


def _named_file(path: Path) -> Path:
    """`path` if it is a readable file, else a DataError with the reason."""
    why = fix = ""
    if not path.exists():
        why = "its link leads nowhere"
        fix = "restore the file, or remove the link"
    elif not path.is_file():
        why = "it is a device, a pipe or a socket"
        fix = "copy its content into a file"
    elif not is_data_file(path):
        why = f"its name ends in none of {', '.join(SUFFIXES)}"
        fix = "rename it, or narrow data.source"
    if why:
        raise DataError("not a data file", where=str(path), why=why, fix=fix)
    return path


def _state_of(path: Path) -> list[str | int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(
            "cannot read data file", where=str(path), why=error.strerror or str(error), fix="check the file"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError("not a data file", where=str(path), fix="name regular files as data.source")
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
