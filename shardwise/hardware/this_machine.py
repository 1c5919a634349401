"""This machine's memory, cores and CPU profile, without a measurement and without torch.

On `device: cpu` each "device" is one process, and the processes of a node share the machine. Memory is the tightest
limit of this process's cgroup and its parents, else physical memory. FLOP/s are a low figure per core and instruction
set, so `plan` needs no measurement. `shardwise doctor --calibrate` measures once and writes `cpu.json`, which is used
while CPU model, number of cores and version of torch are the same.

A `cpu.json` that cannot be read is ignored without a message, because a plan must not fail over an optional speed. The
profile's `source` says which figures were used.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from shardwise.core.json_file import checked, text_of
from shardwise.core.paths import path_of
from shardwise.core.units import MiB
from shardwise.hardware.device import DeviceProfile, Efficiency, Latency, Overhead
from shardwise.hardware.measured import MeasuredSpeeds

CALIBRATION_VERSION = 2
UNLIMITED = 2**60
"""A cgroup limit at or above this means no limit (cgroup v1 writes 2^63 minus one page)."""

_FLOPS_PER_CORE: tuple[tuple[str, float], ...] = (("avx512f", 50e9), ("avx2", 25e9), ("asimd", 20e9))
"""fp32 FLOP/s of one logical core by instruction set: about half of oneDNN's speed on a current server core
(108e9 measured on AMD Zen 5, avx512f), because two logical cores often share one physical core."""
_LEAST_FLOPS_PER_CORE = 8e9
# Speed of bf16 relative to fp32 by instruction set; without one, PyTorch converts to fp32 and back.
_BF16_OVER_FP32: tuple[tuple[str, float], ...] = (("amx_bf16", 8.0), ("avx512_bf16", 2.0), ("bf16", 2.0))
_EMULATED = 0.5
# Bytes per second, assumed where nothing was measured. From four cores on, more do not read faster.
_BANDWIDTH_PER_CORE, _MOST_BANDWIDTH = 10e9, 40e9
_LOOPBACK_BANDWIDTH = 0.5e9
_DISK_BANDWIDTH = 1e9
# 10 Gbit/s.
_ETHERNET = 1.25e9


@dataclass(frozen=True)
class Calibration:
    """What `doctor --calibrate` measured: FLOP/s by dtype and bytes/s of the whole machine, and its processes' speeds.

    Attributes:
        torch: version of the package.
        day: of the measurement, as 2026-11-23.
        disk_bandwidth: bytes/s that a file is written with, to the disk.
        speeds: of one process, for several numbers of processes.
    """

    cpu_model: str
    cores: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float | None = None
    torch: str = ""
    day: str = ""
    disk_bandwidth: float | None = None
    speeds: tuple[MeasuredSpeeds, ...] = ()
    version: int = CALIBRATION_VERSION

    def speeds_of(self, processes: int, threads: int) -> MeasuredSpeeds | None:
        """The speeds of one of ``processes`` processes.

        Of those that were measured with as many threads, if there are any, the nearest number of processes counts; the
        machine is divided anew.
        """
        alike = [speed for speed in self.speeds if speed.threads == threads] or list(self.speeds)
        if not alike:
            return None
        near = min(alike, key=lambda speed: abs(math.log(speed.processes / processes)))
        if (near.processes, near.threads) == (processes, threads):
            return near
        return near.shared_by(processes, threads, self.cores)


def cache_folder() -> Path:
    """The folder of cached files: $SHARDWISE_CACHE, else ~/.cache/shardwise."""
    chosen = os.environ.get("SHARDWISE_CACHE")
    return path_of(chosen or "~/.cache/shardwise")


def calibration_file() -> Path:
    return cache_folder() / "cpu.json"


def physical_memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit(root: Path = Path("/")) -> int | None:
    """The tightest memory limit, in bytes, of this process's cgroup and its parents (v1 or v2); None without a limit.

    Args:
        root: root of the file system; tests use another.
    """
    return min((limit for _, _, limit in _memory_limits(root)), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes left below the limits of this process's cgroup and its parents; None without a limit.

    A group's usage includes the file cache. Its inactive part counts as free: the kernel drops it first.
    """
    free_bytes = []
    for folder, name, limit in _memory_limits(root):
        unified = name == "memory.max"
        used = _read_int(folder / ("memory.current" if unified else "memory.usage_in_bytes")) or 0
        cache = _memory_stat(folder, "inactive_file" if unified else "total_inactive_file")
        free_bytes.append(max(0, limit - max(0, used - cache)))
    return min(free_bytes, default=None)


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes that the processes of this machine may use together."""
    return min(physical_memory(), memory_limit(root) or UNLIMITED)


def usable_cores(root: Path = Path("/")) -> int:
    """Logical cores that this process may use: its CPU affinity, limited by the cgroup's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, name in _cgroup_folders(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, period = _cpu_quota(folder, name)
        if quota is not None and period:
            cores = min(cores, max(1, math.floor(quota / period)))
    return max(1, cores)


def cpu_model(root: Path = Path("/")) -> str:
    """The CPU's model name, or its architecture if the system does not report one."""
    for line in _text_or_empty(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Instruction-set flags, such as avx512_bf16; empty if the system does not report any."""
    for line in _text_or_empty(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def default_flops(cores: int, flags: frozenset[str]) -> dict[str, float]:
    """FLOP/s of ``cores`` cores by dtype, set low. fp16 and fp8 are emulated, so they are not listed."""
    core = next((rate for flag, rate in _FLOPS_PER_CORE if flag in flags), _LEAST_FLOPS_PER_CORE)
    wide = next((factor for flag, factor in _BF16_OVER_FP32 if flag in flags), _EMULATED)
    return {"fp64": cores * core / 2, "fp32": cores * core, "bf16": cores * core * wide}


def torch_version() -> str:
    """Version of the installed torch, without an import of it; "" if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def threads_of(processes: int) -> int:
    """Threads of one of ``processes`` processes that the launcher starts."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else max(1, usable_cores() // processes)


def read_calibration(path: Path | None = None) -> Calibration | None:
    """The calibration of this CPU, core count and torch; None if missing, malformed or of another machine."""
    try:
        calibration = checked((path or calibration_file()).read_bytes(), Calibration)
    except (OSError, ValidationError):
        return None
    rates = [*calibration.flops.values(), calibration.memory_bandwidth]
    rates += [rate for rate in (calibration.link_bandwidth, calibration.disk_bandwidth) if rate is not None]
    sound = "fp32" in calibration.flops and all(math.isfinite(rate) and rate > 0 for rate in rates)
    here = calibration.cpu_model == cpu_model() and calibration.cores == usable_cores()
    same = calibration.version == CALIBRATION_VERSION and calibration.torch in ("", torch_version())
    return calibration if sound and here and same else None


def write_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Write ``calibration`` atomically. Raises OSError."""
    path = path or calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text_of(calibration) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def cpu_profile(processes: int) -> DeviceProfile:
    """The profile of one of ``processes`` equal processes on this machine."""
    cores, measured = usable_cores(), read_calibration()
    flops = measured.flops if measured else default_flops(cores, cpu_flags())
    copy = measured.memory_bandwidth if measured else min(_MOST_BANDWIDTH, cores * _BANDWIDTH_PER_CORE)
    loopback = (measured.link_bandwidth if measured else None) or _LOOPBACK_BANDWIDTH
    profile = replace(
        _CPU,
        memory_bytes=max(0, usable_memory() // processes - _INTERPRETER),
        flops={dtype: rate / processes for dtype, rate in flops.items()},
        memory_bandwidth=copy / processes,
        host_bandwidth=copy / processes,
        host_memory_bytes=usable_memory() // processes,
        host_memory_bandwidth=copy / processes,
        disk_bandwidth=((measured.disk_bandwidth if measured else None) or _DISK_BANDWIDTH) / processes,
        link_bandwidth=loopback,
        network_bandwidth=_ETHERNET / processes,
        node_devices=processes,
        measured=measured.speeds_of(processes, threads_of(processes)) if measured else None,
        measured_on=measured.day if measured else "",
    )
    if measured is None:
        return profile
    from_file = f"measured here: {calibration_file()}"
    speeds = dict.fromkeys(
        ("flops", "memory_bandwidth", "host_bandwidth", "host_memory_bandwidth"), from_file
    )
    for name in ("link_bandwidth", "disk_bandwidth"):
        if getattr(measured, name):
            speeds[name] = from_file
    return replace(profile, source={**profile.source, **speeds})


_INTERPRETER = 256 * MiB
"""Resident size of Python 3.11 with torch 2.13 before a model is built: 220 MiB measured, plus a margin."""

_CPU = DeviceProfile(
    name="cpu",
    kind="cpu",
    memory_bytes=0,
    flops={},
    memory_bandwidth=0.0,
    link_bandwidth=0.0,
    network_bandwidth=0.0,
    host_bandwidth=0.0,
    host_memory_bytes=0,
    host_memory_bandwidth=0.0,
    disk_bandwidth=0.0,
    topology="switch",
    attention=("fused",),
    node_devices=1,
    latency=Latency(start=50e-6, hop=90e-6, network_hop=150e-6),
    # The CPU's figures are achieved speeds, not peaks.
    efficiency=Efficiency(matmul=1.0, memory=1.0, link=1.0, network=0.9, host=1.0),
    overhead=Overhead(context_bytes=0, communicator_bytes=MiB // 8, workspace_bytes=3 * MiB),
    reported=("cpu",),
    source={
        "memory_bytes": "cgroup limit or physical memory, divided by the processes, minus the interpreter",
        "flops": "assumed: a low figure per core by instruction set; `shardwise doctor --calibrate` measures",
        "memory_bandwidth": "assumed: 10 GB/s per core, at most 40 GB/s per machine",
        "host_bandwidth": "the memory bandwidth: host and device share one memory",
        "host_memory_bytes": "the device's memory: host and device share one memory",
        "host_memory_bandwidth": "the memory bandwidth: host and device share one memory",
        "link_bandwidth": "measured: gloo all-gather and reduce-scatter on 2 cores, 0.34 to 0.70 GB/s",
        "disk_bandwidth": "assumed: one drive of 1 GB/s, shared by the processes",
        "network_bandwidth": "assumed: 10 Gb/s Ethernet shared by the processes of a node",
        "latency": "measured: gloo all-reduce of one number, 0.17 to 0.28 ms for 2, 0.36 to 0.82 for 4",
        "launch": "assumed: 2 us for an operation; the host is the device",
        "efficiency.matmul": "1: flops is an achieved speed",
        "efficiency.attention": "1: flops is an achieved speed",
        "efficiency.memory": "1: memory_bandwidth is an achieved speed",
        "efficiency.link": "1: link_bandwidth is an achieved speed",
        "efficiency.network": "assumed",
        "efficiency.host": "1: host_bandwidth is an achieved speed",
        "overhead.context_bytes": "0: allocated before the model, and already subtracted from memory_bytes",
        "overhead.communicator_bytes": "measured: 3.4 MiB for the first gloo group, 0.1 MiB for each further one",
        "overhead.workspace_bytes": "measured: Python objects and MKL buffers, 2 to 4 MiB",
    },
)


def _cgroup_folders(root: Path, controller: str, v2_file: str, v1_file: str) -> list[tuple[Path, str]]:
    """Folders of this process's cgroup and its parents, with the name of the file that holds the limit."""
    base = root / "sys/fs/cgroup"
    folders: list[tuple[Path, str]] = []
    for line in _text_or_empty(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            folders += [(folder, v2_file) for folder in _upwards(base, path)]
        elif controller in controllers.split(","):
            folders += [(folder, v1_file) for folder in _upwards(base / controller, path)]
    return folders


def _memory_limits(root: Path) -> list[tuple[Path, str, int]]:
    """Cgroups that limit this process's memory: folder, name of the limit's file, bytes."""
    return [
        (folder, name, limit)
        for folder, name in _cgroup_folders(root, "memory", "memory.max", "memory.limit_in_bytes")
        if (limit := _read_int(folder / name)) is not None and limit < UNLIMITED
    ]


def _memory_stat(folder: Path, key: str) -> int:
    """A value of a cgroup's ``memory.stat``; 0 if missing."""
    for line in _text_or_empty(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


def _upwards(mount: Path, path: str) -> list[Path]:
    """``mount``/``path`` and its parents up to ``mount``; a container may hide the inner ones."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _cpu_quota(folder: Path, name: str) -> tuple[int | None, int | None]:
    """(quota, period) in microseconds; the quota is None without a limit."""
    if name == "cpu.max":
        words = _text_or_empty(folder / name).split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            return int(words[0]), int(words[1])
        return None, None
    quota = _read_int(folder / name)
    return (quota if quota and quota > 0 else None), _read_int(folder / "cpu.cfs_period_us")


def _read_int(path: Path) -> int | None:
    text = _text_or_empty(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
