"""Facts about this machine: processor, memory, disk, torch, devices, network.

Functions import torch when they need it, because a broken torch installation is one of the faults to report. Every fact
is plain data, so `doctor --json` prints it directly. Facts come from the operating system and from small trials (a
loopback connection, resetting the memory high-water mark). `nvidia-smi`, `lspci` and `dmidecode` are not parsed, so
driver faults that torch does not see are not reported.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from shardwise.core.errors import RecipeError
from shardwise.core.units import MiB
from shardwise.hardware import this_machine as machine
from shardwise.hardware.this_gpu import device_here

OPTIONAL_PACKAGES: Mapping[str, str] = {
    "transformers": "Hugging Face models",
    "tokenizers": "Hugging Face tokenizers",
    "datasets": "Hugging Face datasets",
    "pyarrow": "parquet files",
    "torchao": "fp8, low-bit optimizers and weights",
    "triton": "torch.compile on GPUs",
    "flash-attn": "FlashAttention outside PyTorch's own",
}
"""Optional distribution -> its purpose."""

_NOTED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True)
class Processor:
    model: str
    cores: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class MachineMemory:
    """Bytes. ``limit``: the cgroup's limit; ``usable``: within it; ``available``: usable and free.

    ``shared``: free in /dev/shm. ``problem`` is why ``available`` and swap are unknown, or empty.
    """

    total: int
    available: int | None
    limit: int | None
    usable: int
    swap_total: int | None
    swap_used: int | None
    shared: int | None
    problem: str = ""


@dataclass(frozen=True)
class Disk:
    """Free bytes in the output folder and in the cache folder. ``problem`` is why one of them is unknown, or empty."""

    folder: str
    free: int | None
    cache_folder: str
    cache_free: int | None
    problem: str = ""


@dataclass(frozen=True)
class Device:
    """One GPU. Bytes are the driver's; ``profile`` is its name in ``cluster.device``, or None."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    capability: str
    profile: str | None


@dataclass(frozen=True)
class Torch:
    """``error`` is the error of importing torch, or empty."""

    version: str | None
    error: str
    cuda: str | None = None
    rocm: str | None = None
    threads: int = 0
    distributed: bool = False
    gloo: bool = False
    nccl: bool = False
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Network:
    """``loopback`` and ``hostname`` are the errors of a connection to each, or empty."""

    loopback: str
    hostname: str


@dataclass(frozen=True)
class Measuring:
    """Whether memory peaks can be measured exactly: the mark can be reset, huge pages are not forced."""

    high_water_mark: bool
    huge_pages: str | None


@dataclass(frozen=True)
class HostAllocator:
    """The C library of this process, with its version, and an allocator that LD_PRELOAD puts before it, or empty."""

    library: str
    version: str
    preloaded: str


@dataclass(frozen=True)
class Facts:
    """All facts.

    ``driver``: the system has an NVIDIA or AMD compute device, for any build of torch.
    ``calibrated``: plans for this processor use measured speeds.
    ``load``: processes that ran or waited in the last minute, per core of the machine, before anything is measured.
    """

    python: str
    system: str
    processor: Processor
    memory: MachineMemory
    disk: Disk
    torch: Torch
    network: Network
    measuring: Measuring
    allocator: HostAllocator
    driver: bool
    calibrated: bool
    packages: Mapping[str, str | None] = field(default_factory=dict)
    load: float = 0.0

    def data(self) -> dict[str, Any]:
        """Nested dicts and lists for JSON."""
        return asdict(self)


def inspect(folder: Path) -> Facts:
    """Facts about this machine; ``folder`` is the output folder of a run. Importing torch takes seconds."""
    flags = machine.cpu_flags()
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=Processor(
            machine.cpu_model(), machine.usable_cores(), tuple(flag for flag in _NOTED_FLAGS if flag in flags)
        ),
        memory=_memory(),
        disk=_disk(folder),
        torch=_torch(),
        network=Network(loopback_problem("127.0.0.1"), loopback_problem(socket.gethostname())),
        measuring=Measuring(can_lower_high_water_mark(), huge_pages()),
        allocator=host_allocator(os.environ),
        driver=driver_present(),
        calibrated=machine.read_calibration() is not None,
        packages={name: _installed(name) for name in OPTIONAL_PACKAGES},
        load=_load(),
    )


def _load() -> float:
    """Processes that ran or waited in the last minute, per core; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def loopback_problem(host: str, timeout: float = 2.0) -> str:
    """The error of a local connection through ``host``, or empty."""
    try:
        with socket.socket() as listener:
            listener.settimeout(timeout)
            listener.bind((host, 0))
            listener.listen(1)
            answer = threading.Thread(target=_accept_once, args=(listener,), daemon=True)
            answer.start()
            with socket.create_connection(listener.getsockname(), timeout) as client:
                client.settimeout(timeout)
                received = client.recv(1)
            answer.join(timeout)
        return "" if received == b"." else "connected, but nothing came through"
    except (OSError, UnicodeError) as problem:
        return str(problem) or type(problem).__name__


def _accept_once(listener: socket.socket) -> None:
    try:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b".")
    except OSError:
        return


def can_lower_high_water_mark(proc: Path = Path("/proc/self")) -> bool:
    """Whether the process's high-water mark (VmHWM) can be reset. If not, a measured peak is only an upper bound."""
    # Allocated and freed, so that the mark is above the level, and a reset must lower it.
    block = b"x" * (64 * MiB)
    del block
    before = _high_water_mark(proc)
    try:
        (proc / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    after = _high_water_mark(proc)
    return before is not None and after is not None and after < before


def huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str | None:
    """The mode of transparent huge pages: always | madvise | never; None without support."""
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def host_allocator(environment: Mapping[str, str]) -> HostAllocator:
    """The allocator of host memory that ranks inherit from ``environment``."""
    preloaded = re.split(r"[ :]+", environment.get("LD_PRELOAD", ""))
    names = [Path(path).name for path in preloaded if "malloc" in Path(path).name]
    return HostAllocator(*platform.libc_ver(), names[0] if names else "")


def _high_water_mark(proc: Path) -> int | None:
    try:
        status = (proc / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) if lines else None


def _memory(root: Path = Path("/")) -> MachineMemory:
    limit = machine.memory_limit(root)
    usable = machine.usable_memory(root)
    left = machine.memory_left(root)
    shared = None
    if Path("/dev/shm").is_dir():
        shared, _ = _free(Path("/dev/shm"))
    total = machine.physical_memory()
    try:
        present = psutil.virtual_memory()
        swap = psutil.swap_memory()
    except (OSError, KeyError, ValueError) as error:  # /proc/meminfo is missing, or has other lines
        return MachineMemory(
            total, None, limit, usable, None, None, shared, str(error) or type(error).__name__
        )
    # All processes of a container share its limit, so the system may have more free memory than the container.
    available = min(int(present.available), usable if left is None else left)
    return MachineMemory(total, available, limit, usable, int(swap.total), int(swap.used), shared)


def _disk(folder: Path) -> Disk:
    cache = machine.cache_folder()
    (free, problem), (cache_free, cache_problem) = _free(folder), _free(cache)
    return Disk(str(folder), free, str(cache), cache_free, problem or cache_problem)


def _free(folder: Path) -> tuple[int | None, str]:
    """Free bytes on the disk of ``folder``, or of its nearest existing parent; None and the error where unknown."""
    absolute = folder.absolute()
    try:
        existing = next(path for path in (absolute, *absolute.parents) if path.exists())
        return shutil.disk_usage(existing).free, ""
    except OSError as error:
        return None, str(error)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # damaged metadata raises anything
        return "of an unknown version"


def _torch() -> Torch:
    try:
        import torch
        import torch.distributed as dist
    except Exception as problem:  # a broken installation raises anything
        return Torch(_installed("torch"), f"{type(problem).__name__}: {problem}".splitlines()[0])
    available = dist.is_available()
    return Torch(
        version=str(torch.__version__),
        error="",
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        threads=torch.get_num_threads(),
        distributed=available,
        gloo=available and dist.is_gloo_available(),
        nccl=available and dist.is_nccl_available(),
        devices=tuple(_inspected_gpu(index) for index in range(torch.cuda.device_count())),
    )


def _inspected_gpu(index: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    try:
        profile = device_here(index)
    except RecipeError:
        profile = None
    return Device(
        index=index,
        name=properties.name,
        memory_bytes=total,
        free_bytes=free,
        capability=f"{properties.major}.{properties.minor}",
        profile=profile,
    )


def driver_present() -> bool:
    """Whether the system has an NVIDIA or AMD compute device, for any build of torch."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd"))
