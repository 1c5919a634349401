"""Checks whether this machine is fit for training: facts, measured speeds, verdicts and advice.

A check reads facts and speeds and returns one of four verdicts: good, note (worth knowing), warn (works, but not well)
or bad (does not work). One bad check makes the machine unhealthy: exit code 7. Checks are functions of plain data, so
each is tested for machines that are not at hand.

plugins/calibration/store.py keeps measured speeds for plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.core.errors import ResourceError
from shardwise.core.extras import install
from shardwise.core.units import GiB, MiB, format_bytes, format_percent, format_rate, format_seconds
from shardwise.hardware.kinds import kind_of
from shardwise.hardware.measured_gpu import with_measured
from shardwise.hardware.profiles import OWN, PROFILES
from shardwise.plugins.doctor.inspection import OPTIONAL_PACKAGES, Facts, HostAllocator, inspect

SUPPORTED_PYTHON = (3, 11)
SUPPORTED_TORCH = ((2, 11), (2, 16))
"""Lower and upper bound of the torch version in pyproject.toml."""

LEAST_MEMORY = 1 * GiB
LEAST_DISK = 1 * GiB
LEAST_SHARED = 256 * MiB
HUGE_PAGES_SINCE = (2, 35)
"""glibc's tunable glibc.malloc.hugetlb, which the launcher sets for ranks."""
BUSY = 0.5
"""Above this load for each core, others take part of the speeds that are measured."""

SLOW = 0.6
"""Below this fraction of its profile's speed, a device is throttled, shared or misconfigured."""


@dataclass(frozen=True)
class Check:
    """One check. ``verdict`` is good | note | warn | bad; ``advice`` is empty if good."""

    name: str
    verdict: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class DeviceSpeed:
    """FLOP/s by dtype, bytes/s.

    ``wrong`` lists dtypes whose product did not agree with fp64. ``problem`` is the last error of a product, or empty.
    """

    device: str
    flops: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    memory_bandwidth: float = 0.0
    to_device: float | None = None
    to_host: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Speeds:
    """Measured speeds. ``link`` is (bytes/s, seconds) of gloo between two local processes, if requested.

    ``link_problem`` is the error of that measurement, or empty.
    """

    devices: tuple[DeviceSpeed, ...] = ()
    link: tuple[float, float] | None = None
    link_problem: str = ""


@dataclass(frozen=True)
class Diagnosis:
    facts: Facts
    speeds: Speeds
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        return all(check.verdict != "bad" for check in self.checks)

    @property
    def exit_code(self) -> int:
        return 0 if self.healthy else ResourceError.exit_code

    def error(self) -> ResourceError | None:
        """The first bad check as the error that ends the command; None when healthy."""
        bad = next((check for check in self.checks if check.verdict == "bad"), None)
        if bad is None:
            return None
        what = "this machine is not fit to train on"
        return ResourceError(what, where=bad.name, why=bad.found, fix=bad.advice)

    def data(self) -> dict[str, Any]:
        """For JSON: healthy, checks, facts, speeds."""
        speeds = {
            "devices": [vars(device) | {"flops": dict(device.flops)} for device in self.speeds.devices],
            "link": None
            if self.speeds.link is None
            else dict(zip(("bandwidth", "latency"), self.speeds.link, strict=True)),
            "link_problem": self.speeds.link_problem,
        }
        return {
            "healthy": self.healthy,
            "checks": [vars(check) for check in self.checks],
            "facts": self.facts.data(),
            "speeds": speeds,
        }


def examine(folder: Path, *, measure: bool = True, link: bool = False) -> Diagnosis:
    """Inspect this machine, measure its devices (a few seconds each), and run all checks.

    ``folder`` is the output folder of a run. ``link`` starts two processes and measures gloo between them.
    """
    facts = inspect(folder)
    speeds = _measure_speeds(facts, link) if measure and not facts.torch.error else Speeds()
    return Diagnosis(facts, speeds, tuple(all_checks(facts, speeds)))


def all_checks(facts: Facts, speeds: Speeds) -> Iterator[Check]:
    """All checks, in the order of the table."""
    yield from _judge_software(facts)
    yield from _judge_memory(facts)
    yield from _judge_allocator(facts)
    if facts.load > BUSY:
        advice = "measured speeds and a calibration come out too low: end other programs, and repeat"
        yield Check("load", "warn", f"{facts.load:.1f} processes for each core, before this one", advice)
    yield from _judge_communication(facts, speeds)
    yield from _judge_devices(facts)
    for speed in speeds.devices:
        yield from _judge_speed(facts, speed)


def _judge_software(facts: Facts) -> Iterator[Check]:
    python = _version(facts.python)
    if python < SUPPORTED_PYTHON:
        yield Check("python", "bad", facts.python, "use Python 3.11 or newer")
    else:
        yield Check("python", "good", facts.python)
    low, high = (".".join(map(str, version)) for version in SUPPORTED_TORCH)
    torch = facts.torch
    advice = f'pip install "torch>={low},<{high}"'
    if torch.error:
        yield Check("torch", "bad", torch.error, advice)
    elif not SUPPORTED_TORCH[0] <= _version(torch.version or "") < SUPPORTED_TORCH[1]:
        yield Check("torch", "bad", f"{torch.version}, supported is {low} to below {high}", advice)
    else:
        build = f"ROCm {torch.rocm}" if torch.rocm else "CPU build"
        if torch.cuda:
            build = f"CUDA {torch.cuda}"
        yield Check("torch", "good", f"{torch.version} ({build})")
    missing = [name for name in ("transformers", "datasets") if facts.packages.get(name) is None]
    if missing:
        adds = ", ".join(OPTIONAL_PACKAGES[name] for name in missing)
        yield Check("packages", "note", f"{', '.join(missing)} not installed: {adds}", install("hf"))


def _judge_memory(facts: Facts) -> Iterator[Check]:
    memory = facts.memory
    disk = facts.disk
    available = "unknown" if memory.available is None else format_bytes(memory.available)
    finding = f"{available} available of {format_bytes(memory.total)}"
    if memory.limit is not None and memory.limit < memory.total:
        finding += f", cgroup limit {format_bytes(memory.limit)}"
    if memory.available is None:
        yield Check("memory", "warn", finding, f"free memory cannot be read: {memory.problem}")
    elif memory.available < LEAST_MEMORY:
        yield Check("memory", "bad", finding, "end other programs, or raise the container's limit")
    else:
        yield Check("memory", "good", finding)
    if memory.swap_used is not None and memory.swap_used > memory.total // 20:
        finding = f"{format_bytes(memory.swap_used)} in use"
        yield Check("swap", "warn", finding, "a run that swaps crawls: free memory first")
    if memory.shared is not None and memory.shared < LEAST_SHARED:
        finding = f"{format_bytes(memory.shared)} free in /dev/shm"
        yield Check("shared memory", "warn", finding, "NCCL needs more: docker run --shm-size=1g")
    for name, folder, free in (
        ("disk", disk.folder, disk.free),
        ("cache disk", disk.cache_folder, disk.cache_free),
    ):
        if free is None:
            yield Check(name, "warn", f"unknown free space at {folder}", f"it cannot be read: {disk.problem}")
            continue
        finding = f"{format_bytes(free)} free at {folder}"
        if free < LEAST_DISK:
            yield Check(name, "bad", finding, "free space")
        else:
            yield Check(name, "good", finding)
    measuring = facts.measuring
    if not measuring.high_water_mark:
        advice = "measured peaks will be upper bounds: allow writing /proc/self/clear_refs"
        yield Check("memory measurement", "warn", "the high-water mark cannot be reset", advice)
    elif measuring.huge_pages == "always":
        advice = (
            "measured peaks come out too high: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
        yield Check("memory measurement", "warn", "transparent huge pages are always on", advice)
    else:
        yield Check("memory measurement", "good", f"exact (huge pages: {measuring.huge_pages or 'none'})")


def _judge_allocator(facts: Facts) -> Iterator[Check]:
    """Training on a CPU spends a part of each step on page faults; huge pages take 15 times fewer."""
    allocator = facts.allocator
    pages = facts.measuring.huge_pages
    if allocator.preloaded:
        advice = (
            "it keeps freed memory: measured peaks come out too high; unset LD_PRELOAD to compare with plans"
        )
        yield Check("host allocator", "note", f"{allocator.preloaded} (LD_PRELOAD)", advice)
    elif not _has_huge_pages(allocator) or pages not in ("madvise", "always"):
        why = f"{allocator.library or 'unknown'} {allocator.version}, huge pages: {pages or 'none'}"
        since = ".".join(map(str, HUGE_PAGES_SINCE))
        advice = f"steps on this CPU have more page faults than with glibc {since} and huge pages on madvise"
        yield Check("host allocator", "note", why, advice)
    else:
        yield Check("host allocator", "good", f"glibc {allocator.version}, with huge pages for large blocks")


def _has_huge_pages(allocator: HostAllocator) -> bool:
    return allocator.library == "glibc" and _version(allocator.version) >= HUGE_PAGES_SINCE


def _judge_communication(facts: Facts, speeds: Speeds) -> Iterator[Check]:
    torch = facts.torch
    network = facts.network
    if torch.error:
        return
    if not (torch.distributed and torch.gloo):
        yield Check("gloo", "bad", "this build of torch lacks it", "install torch from pytorch.org or PyPI")
    elif speeds.link_problem:
        yield Check("gloo", "bad", speeds.link_problem, "check the firewall on the loopback interface")
    elif speeds.link is not None:
        bandwidth, latency = speeds.link
        finding = f"{format_rate(bandwidth, 'B')}, {format_seconds(latency)} between two processes"
        yield Check("gloo", "good", finding)
    else:
        yield Check("gloo", "good", "available")
    if len(torch.devices) > 1 and not torch.nccl:
        yield Check(
            "nccl", "bad", f"missing, with {len(torch.devices)} GPUs", "install a torch build with NCCL"
        )
    if network.loopback:
        yield Check("loopback", "bad", network.loopback, "processes here cannot connect: bring up 127.0.0.1")
    elif network.hostname:
        advice = "add the host name to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        yield Check("host name", "warn", f"not reachable: {network.hostname}", advice)
    else:
        yield Check("loopback", "good", "reachable")


def _judge_devices(facts: Facts) -> Iterator[Check]:
    torch = facts.torch
    if facts.calibrated:
        yield Check("cpu profile", "good", "plans use speeds measured here")
    else:
        finding = "not measured: the first plan for this machine measures some shapes"
        hidden = 'CUDA_VISIBLE_DEVICES="" ' if torch.devices else ""  # GPUs are measured where there are some
        yield Check("cpu profile", "note", finding, f"{hidden}shardwise doctor --calibrate measures all")
    if not torch.devices and facts.driver and not torch.error:
        advice = "check the driver" if torch.cuda or torch.rocm else "install a torch build for the GPU"
        yield Check("gpu", "warn", "the system has one, torch sees none", advice)
    for device in torch.devices:
        name = f"gpu {device.index}"
        finding = f"{device.name}, {format_bytes(device.memory_bytes)}, capability {device.capability}"
        if device.free_bytes < 0.9 * device.memory_bytes:
            used = format_bytes(device.memory_bytes - device.free_bytes)
            yield Check(name, "warn", f"{finding}, {used} in use", "end what else runs on it")
        elif device.profile is None:
            gib = device.memory_bytes / GiB
            advice = f"not in the table: plan with a similar device and cluster.memory_gib={gib:.2f}"
            yield Check(name, "note", finding, advice)
        elif device.profile.endswith(OWN):
            advice = f"cluster.device: {device.profile} has what CUDA reports of it, and assumptions"
            yield Check(name, "note", f"{finding}, no profile", advice)
        else:
            profile = with_measured(PROFILES[device.profile])
            measured = "measured" if profile.measured and profile.measured.attention_order else "not measured"
            order = f"attention {', '.join(profile.attention)} ({measured})"
            yield Check(name, "good", f"{finding}, profile {device.profile}, {order}")


def _judge_speed(facts: Facts, speed: DeviceSpeed) -> Iterator[Check]:
    name = f"{speed.device} speed"
    rates = [f"{dtype} {format_rate(rate, 'FLOP')}" for dtype, rate in speed.flops.items()]
    if speed.memory_bandwidth:
        rates.append(f"copy {format_rate(speed.memory_bandwidth, 'B')}")
    if speed.to_device and speed.to_host:
        rates.append(f"host to device {format_rate(speed.to_device, 'B')}")
        rates.append(f"back {format_rate(speed.to_host, 'B')}")
    finding = ", ".join(rates)
    if not speed.flops:
        advice = "install a torch build with kernels for it, or end what else fills its memory"
        yield Check(name, "bad", speed.problem or "no matrix product could be made", advice)
    elif speed.wrong:
        advice = "do not train on it: overclocked, overheated or broken"
        yield Check(name, "bad", f"wrong products in {', '.join(speed.wrong)}", advice)
    elif slow := _shortfall(facts, speed):
        yield Check(name, "warn", finding, f"{slow}: throttled, shared or power-capped")
    else:
        yield Check(name, "good", finding)


def _shortfall(facts: Facts, speed: DeviceSpeed) -> str:
    """Speeds below SLOW times the profile's value, in words; empty if there are none, or no profile."""
    names = {f"gpu {device.index}": device.profile for device in facts.torch.devices}
    profile = PROFILES.get(names.get(speed.device) or "")
    if profile is None:
        return ""
    promised = {dtype: profile.flops[dtype] * profile.efficiency.matmul for dtype in profile.flops}
    ratios = {dtype: rate / promised[dtype] for dtype, rate in speed.flops.items() if dtype in promised}
    ratios["copy"] = speed.memory_bandwidth / (profile.memory_bandwidth * profile.efficiency.memory)
    slowest = min(ratios, key=lambda name: ratios[name])
    return f"{slowest} is {format_percent(ratios[slowest])} of the usual" if ratios[slowest] < SLOW else ""


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print the machine in one line and the checks as a table."""
    facts = diagnosis.facts
    console.print(
        f"{escape(facts.processor.model)}, {facts.processor.cores} cores, {facts.system}", highlight=False
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    colours = {"good": "green", "note": "cyan", "warn": "yellow", "bad": "red"}
    for check in diagnosis.checks:
        text = escape(check.found) + (f"\n[dim]{escape(check.advice)}[/dim]" if check.advice else "")
        table.add_row(f"[{colours[check.verdict]}]{check.verdict}[/]", escape(check.name), text)
    console.print(table)


def _version(text: str) -> tuple[int, ...]:
    """(2, 13) from `2.13.0+cpu`; () from an invalid version, which is below every version."""
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _measure_speeds(facts: Facts, link: bool) -> Speeds:
    import torch

    from shardwise.plugins.doctor import speed

    threads = torch.get_num_threads()
    torch.set_num_threads(facts.processor.cores)
    try:
        devices = [_measure_device("cpu", torch.device("cpu"))]
        devices += [
            _measure_device(f"gpu {device.index}", torch.device("cuda", device.index))
            for device in facts.torch.devices
        ]
    finally:
        torch.set_num_threads(threads)
    if not (link and facts.torch.gloo):
        return Speeds(tuple(devices))
    try:
        measured = speed.link_speed()
    except RuntimeError as problem:
        return Speeds(tuple(devices), link_problem=str(problem))
    return Speeds(tuple(devices), (measured.bandwidth, measured.latency))


def _measure_device(name: str, device: Any) -> DeviceSpeed:
    from shardwise.plugins.doctor import speed

    flops: dict[str, float] = {}
    wrong: list[str] = []
    to_device: float | None = None
    to_host: float | None = None
    problem = ""
    for word, dtype in speed.DTYPES.items():
        try:
            product = speed.matrix_product(device, dtype)
        except RuntimeError as error:  # unsupported dtype, or out of memory: no figure
            # CUDA adds lines of advice after the first line.
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
            continue
        flops[word] = product.flops
        if not product.correct:
            wrong.append(word)
    try:
        bandwidth = speed.copy_bandwidth(device)
        if not kind_of(device).is_host:
            to_device, to_host = speed.host_bandwidths(device)
    except RuntimeError:  # no memory for the copies: none of the three is shown
        bandwidth = 0.0
    return DeviceSpeed(name, flops, tuple(wrong), bandwidth, to_device, to_host, problem)
