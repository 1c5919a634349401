"""Measuring memory: what the operating system or CUDA saw, in the terms in which the plan predicts.

On the CPU the measure is the process's high-water mark (VmHWM) less its level just before the model is built.
glibc keeps freed memory for reuse, which the plan does not count: the same run peaked at 327 MiB with large
frees returned at once and at 484 MiB by default. Returning them makes steps up to twice as slow, so it is done
for the first optimizer steps only, where the peak is taken, and then the allocator goes back to speed.

On CUDA it is ``max_memory_allocated`` since the same moment, with ``max_memory_reserved`` beside it. Nothing is taken
from it: what lies there before are the workspaces of products, which the plan counts.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

EXACT_STEPS = 3
"""Optimizer steps that run with large frees returned at once."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Measured:
    """Peak bytes of one rank since ``MemoryMeter`` was made. ``reserved`` is 0 where there is no such thing."""

    allocated: int
    reserved: int


class MemoryMeter:
    """Takes the level when made; ``sample`` after a step raises ``peak``, ``forget`` drops what lay between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = Measured(0, 0)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._level = 0
        else:
            return_large_frees(True)
            _reset_high_water_mark()
            self._level = _status("VmRSS")

    def sample(self) -> None:
        """Raise ``peak`` to the mark reached since the level was taken or ``forget`` was called."""
        now = self.reached()
        self.peak = Measured(max(self.peak.allocated, now.allocated), max(self.peak.reserved, now.reserved))

    def reached(self) -> Measured:
        """The mark reached since the level was taken or ``forget`` was called."""
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device) - self._level
            return Measured(allocated, torch.cuda.max_memory_reserved(self._device))
        return Measured(_status("VmHWM") - self._level, 0)

    def begin_again(self) -> None:
        """Measure anew from the level that was taken: what runs from here on is another plan."""
        if self._device.type != "cuda":
            return_large_frees(True)
        self.peak = Measured(0, 0)
        self.forget()

    def forget(self) -> None:
        """What was reached since the last sample (an evaluation, a checkpoint) is not part of a step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_high_water_mark()


def return_large_frees(enabled: bool) -> None:
    """Whether glibc returns freed blocks of 64 KiB and more to the system at once. No effect elsewhere."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024 if enabled else 32 * 1024 * 1024)
    libc.mallopt(_M_TRIM_THRESHOLD, 0 if enabled else 512 * 1024 * 1024)


@contextmanager
def frees_returned() -> Iterator[None]:
    """Within it large frees are returned at once: for what passes many large tensors through memory, one by one."""
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
    """Lower VmHWM to the present level (Linux; in containers that forbid it the mark only rises)."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return
