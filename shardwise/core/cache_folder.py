"""The folder of caches: tokens, counted dry runs, plans. All can be made again."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from shardwise.core.atomic_file import write_whole
from shardwise.core.errors import ResourceError
from shardwise.core.paths import path_of

MOST_FILES = 4096
"""When a folder has more, the older half is deleted."""

logger = logging.getLogger(__name__)


def default_root() -> Path:
    """$SHARDWISE_CACHE, else ~/.cache/shardwise. Raises ResourceError where there is no home folder either."""
    if chosen := os.environ.get("SHARDWISE_CACHE"):
        return path_of(chosen)
    try:
        return Path.home() / ".cache" / "shardwise"
    except RuntimeError:
        raise ResourceError(
            "no place for caches",
            why="this user has no home folder",
            fix="set SHARDWISE_CACHE to a folder",
        ) from None


@functools.cache
def code_digest() -> str:
    """A hash of the code and the tables of this package: what it computed before may differ after a change of them."""
    package = Path(__file__).parents[1]
    code = xxhash.xxh3_128()
    for path in sorted((*package.rglob("*.py"), *package.rglob("*.toml"))):
        code.update(path.read_bytes())
    return code.hexdigest()


def key_of(parts: Iterable[object]) -> str:
    """A name for a result that depends on these parts, which must print all that they hold."""
    return xxhash.xxh3_128_hexdigest("\n".join(map(str, parts)).encode())


def store(path: Path, content: bytes) -> None:
    """Write a file of a cache; a disk that refuses changes nothing but the next call's time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        _make_room(path.parent, path.suffix)
    except (OSError, ResourceError) as error:
        logger.debug("%s is not stored: %s", path, error)


def _make_room(folder: Path, suffix: str) -> None:
    files = list(folder.glob(f"*{suffix}"))
    if len(files) > MOST_FILES:
        files.sort(key=lambda path: path.stat().st_mtime)
        for path in files[: len(files) // 2]:
            path.unlink(missing_ok=True)
