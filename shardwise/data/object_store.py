"""Data files in object stores (``s3://``, ``gs://``, ``hf://``, ``http://`` and others), through fsspec.

Files are read once, to be tokenized: one at a time is copied to a temporary file, read by its suffix, and removed. So
the disk holds the tokens and one file. Training reads the tokens, whose order and place depend on seed and step alone:
a resumed run begins exactly where it was, and an object store that fails at step 10,000 does not stop it.

A file is known by its size and its entity tag or time of change, so a changed store is tokenized again.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from shardwise.core.errors import DataError
from shardwise.core.extras import install
from shardwise.data.readers import (
    SUFFIXES,
    Record,
    TextPiece,
    is_data_file,
    read_file,
    read_records,
)
from shardwise.data.source import Source, SourcePosition, after
from shardwise.data.tables import columns_of

_CHANGE_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "checksum",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""Names under which file systems say that a file has changed, most reliable first."""

_HEAD_BYTES = 1 << 20
"""Of a file, which nearly always have its first record."""
_GLOB_SIGNS = re.compile(r"[*?\[]")


class ObjectStore(Source):
    """Data files under a URL: a file, a folder, or a glob."""

    def __init__(self, name: str, text_key: str) -> None:
        """Lists the files. Raises DataError: none is there, or the store cannot be read."""
        self.name = name
        self._text_key = text_key
        with self._readable():
            self._system, location = _file_system(name)
            self._files = sorted(self._listed(location))
            self._states = [_state(self._system.info(path), path) for path in self._files]
        if not self._files:
            raise DataError(
                "no data files", where=name, why="nothing there has a known suffix", fix="check the URL"
            )

    def identity(self) -> object:
        return ["object store", self.name.partition("://")[0], self._text_key, self._states]

    def pieces(self) -> Iterator[TextPiece]:
        for path in self._files:
            with self._copied(path) as local:
                yield from read_file(local, self._text_key)

    def pieces_from(self, position: SourcePosition) -> Iterator[tuple[TextPiece, SourcePosition]]:
        first, skip = position or (0, 0)
        for number, path in enumerate(self._files[first:], first):
            with self._copied(path) as local:
                for piece, ended in after(read_file(local, self._text_key, skip), 0):
                    yield piece, [number, skip + ended]
            skip = 0

    def records(self, keys: Sequence[str]) -> Iterator[Record]:
        for path in self._files:
            with self._copied(path) as local:
                for record in read_records(local, keys):
                    yield replace(record, where=record.where.replace(str(local), path))

    def fields(self) -> frozenset[str]:
        return self._fields

    @cached_property
    def _fields(self) -> frozenset[str]:
        try:
            names_by_file = (self._fields_in(path, int(size or 0)) for path, size, _ in self._states)
            return next(filter(None, names_by_file), frozenset())
        except DataError:  # malformed data is reported later, when all records are read
            return frozenset()

    def _fields_in(self, path: str, size: int) -> frozenset[str] | None:
        """The fields of a file's first record, from its start if that has it; None if the file has no record."""
        with suppress(Exception):  # of any library, or no whole record; then the whole file says more
            if path.lower().endswith(".parquet"):
                with self._system.open(path) as remote:
                    return columns_of(remote)
            # The last line of a part is cut off, so only the first record is read.
            if size > _HEAD_BYTES:
                with self._copied(path, _HEAD_BYTES) as local:
                    return frozenset(next(read_records(local, ())).fields)
        with self._copied(path) as local:
            first = next(read_records(local, ()), None)
            return None if first is None else frozenset(first.fields)

    def _listed(self, location: str) -> list[str]:
        """The files, as those of a local folder or glob: nothing hidden, and every match of a glob."""
        if _GLOB_SIGNS.search(location):
            entries = self._system.glob(location, detail=True)
            paths = [path for path, info in entries.items() if info["type"] != "directory"]
            # Hidden below the glob's own folder; a pattern that names hidden files means them.
            before = _GLOB_SIGNS.split(location)[0].rpartition("/")[0]
            paths = [path for path in paths if "/." in location or not _is_hidden(path, before)]
            for path in paths:
                if not is_data_file(Path(path)):
                    why = f"its name ends in none of {', '.join(SUFFIXES)}"
                    raise DataError("not a data file", where=path, why=why, fix="narrow data.source")
            return paths
        if self._system.isdir(location):
            paths = [path for path in self._system.find(location) if not _is_hidden(path, location)]
            return [path for path in paths if is_data_file(Path(path), named=False)]
        self._system.info(location)  # raises FileNotFoundError
        return [location]

    @contextmanager
    def _copied(self, path: str, most: int | None = None) -> Iterator[Path]:
        """The file, or its first `most` bytes, on this disk as long as the block runs."""
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            local = Path(folder) / PurePosixPath(path).name
            with self._readable():
                if most is None:
                    self._system.get_file(path, str(local))
                else:
                    local.write_bytes(self._system.cat_file(path, end=most))
            try:
                yield local
            except DataError as error:
                if str(local) in (error.where or ""):
                    error.where = (error.where or "").replace(str(local), path)
                raise

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn the errors of file systems, of which each has its own, into one line."""
        try:
            yield
        except DataError:
            raise
        except ImportError as error:
            fix = "install the package that it names"
            raise DataError("no support for this store", where=self.name, why=str(error), fix=fix) from None
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(
                "cannot read the object store",
                where=self.name,
                why=why,
                fix="check the URL and your credentials",
            ) from None


def _file_system(name: str) -> tuple[Any, str]:
    """(file system, path in it)."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        why = "the package fsspec is not installed"
        fix = install("hf")
        raise DataError("cannot read a URL", where=name, why=why, fix=fix) from None
    system, location = url_to_fs(name)
    return system, location


def _is_hidden(path: str, folder: str) -> bool:
    """Whether a name below the folder begins with a dot."""
    return "/." in "/" + path.removeprefix(folder).lstrip("/")


def _state(info: dict[str, Any], path: str) -> list[str]:
    """The path, the size, and what changes with the content."""
    change = next((str(info[key]) for key in _CHANGE_KEYS if info.get(key) is not None), "")
    return [path, str(info.get("size")), change]
