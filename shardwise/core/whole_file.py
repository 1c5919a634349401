"""Small files that others read at any moment: written beside, and renamed into place.

Who reads sees what was there or what is there now; a process that is killed, or a disk that is full, leaves what was
there. Refused: syncing to the disk, which takes its time and is left to what nobody can make again
(``train/commit.py``); the price is that a power cut may bring back what was there.
"""

import errno
import os
from pathlib import Path

from shardwise.core.errors import ResourceError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the system that more room would have avoided."""


def write_whole(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of what ``path`` holds. Raises ResourceError; the file is then as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path.name}",
            where=str(path),
            why=error.strerror or str(error),
            fix="free some space or raise the quota" if error.errno in FULL else "",
        ) from error
