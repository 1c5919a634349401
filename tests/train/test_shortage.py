"""What counts as running out of memory, and what a folder remembers of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.core.errors import DataError, ResourceError
from shardwise.technique import strategy_from
from shardwise.train.shortage import Shortage, asked_for, is_shortage, remember, remembered
from shardwise.train.worker import attempt

SHORT = Shortage(dict(strategy_from({"micro_batch_size": 4}).values), 2, 2, 1, 17, 1 << 30, 2 << 30)

REAL = """
import resource, torch
from shardwise.train.shortage import asked_for, is_shortage
torch.zeros(1)
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
for allocate in (lambda: torch.empty(1 << 33), lambda: bytearray(1 << 35)):
    try:
        allocate()
    except Exception as error:
        print(type(error).__name__, is_shortage(error), asked_for(error))
"""


def test_what_pytorch_and_python_really_raise() -> None:
    found = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [f"RuntimeError True {4 << 33}", "MemoryError True 0"]


def test_other_errors_are_none() -> None:
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")
    assert is_shortage(cuda) and asked_for(cuda) == 5 << 29
    assert is_shortage(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    )
    wrapped = DataError("dataset raised an error")
    wrapped.__cause__ = MemoryError()
    assert is_shortage(wrapped)
    assert not is_shortage(RuntimeError("Connection closed by peer"))
    assert not is_shortage(ValueError("can't allocate memory"))


def test_a_memory_is_of_one_strategy_on_so_many_ranks(tmp_path: Path) -> None:
    assert remembered(tmp_path) is None
    remember(tmp_path, SHORT)
    assert remembered(tmp_path) == SHORT
    strategy = strategy_from({"micro_batch_size": 4})
    assert SHORT.speaks_of(strategy, 2) and SHORT.speaks_of(strategy.with_values(micro_batch_size=8), 2)
    assert not SHORT.speaks_of(strategy.with_values(micro_batch_size=2), 2)
    assert not SHORT.speaks_of(strategy.with_values(zero_stage=3), 2)
    assert not SHORT.speaks_of(strategy, 4)
    assert replace(SHORT, micro_batch_size=0).speaks_of(strategy, 2)
    (tmp_path / "shortage.json").write_text('{"strategy": {}', encoding="utf-8")
    assert remembered(tmp_path) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_one_line_wherever_it_is_met(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As when this file, or a line of metrics, cannot be written."""

    def write() -> None:
        raise OSError(number, os.strerror(number), "run/metrics.jsonl")

    assert attempt(write) == ResourceError.exit_code == 7
    last = capsys.readouterr().err.splitlines()[-1]
    assert "run/metrics.jsonl" in last and os.strerror(number) in last


def test_any_other_error_of_the_system_is_raised() -> None:
    def read() -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", "run/plan.json")

    with pytest.raises(FileNotFoundError):
        attempt(read)
