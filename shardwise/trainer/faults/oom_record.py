"""Which errors mean out of memory (OOM) or a full disk, and ``oom.json``, a run's record of its last OOM.

No single exception means OOM. CUDA raises ``torch.OutOfMemoryError``, but its libraries raise errors of their own.
The CPU allocator raises a RuntimeError, numpy and Python a MemoryError. User code may wrap any of them, so the causes
of an error are searched too. This module does not import torch, which the command line loads late.

A run that starts again with the strategy of the record, on as many ranks, takes the smaller micro-batch. The record is
not part of ``plan.json``, which every start overwrites, nor of checkpoints, which may be resumed on other machines.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.core.atomic_file import DISK_FULL_ERRORS, write_whole
from shardwise.core.errors import DataError, OutOfMemory, ResourceError
from shardwise.core.json_file import Size, read_json, text_of
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes

OOM_RECORD = "oom.json"

_TEXTS = re.compile(
    r"can't allocate memory|not enough memory|bad_alloc|(CUDA|HIP) error: out of memory"
    r"|Cuda failure.*out of memory|CU(BLAS|SOLVER|DNN)_STATUS_ALLOC_FAILED"
)
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def is_oom(error: BaseException) -> bool:
    """Whether ``error`` or one of its causes means that device or host memory ran out."""
    # Without torch in the process there is no error of torch's, so the class is looked up and not imported.
    kinds = (MemoryError, getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError))
    for cause in _causes(error):
        if isinstance(cause, kinds):
            return True
        if isinstance(cause, RuntimeError) and _TEXTS.search(str(cause)) is not None:
            return True
    return False


def resource_error(
    error: Exception, where: str = "the device", fix: str = "shard more, or use a smaller micro-batch"
) -> ResourceError | None:
    """The error to show for an OOM or a full disk; None for any other error. ``where`` and ``fix`` are of an OOM."""
    if is_oom(error):
        return ResourceError("out of memory", where=where, why=str(error).split(". ")[0], fix=fix)
    if isinstance(error, OSError) and (error.errno in DISK_FULL_ERRORS or error.errno == errno.EROFS):
        room = "free some space or raise the quota" if error.errno in DISK_FULL_ERRORS else "write elsewhere"
        path = str(error.filename or "the disk")
        why = error.strerror or str(error)
        return ResourceError("cannot write", where=path, why=why, fix=f"{room}, and go on")
    return None


def requested_bytes(error: BaseException) -> int:
    """The size of the allocation that failed; 0 when the error does not say."""
    for cause in _causes(error):
        if (match := _REQUESTED.search(str(cause))) is not None:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    return 0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()  # causes may form a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


@dataclass(frozen=True)
class OomRecord:
    """The last time that a rank of a run ran out of memory.

    Attributes:
        strategy: the strategy at that time, with its micro-batch size.
        world_size: number of ranks at that time.
        next_micro_batch_size: the micro-batch size to start again with; 0 when it was 1 already.
        rank: the rank that ran out of memory (one of them, if several did).
        step: number of the optimizer step, from 1; of an evaluation, the step before it.
        allocated_bytes: memory that the rank held, measured as the peak of a run is.
        requested_bytes: size of the allocation that failed; 0 when it is unknown.
    """

    strategy: Mapping[str, Any]
    world_size: Size
    next_micro_batch_size: Size
    rank: Size
    step: Size
    allocated_bytes: Size
    requested_bytes: Size

    @property
    def is_final(self) -> bool:
        """Whether the micro-batch cannot be halved any more."""
        return self.next_micro_batch_size == 0

    @property
    def smallest(self) -> int:
        """The micro-batch size to start with."""
        return max(1, self.next_micro_batch_size)

    def applies_to(self, strategy: Strategy, world_size: int) -> bool:
        """Whether this strategy would run out of memory again: the same one, and its micro-batch is too large."""
        size = strategy.values["micro_batch_size"]
        return self._matches(strategy, world_size, size) and isinstance(size, int) and size > self.smallest

    def led_to(self, strategy: Strategy, world_size: int) -> bool:
        """Whether this strategy is the one that follows from the record."""
        return self._matches(strategy, world_size, self.next_micro_batch_size)

    def _matches(self, strategy: Strategy, world_size: int, size: Any) -> bool:
        same = {**self.strategy, "micro_batch_size": size} == dict(strategy.values)
        return same and world_size == self.world_size

    @property
    def request(self) -> str:
        """The allocation that failed, in torch's words."""
        allocated = f"{format_bytes(self.allocated_bytes)} already allocated"
        if not self.requested_bytes:
            return f"an allocation failed with {allocated}"
        return f"tried to allocate {format_bytes(self.requested_bytes)} with {allocated}"

    def error(self) -> OutOfMemory:
        """The error with which the rank stops."""
        if self.is_final:
            what = "out of memory with a micro-batch of 1"
            fix = "shard more, or recompute activations"
        else:
            what = "out of memory"
            fix = f"the same command goes on with micro_batch_size {self.next_micro_batch_size}"
        return OutOfMemory(what, where=f"rank {self.rank}, step {self.step}", why=self.request, fix=fix)

    def final_error(self, advice: str) -> ResourceError:
        """The error of a run that cannot halve its micro-batch."""
        error = self.error()
        return ResourceError(error.what, where=error.where, why=error.why, fix=advice)

    def reason(self) -> str:
        """Why a run starts with a smaller micro-batch than planned."""
        return (
            f"micro_batch_size is {self.smallest}: with {self.strategy['micro_batch_size']}, rank {self.rank} ran out"
            f" of memory in step {self.step} ({OOM_RECORD})"
        )


def write_record(folder: Path, record: OomRecord) -> None:
    """Write ``oom.json`` into a run's folder in one rename. Raises ResourceError."""
    write_whole(folder / OOM_RECORD, text_of(record).encode())


def written_at(folder: Path) -> int:
    """When ``oom.json`` was last written, in nanoseconds; 0 without one."""
    path = folder / OOM_RECORD
    return path.stat().st_mtime_ns if path.exists() else 0


def read_record(folder: Path) -> OomRecord | None:
    """The record of a run's folder; None when there is none or it cannot be read."""
    try:
        return read_json(folder / OOM_RECORD, OomRecord)
    except (OSError, DataError):
        return None
