"""What `data.source` names: the standard library, files, or a dataset of Hugging Face's `datasets`.

A source is an *identity*, cheap to compute and equal only while the content is (paths, sizes and times of
change; the cache is looked up by it), and a stream of documents. Files are read in the order of their paths
as strings, which is the same on every machine and file system.

The order of the rules is fixed and short: the word `stdlib`; a path that exists; a glob; an id on the hub. A
path wins over an id, so nothing is downloaded that is on the disk. Refused: guessing at file types from their
content; a suffix says it, and the error lists the suffixes. In a folder other files (a README, a licence) and
hidden ones are passed over, while a file that is named, or met by a glob, must be readable.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shardwise.core.errors import DataError
from shardwise.train.data.hub import (
    is_saved_dataset,
    pieces_of_rows,
    records_of_rows,
    rows_of_hub,
    rows_of_saved,
    split_of,
)
from shardwise.train.data.readers import SUFFIXES, Piece, Record, is_data_file, read_file, read_records

_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)
"""Folders of the standard library that are others' code, or tests: malformed and repetitive on purpose."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?(#[\w.-]+)?")
_GLOB = re.compile(r"[*?\[]")


class Source(ABC):
    """Where documents come from.

    Attributes:
        name: as in the recipe.
    """

    name: str

    @abstractmethod
    def identity(self) -> object:
        """What must be equal for a cached result to be valid: anything that JSON can write."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """The documents, in a fixed order. Raises DataError at the first one that is malformed."""

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        """The records, in a fixed order, with the fields `keys` at least. Raises DataError at a malformed one."""
        raise DataError("no records in this source", where=self.name, why="it is plain text")

    def fields(self) -> frozenset[str]:
        """The fields of the first record; none where the source begins with plain text, or something malformed."""
        return frozenset()


class FileSource(Source):
    """Data files, each read by its suffix."""

    def __init__(self, name: str, files: Iterable[Path], text_key: str) -> None:
        self.name = name
        self._text_key = text_key
        self._files = sorted(files, key=str)
        self._states = [_state(path) for path in self._files]

    def identity(self) -> object:
        return ["files", self._text_key, self._states]

    def pieces(self) -> Iterator[Piece]:
        for path in self._files:
            yield from read_file(path, self._text_key)
        self._check_unchanged()

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        for path in self._files:
            yield from read_records(path, keys)
        self._check_unchanged()

    def fields(self) -> frozenset[str]:
        return _first(read_records(self._files[0], ()))

    def _check_unchanged(self) -> None:
        for path, state in zip(self._files, self._states, strict=True):
            if _state(path) != state:
                raise DataError(
                    "data file changed while it was read",
                    where=str(path),
                    fix="start again when nothing writes to it",
                )


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

    def pieces(self) -> Iterator[Piece]:
        for path in self._files:
            try:
                data = path.read_bytes()
                data.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # a distribution's oddity, not the user's to repair; CPython's own files all pass
            if b"\0" not in data:
                yield Piece(data, ends=True)

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        return Source.records(self, keys)

    def fields(self) -> frozenset[str]:
        return Source.fields(self)


class SavedDataset(FileSource):
    """A folder written by `datasets`' `save_to_disk`: known by its files, read through the library."""

    def __init__(self, name: str, folder: Path, split: str | None, text_key: str) -> None:
        super().__init__(name, (path for path in folder.rglob("*") if path.is_file()), text_key)
        self._folder, self._split = folder, split

    def identity(self) -> object:
        return ["saved", self._split, super().identity()]

    def pieces(self) -> Iterator[Piece]:
        rows = rows_of_saved(self.name, self._folder, self._split)
        yield from pieces_of_rows(self.name, rows, self._text_key)
        self._check_unchanged()

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        rows = rows_of_saved(self.name, self._folder, self._split)
        yield from records_of_rows(self.name, rows, keys)
        self._check_unchanged()

    def fields(self) -> frozenset[str]:
        return frozenset(rows_of_saved(self.name, self._folder, self._split).column_names)


class HubDataset(Source):
    """A split of a dataset on the Hugging Face hub, downloaded when it is opened."""

    def __init__(self, name: str, text_key: str) -> None:
        self.name = name
        self._text_key = text_key
        self._rows = rows_of_hub(name)

    def identity(self) -> object:
        # The library's fingerprint names the revision that was downloaded; the length is a second opinion.
        return ["hub", self.name, self._text_key, str(self._rows._fingerprint), len(self._rows)]

    def pieces(self) -> Iterator[Piece]:
        return pieces_of_rows(self.name, self._rows, self._text_key)

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        return records_of_rows(self.name, self._rows, keys)

    def fields(self) -> frozenset[str]:
        return frozenset(self._rows.column_names)


def open_source(name: str, text_key: str) -> Source:
    """The source that the recipe's `data.source` names; `text_key` is the JSON key, column or feature.

    `name` is `stdlib`; a file, a folder (searched recursively) or a glob of txt, jsonl (both also .gz) and
    parquet files; a folder written by `save_to_disk`, or ID[:CONFIG] on the Hugging Face hub, either of them
    with #SPLIT (`train` when left out).

    Raises:
        DataError: there is no such source, or nothing in it that can be read.
    """
    if name == "stdlib":
        return StandardLibrary()
    path = Path(name).expanduser()
    if path.exists() or path.is_symlink():
        return _local(name, path, None, text_key)
    place, split = split_of(name)
    path = Path(place).expanduser()
    if split is not None and path.exists():
        return _local(name, path, split, text_key)
    if _GLOB.search(name):
        return FileSource(name, _files_of_glob(name), text_key)
    if is_data_file(path) or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise DataError(
            "no such data source",
            where=name or "data.source",
            why="no file or folder of this name exists",
            fix="check data.source; a relative path starts at the current folder",
        )
    return HubDataset(name, text_key)


def _local(name: str, path: Path, split: str | None, text_key: str) -> Source:
    """The source at `path`, which exists (or is a link that leads nowhere)."""
    if path.is_dir() and is_saved_dataset(path):
        return SavedDataset(name, path, split, text_key)
    if split is not None:
        raise DataError(
            "no splits in this source",
            where=name,
            why="only a dataset of Hugging Face has them",
            fix=f"leave out '#{split}'",
        )
    return FileSource(name, _files_in(path) if path.is_dir() else [_named_file(path)], text_key)


def _first(records: Iterator[Record]) -> frozenset[str]:
    """The fields of the first of `records`; what is malformed is reported by whoever reads them all."""
    try:
        return next((frozenset(record.fields) for record in records), frozenset())
    except DataError:
        return frozenset()


def _library_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _files_in(folder: Path) -> list[Path]:
    files = [
        path
        for path in folder.rglob("*")
        if is_data_file(path)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (path.is_file() or path.is_symlink())
    ]
    if not files:
        raise DataError(
            "no data files in folder",
            where=str(folder),
            why=f"none ends in {', '.join(SUFFIXES)}",
            fix="put some there, or name another folder as data.source",
        )
    return [_named_file(path) for path in files]


def _files_of_glob(pattern: str) -> list[Path]:
    found = [Path(text) for text in glob.glob(str(Path(pattern).expanduser()), recursive=True)]
    files = [_named_file(path) for path in found if not path.is_dir()]
    if not files:
        raise DataError("glob matches no file", where=pattern, fix="check data.source")
    return files


def _named_file(path: Path) -> Path:
    """`path` if it is a file to be read, or the DataError that says why not."""
    why = fix = ""
    if not path.exists():
        why, fix = "its link leads nowhere", "restore the file, or remove the link"
    elif not path.is_file():
        why, fix = "it is a device, a pipe or a socket", "copy its content into a file"
    elif not is_data_file(path):
        why, fix = f"its name ends in none of {', '.join(SUFFIXES)}", "rename it, or narrow data.source"
    if why:
        raise DataError("not a data file", where=str(path), why=why, fix=fix)
    return path


def _state(path: Path) -> list[str | int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(
            "cannot read data file", where=str(path), why=error.strerror or str(error), fix="check the file"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError("not a data file", where=str(path), fix="name regular files as data.source")
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
