"""Atomic writes of small files: write a temporary file, then rename it.

A reader sees the old or the new content. A killed process or a full disk leaves the old content. The file is not synced
to disk, so a power failure may bring back the old content; checkpoints are synced (``checkpoint/commit.py``).
"""

import errno
import os
from pathlib import Path

from shardwise.core.errors import ResourceError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Operating-system errors caused by a full disk, a quota or a file-size limit."""


def write_whole(path: Path, content: bytes) -> None:
    """Replace the content of ``path``. Raises ResourceError; the file is then unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path.name}",
            where=str(path),
            why=error.strerror or str(error),
            fix="free some space or raise the quota" if error.errno in FULL else "",
        ) from error
