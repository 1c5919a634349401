"""Measured speeds of this machine: matrix products, copies, host to device, gloo between local processes.

Each figure is the best of a few repetitions within a time budget, because noise only makes a repetition slower.
Operands are random: hardware multiplies zeros faster (894 against 788 TFLOP/s on an H200). A product is also compared
with fp64, which finds a processor that computes wrong results.

The link figure is the sum of an all-gather and a reduce-scatter, as in sharded training. gloo's all-reduce is up to
four times faster than either. One large shape is measured, which gives the profile's peak and efficiency in seconds;
the speed of small shapes is not measured.

Run as a module, it is one rank of the link measurement: `python -m shardwise.plugins.doctor.speed RANK SIZE FOLDER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.core.units import MiB
from shardwise.hardware.kinds import kind_of

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_PAYLOAD_BYTES = 16 * MiB
_LINK_TIMEOUT = 90.0
_SLOW = 1.0


@dataclass(frozen=True)
class Product:
    """FLOP/s of large matrix products, and whether one agrees with fp64 within rounding."""

    flops: float
    correct: bool


@dataclass(frozen=True)
class LinkSpeed:
    """Gloo between local processes: bytes/s out of each (ring convention), seconds to reduce one number."""

    processes: int
    bandwidth: float
    latency: float


def matrix_product(
    device: torch.device, dtype: torch.dtype, *, size: int = 0, budget: float = 0.5
) -> Product:
    """Multiply two random ``size`` x ``size`` matrices for about ``budget`` seconds.

    They are multiplied as in a linear layer: x @ W.T forward, and g @ W and g.T @ x backward. A processor without units
    for the dtype is faster in one of these than in another (bf16 on an AVX2 CPU: 11, 0.8 and 22 GFLOP/s). TF32 is off
    for fp32.

    Raises RuntimeError if the device lacks the dtype or the memory.
    """
    size = size or (1024 if kind_of(device).is_host else 8192)
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(size, size, generator=generator, device=device).to(dtype)
    right = torch.randn(size, size, generator=generator, device=device).to(dtype)
    out = torch.empty(size, size, dtype=dtype, device=device)
    # The setting is global: it is restored for the rest of this process.
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        pairs = ((left.t(), right), (left, right.t()), (left, right))  # the last one is compared below
        seconds = sum(_best(partial(torch.mm, *pair, out=out), device, budget / 3) for pair in pairs) / 3
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    # One column: fp64 products of whole matrices would take longer than the measurement.
    exact = left.double() @ right[:, 0].double()
    # A sum of random signs is about sqrt(size). The error consists of one rounding to the dtype, and one rounding of
    # each partial sum to the accumulator's dtype.
    error = (out[:, 0].double() - exact).abs().max().item() / size**0.5
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    bound = 8 * torch.finfo(dtype).eps + 2 * size**0.5 * torch.finfo(accumulator).eps
    return Product(2 * size**3 / seconds, error < bound)


def copy_bandwidth(device: torch.device, *, size: int = 256 * MiB, budget: float = 0.5) -> float:
    """Bytes/s, read plus written, of a copy within the memory of ``device``."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device, budget)


def host_bandwidths(device: torch.device, *, size: int = 256 * MiB) -> tuple[float, float]:
    """Bytes/s from pinned host memory to ``device`` and back."""
    # Pinned, as offloaded state is: pageable memory would be copied twice.
    host = torch.ones(size // 4, pin_memory=True)
    on_device = torch.empty_like(host, device=device)
    to_device = _best(lambda: on_device.copy_(host, non_blocking=True), device, 0.5)
    to_host = _best(lambda: host.copy_(on_device, non_blocking=True), device, 0.5)
    return host.nbytes / to_device, host.nbytes / to_host


def disk_bandwidth(folder: Path, *, size: int = 128 * MiB) -> float | None:
    """Bytes/s that a file in ``folder`` is written with, until it is on the disk; None if none can be written there."""
    block = os.urandom(size // 8)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            for _ in range(8):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return size / (time.perf_counter() - begin)
    except OSError:
        return None


def link_speed(processes: int = 2, timeout: float = _LINK_TIMEOUT) -> LinkSpeed:
    """Start ``processes`` local processes and let them communicate by gloo over loopback.

    Raises RuntimeError with the last line of a process that failed, or after ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-link-") as folder:
        workers = [start_rank(__name__, (rank, processes, folder), threads=1) for rank in range(processes)]
        try:
            deadline = time.monotonic() + timeout
            outputs = [
                worker.communicate(timeout=max(0.1, deadline - time.monotonic())) for worker in workers
            ]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no answer within {timeout:.0f} s") from None
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.communicate()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        if worker.returncode:
            lines = errors.strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"exit code {worker.returncode}")
    measured = json.loads(outputs[0][0])
    return LinkSpeed(processes, measured["bandwidth"], measured["latency"])


def loopback_interface() -> str | None:
    """The name of the loopback network interface, for GLOO_SOCKET_IFNAME; None if not found."""
    names = Path("/sys/class/net")
    if names.is_dir():
        return "lo" if (names / "lo").exists() else None
    return "lo0" if sys.platform == "darwin" else None


def start_rank(
    module: str, arguments: Sequence[object], threads: int, stdout: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """A local process that runs a module of the package, and whose gloo communicates over loopback."""
    # The child imports this very package, also where it is not installed.
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    if (loopback := loopback_interface()) is not None:
        environment["GLOO_SOCKET_IFNAME"] = loopback
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)],
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def _rank_of_link(rank: int, processes: int, folder: str) -> None:
    rendezvous = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=processes)
    part = torch.ones(_PAYLOAD_BYTES // 4 // processes)
    whole = torch.ones(part.numel() * processes)
    gather = min(_timed_together(lambda: dist.all_gather_into_tensor(whole, part)) for _ in range(6))
    scatter = min(_timed_together(lambda: dist.reduce_scatter_tensor(part, whole)) for _ in range(6))
    number = torch.ones(1)
    latencies = sorted(_timed_together(lambda: dist.all_reduce(number)) for _ in range(31))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        # In a ring, each rank sends (p - 1) / p of the payload in either collective.
        sent = 2 * (processes - 1) / processes * whole.nbytes
        median = latencies[len(latencies) // 2]
        print(json.dumps({"bandwidth": sent / (gather + scatter), "latency": median}))


def _timed_together(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _best(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """Seconds of the fastest of at least 3 runs, more while ``budget`` seconds last, after a warm-up run.

    Runs of ``_SLOW`` seconds are not repeated.
    """
    _timed(run, device)
    best = float("inf")
    spent = 0.0
    runs = 0
    while (runs < 3 and spent < _SLOW) or (spent < budget and runs < 100):
        seconds = _timed(run, device)
        best = min(best, seconds)
        spent += seconds
        runs += 1
    return best


def _timed(run: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if not kind_of(device).is_host:
        torch.get_device_module(device).synchronize(device)


if __name__ == "__main__":
    _rank_of_link(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
