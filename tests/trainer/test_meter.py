"""What the memory meter counts on a CPU: memory that the process allocates, not pages of files that it reads."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from shardwise.trainer.meter import MemoryMeter
from tests.harness.pool import Pool

SIZE = 64 * 2**20


def measured(file: Path, allocate: bool) -> int:
    """Peak of a process that reads each page of a file of SIZE bytes, and may allocate as much."""
    meter = MemoryMeter(torch.device("cpu"))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        sum(pages[:: mmap.PAGESIZE])
        tensor = torch.ones(SIZE, dtype=torch.uint8) if allocate else None
        meter.after_step()
        del tensor
    return meter.peak.allocated


@pytest.mark.parametrize("allocate", [False, True])
def test_pages_of_files_are_no_memory_of_the_run(allocate: bool, pool: Pool, tmp_path: Path) -> None:
    """Libraries' code and cached tokens: the kernel drops such pages where memory is short."""
    file = tmp_path / "tokens"
    file.write_bytes(bytes(SIZE))
    [peak] = pool.run(1, measured, file, allocate)
    assert peak == pytest.approx(SIZE if allocate else 0, abs=SIZE // 16)
