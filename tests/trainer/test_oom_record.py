"""Which errors mean out of memory, and the record of an OOM in a run's folder."""

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
from shardwise.trainer.faults.oom_record import OomRecord, is_oom, read_record, requested_bytes, write_record
from shardwise.worker import attempt

RECORD = OomRecord(dict(strategy_from({"micro_batch_size": 4}).values), 2, 2, 1, 17, 1 << 30, 2 << 30)

REAL = """
import resource, torch
from shardwise.trainer.faults.oom_record import is_oom, requested_bytes
torch.zeros(1)
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
for allocate in (lambda: torch.empty(1 << 33), lambda: bytearray(1 << 35)):
    try:
        allocate()
    except Exception as error:
        print(type(error).__name__, is_oom(error), requested_bytes(error))
"""


def test_what_pytorch_and_python_really_raise() -> None:
    found = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [f"RuntimeError True {4 << 33}", "MemoryError True 0"]


def test_other_errors_are_none() -> None:
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")
    assert is_oom(cuda) and requested_bytes(cuda) == 5 << 29
    assert is_oom(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    wrapped = DataError("dataset raised an error")
    wrapped.__cause__ = MemoryError()
    assert is_oom(wrapped)
    assert not is_oom(RuntimeError("Connection closed by peer"))
    assert not is_oom(ValueError("can't allocate memory"))


def test_a_record_is_of_one_strategy_and_world_size(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD
    strategy = strategy_from({"micro_batch_size": 4})
    assert RECORD.applies_to(strategy, 2) and RECORD.applies_to(strategy.with_values(micro_batch_size=8), 2)
    assert not RECORD.applies_to(strategy.with_values(micro_batch_size=2), 2)
    assert not RECORD.applies_to(strategy.with_values(zero_stage=3), 2)
    assert not RECORD.applies_to(strategy, 4)
    assert replace(RECORD, next_micro_batch_size=0).applies_to(strategy, 2)
    assert RECORD.led_to(strategy.with_values(micro_batch_size=2), 2) and not RECORD.led_to(strategy, 2)
    (tmp_path / "oom.json").write_text('{"strategy": {}', encoding="utf-8")
    assert read_record(tmp_path) is None


def test_errors_in_the_words_of_torch() -> None:
    error = RECORD.error()
    assert error.line() == (
        "error: out of memory (rank 1, step 17): tried to allocate 2.00 GiB with 1.00 GiB already allocated; the same"
        " command goes on with micro_batch_size 2"
    )
    final = replace(RECORD, next_micro_batch_size=0, requested_bytes=0)
    assert final.final_error("shard more").line() == (
        "error: out of memory with a micro-batch of 1 (rank 1, step 17): an allocation failed with 1.00 GiB already"
        " allocated; shard more"
    )


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
