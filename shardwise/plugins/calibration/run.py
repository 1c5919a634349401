"""Starts the processes that measure this machine: 1, 2 and 4 of them on its CPU, as its plans would; one on a GPU."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

from shardwise.core.json_file import read_json, text_of
from shardwise.hardware.measured import MeasuredSpeeds
from shardwise.hardware.this_machine import threads_of, usable_cores
from shardwise.plugins.calibration.task import FOUND, TASK, Task
from shardwise.plugins.doctor.speed import start_rank

PROCESSES = (1, 2, 4)
CPU_DTYPES = ("fp32", "bf16")
GPU_DTYPES = ("fp32", "bf16", "fp16")
_RANK = "shardwise.plugins.calibration.rank"
_TIMEOUT, _QUICK_TIMEOUT = 300.0, 120.0
"""Seconds until a calibration is given up: several times as long as on a busy machine."""


def measure_cpu() -> tuple[MeasuredSpeeds, ...]:
    """The speeds of this machine's CPU for each number of processes. Raises RuntimeError when a process fails.

    Processes beyond the cores take turns, so their kernels are not measured but computed.
    """
    cores = usable_cores()
    speeds: list[MeasuredSpeeds] = []
    for processes in PROCESSES:
        threads = threads_of(processes)
        known = speeds[-1].shared_by(processes, threads, cores) if speeds else None
        # Without dtypes the processes take the kernels from ``known``, and measure collectives alone.
        dtypes = CPU_DTYPES if processes <= cores or not speeds else ()
        speeds.append(_measured_by_ranks(Task("cpu", dtypes, known), processes, threads))
    return tuple(speeds)


def measure_gpu(index: int) -> MeasuredSpeeds:
    """The speeds of kernels on one GPU of this machine. Raises RuntimeError when the process fails."""
    return _measured_by_ranks(Task(f"cuda:{index}", GPU_DTYPES), 1, threads_of(1))


def quick_cpu(processes: int) -> MeasuredSpeeds:
    """Rough speeds of one of ``processes`` processes on this machine's CPU. Raises RuntimeError when one fails."""
    return _measured_by_ranks(Task("cpu", CPU_DTYPES, quick=True), processes, threads_of(processes))


def quick_gpu() -> MeasuredSpeeds:
    """Rough speeds of kernels on the first GPU of this machine. Raises RuntimeError when the process fails."""
    return _measured_by_ranks(Task("cuda:0", GPU_DTYPES, quick=True), 1, threads_of(1))


def _measured_by_ranks(task: Task, processes: int, threads: int) -> MeasuredSpeeds:
    """What ``processes`` local processes found."""
    with tempfile.TemporaryDirectory(prefix="shardwise-calibration-") as name:
        folder = Path(name)
        (folder / TASK).write_text(text_of(task), encoding="utf-8")
        workers = [
            start_rank(_RANK, (rank, processes, folder), threads, stdout=subprocess.DEVNULL)
            for rank in range(processes)
        ]
        try:
            _wait_for(workers, _QUICK_TIMEOUT if task.quick else _TIMEOUT)
        finally:
            # When one rank fails, the others wait for it in a collective.
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.communicate()
        return read_json(folder / FOUND, MeasuredSpeeds)


def _wait_for(workers: list[subprocess.Popen[str]], timeout: float) -> None:
    """Until all have ended. Raises RuntimeError with the last line of the first that failed."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [worker.poll() for worker in workers]
        failed = next((worker for worker, code in zip(workers, codes, strict=True) if code), None)
        if failed is not None:
            lines = (failed.stderr.read() if failed.stderr else "").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"exit code {failed.returncode}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer within {timeout:.0f} s")
        time.sleep(0.05)
