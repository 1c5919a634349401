"""Running out of memory, or of a disk: what counts as that, and what a run's folder remembers of it.

There is no one exception for it. CUDA has ``torch.OutOfMemoryError``, except where a library allocates by itself;
the CPU's allocator raises RuntimeError with its name in the text, numpy and Python MemoryError, and C++ bad_alloc,
which torch hands on as one of the two. What a user's code was doing may be wrapped once more, so causes are looked at.
torch is never imported here: where nobody has, nothing of it ran out, and the command line asks before anybody has.

``shortage.json`` says with which strategy on how many ranks memory ran out, and the micro-batch that the run went on
with. A resume of the same strategy starts with that; of another strategy, or on another number of ranks, it means
nothing. Refused: keeping it in ``plan.json``, which every resume writes anew, or in checkpoints, which may be
resumed on other machines.
"""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.core.errors import ResourceError
from shardwise.core.strategy import Strategy
from shardwise.core.whole_file import FULL, write_whole

NAME = "shortage.json"

_TEXTS = re.compile(
    r"can't allocate memory|not enough memory|bad_alloc|(CUDA|HIP) error: out of memory"
    r"|Cuda failure.*out of memory|CU(BLAS|SOLVER|DNN)_STATUS_ALLOC_FAILED"
)
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the host."""
    kinds = (MemoryError, getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError))
    return any(
        isinstance(each, kinds) or (isinstance(each, RuntimeError) and _TEXTS.search(str(each)) is not None)
        for each in chain(error)
    )


def resource_error(
    error: Exception, where: str = "the device", fix: str = "shard more, or a smaller micro-batch"
) -> ResourceError | None:
    """What to say of memory or a disk that ran out where nobody else has said it; None for any other error.

    ``where`` and ``fix`` are of memory.
    """
    if is_shortage(error):
        return ResourceError("out of memory", where=where, why=str(error).split(". ")[0], fix=fix)
    if isinstance(error, OSError) and (error.errno in FULL or error.errno == errno.EROFS):
        room = "free some space or raise the quota" if error.errno in FULL else "write elsewhere"
        place, why = str(error.filename or "the disk"), error.strerror or str(error)
        return ResourceError("cannot write", where=place, why=why, fix=f"{room}, and go on")
    return None


def asked_for(error: BaseException) -> int:
    """The bytes that found no room; 0 where the error does not say."""
    for each in chain(error):
        if (match := _ASKED.search(str(each))) is not None:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    return 0


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


@dataclass(frozen=True)
class Shortage:
    """The last time that memory ran out in a run.

    Attributes:
        strategy: the strategy then, its micro-batch included.
        micro_batch_size: what the run went on with; 0 when there was nothing smaller.
        rank: the rank whose memory ran out (the first, of several).
        step: number of the optimizer step, from 1, within which or after which it did.
        held_bytes: what that rank had been given when it asked for more, as a run's peak is measured.
        asked_bytes: what it asked for; 0 when that is not known.
    """

    strategy: Mapping[str, Any]
    world_size: int
    micro_batch_size: int
    rank: int
    step: int
    held_bytes: int
    asked_bytes: int

    @property
    def exhausted(self) -> bool:
        return self.micro_batch_size == 0

    def speaks_of(self, strategy: Strategy, world_size: int) -> bool:
        """Whether it would happen again with this strategy: the same, and a larger micro-batch than survived."""
        size = strategy.values["micro_batch_size"]
        same = {**self.strategy, "micro_batch_size": size} == dict(strategy.values)
        return same and world_size == self.world_size and isinstance(size, int) and size > self.smallest

    @property
    def smallest(self) -> int:
        """The micro-batch to start with."""
        return max(1, self.micro_batch_size)

    def sentence(self) -> str:
        """For a run that starts with what an earlier one went on with."""
        before = self.strategy["micro_batch_size"]
        return (
            f"micro_batch_size is {self.smallest}: with {before} memory ran out on rank {self.rank} in step"
            f" {self.step} ({NAME})"
        )


def remember(folder: Path, shortage: Shortage) -> None:
    """Write it into a run's folder, whole or not at all. Raises ResourceError."""
    write_whole(folder / NAME, json.dumps(asdict(shortage), indent=1).encode())


def written_at(folder: Path) -> int:
    """When the folder's memory was last written, in nanoseconds; 0 when there is none."""
    path = folder / NAME
    return path.stat().st_mtime_ns if path.exists() else 0


def remembered(folder: Path) -> Shortage | None:
    """What a run's folder remembers; None where that is nothing, or cannot be read."""
    try:
        values = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return Shortage(**values)
    except (OSError, ValueError, TypeError):
        return None
