"""Atomic and durable writes: of small files, and of new folders.

A file is written under a temporary name, synced, and then renamed. A reader sees the old or the new content, and so
does a process that starts after a kill, a full disk or a power failure.
"""

import errno
import os
from pathlib import Path

from shardwise.core.errors import RecipeError, ResourceError

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Operating-system errors caused by a full disk, a quota or a file-size limit."""


def more_room(error: OSError) -> str:
    """What to do about one of ``DISK_FULL_ERRORS``; "" for another error."""
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of a file (ulimit -f)"
    return "free some space or raise the quota" if error.errno in DISK_FULL_ERRORS else ""


def write_whole(path: Path, content: bytes) -> None:
    """Replace the content of ``path``, in a new folder if need be. Raises ResourceError; the file is then unchanged."""
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    try:
        make_folder(path.parent)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path.name}",
            where=str(path),
            why=error.strerror or str(error),
            fix=more_room(error),
        ) from error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; their names survive a power failure. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def require_new(target: Path) -> None:
    """Raise RecipeError if the folder ``target`` exists and is not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(
            "the folder exists already", where=str(target), fix="give another folder, or delete this one"
        )


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a power failure. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
