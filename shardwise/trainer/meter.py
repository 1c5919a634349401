"""Measures the peak memory of a run, in the same terms as the plan predicts it.

On the CPU this is the process's high-water mark (VmHWM) minus its memory just before the model is built, without the
pages of files that it has read since (RssFile): code of libraries and cached tokens. The kernel drops those where
memory is short. glibc keeps freed memory for reuse, which the plan does not count: the same run peaked at 327 MiB with
large frees returned at once, and at 484 MiB by default. Returning them makes steps up to twice as slow. So it is done
for the first optimizer steps, which give the peak; then the allocator returns to its fast mode.

On CUDA this is ``max_memory_allocated``, with ``max_memory_reserved``. Nothing is subtracted: allocations before
the model are workspaces of matrix products, which the plan counts.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.hardware.kinds import kind_of

EXACT_STEPS = 3
"""Optimizer steps that run with large frees returned at once, and give the peak."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of mallopt, from glibc's malloc.h."""
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Measured:
    """Peak bytes of one rank since ``MemoryMeter`` was made. ``reserved`` is 0 on the CPU."""

    allocated: int
    reserved: int


class MemoryMeter:
    """Measures from its construction on. ``after_step`` raises ``peak``; ``forget`` ignores memory outside of steps."""

    def __init__(self, device: torch.device, exact: bool = False) -> None:
        self._device = device
        self._exact = exact
        self._steps = 0
        self.peak = Measured(0, 0)
        self._module = None if kind_of(device).is_host else torch.get_device_module(device)
        if self._module is not None:
            self._module.reset_peak_memory_stats(device)
            self._level = self._files = 0
        else:
            # Frees that glibc holds back would be part of the level, and the run would reuse them unmeasured.
            return_large_frees(True)
            _reset_high_water_mark()
            self._level = _status("VmRSS")
            self._files = _status("RssFile")

    def after_step(self) -> None:
        """Sample the first EXACT_STEPS optimizer steps, or all of them if ``exact``."""
        self._steps += 1
        if self._exact or self._steps <= EXACT_STEPS:
            self.sample()
        if self._steps == EXACT_STEPS and not self._exact:
            return_large_frees(False)

    def sample(self) -> None:
        """Raise ``peak`` to the highest memory since construction or ``forget``."""
        now = self.reached()
        self.peak = Measured(max(self.peak.allocated, now.allocated), max(self.peak.reserved, now.reserved))

    def reached(self) -> Measured:
        """The highest memory since construction or ``forget``."""
        if self._module is not None:
            allocated = self._module.max_memory_allocated(self._device) - self._level
            return Measured(allocated, self._module.max_memory_reserved(self._device))
        files = max(0, _status("RssFile") - self._files)
        return Measured(max(0, _status("VmHWM") - self._level - files), 0)

    def forget(self) -> None:
        """Ignore the memory since the last sample, as of an evaluation or a checkpoint."""
        if self._module is not None:
            self._module.reset_peak_memory_stats(self._device)
        else:
            _reset_high_water_mark()


def return_large_frees(enabled: bool) -> None:
    """Set whether glibc returns freed blocks of at least 64 KiB to the system at once. No effect without glibc."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024 if enabled else 32 * 1024 * 1024)
    libc.mallopt(_M_TRIM_THRESHOLD, 0 if enabled else 512 * 1024 * 1024)


@contextmanager
def frees_returned() -> Iterator[None]:
    """Return large frees at once within the block, for code that handles many large tensors one by one."""
    return_large_frees(True)
    try:
        yield
    finally:
        return_large_frees(False)


def _status(key: str) -> int:
    """A figure of /proc/self/status in bytes; 0 where there is no such file."""
    if not _STATUS.exists():
        return 0
    match = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _reset_high_water_mark() -> None:
    """Lower VmHWM to the present memory (Linux). In containers that forbid it, the mark only rises."""
    try:
        _CLEAR_REFS.write_text("5")  # see proc(5): 5 resets the high-water mark and nothing else
    except OSError:
        return
