"""What `cluster.device` calls the GPUs of this machine: a profile of the package, or a file written here.

A GPU without a profile is described from CUDA's figures: memory, multiprocessors and clocks. A multiprocessor of a
generation computes as many operations per clock as on the generation's profile. Efficiencies and overheads are that
profile's, too. Cards of one generation differ: the profile is a GeForce where there is one, whose rates are low. What
CUDA does not report is assumed low: peers are reached over PCIe and the host.

The file is a profile as a user writes it. It is in the folder of cached files, and each call writes it anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.errors import RecipeError
from shardwise.core.units import GiB, format_bytes
from shardwise.hardware.cluster import recognise, without_maker
from shardwise.hardware.measured_gpu import gpu_file
from shardwise.hardware.profiles import OWN, PROFILES
from shardwise.hardware.this_machine import cache_folder, cpu_profile, usable_memory


@dataclass(frozen=True)
class Generation:
    """A profile, and the clock in Hz at which its multiprocessors reach its FLOP/s."""

    like: str
    clock: float


# The clocks follow from the FLOP/s of the profiles: dense FLOPs per clock and multiprocessor are powers of two.
CUDA_GENERATIONS: Mapping[tuple[int, int], Generation] = {
    (7, 0): Generation("V100-32GB", 1.53e9),
    (7, 5): Generation("T4-16GB", 1.59e9),
    (8, 0): Generation("A100-40GB", 1.41e9),
    (8, 6): Generation("RTX3090-24GB", 1.695e9),
    (8, 9): Generation("RTX4090-24GB", 2.52e9),
    (9, 0): Generation("H100-80GB", 1.83e9),
    (10, 0): Generation("B200-180GB", 1.856e9),
    (10, 3): Generation("B300-288GB", 1.856e9),
    (12, 0): Generation("RTX5090-32GB", 2.407e9),
}
"""By compute capability. Later ones are taken for the last before them."""
ROCM_GENERATIONS: Mapping[str, Generation] = {
    "gfx942": Generation("MI300X-192GB", 2.1e9),
    "gfx950": Generation("MI355X-288GB", 2.4e9),
}
_PEERS = 10e9
"""Bytes/s from device to host to device (torch._inductor.comm_analysis)."""


@dataclass(frozen=True)
class ReportedGpu:
    """What the driver says of one GPU. A clock, in Hz, and the bandwidth are 0 where it does not say.

    Attributes:
        architecture: of ROCm, such as gfx942; "" for CUDA.
    """

    name: str
    memory_bytes: int
    units: int
    capability: tuple[int, int]
    architecture: str = ""
    clock: float = 0.0
    memory_bandwidth: float = 0.0


def reported_gpu(index: int = 0) -> ReportedGpu:
    """One GPU of this machine as CUDA or HIP reports it."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    rocm = (getattr(properties, "gcnArchName", "") if torch.version.hip else "").partition(":")[0]
    # Two transfers per clock. HIP's clock is not that of the bus.
    bits = 0 if rocm else 2 * getattr(properties, "memory_bus_width", 0)
    return ReportedGpu(
        properties.name,
        properties.total_memory,
        properties.multi_processor_count,
        (properties.major, properties.minor),
        rocm,
        1e3 * getattr(properties, "clock_rate", 0),
        bits / 8 * 1e3 * getattr(properties, "memory_clock_rate", 0),
    )


def device_here(index: int = 0) -> str:
    """The value of `cluster.device` for one GPU of this machine.

    Raises:
        RecipeError: nothing is known of its generation, or its file cannot be written.
    """
    import torch

    if (known := recognise(torch.cuda.get_device_properties(index).name)) is not None:
        return known.name
    gpu = reported_gpu(index)
    path = gpu_file(without_maker(gpu.name)).with_suffix(OWN)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    text = profile_toml(gpu, torch.cuda.device_count())
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as problem:
        why = problem.strerror or str(problem)
        fix = "set SHARDWISE_CACHE to a folder"
        raise RecipeError("this GPU cannot be described", where=str(path), why=why, fix=fix) from problem
    return str(path)


def profile_toml(gpu: ReportedGpu, count: int) -> str:
    """The profile of a GPU as TOML, for nodes of ``count`` such GPUs. Raises RecipeError for an unknown generation."""
    generation = _generation(gpu)
    like = PROFILES[generation.like]
    clock = gpu.clock or generation.clock
    share = gpu.units * clock / (like.tiles.units * generation.clock)
    at = f"{clock / 1e9:.2f} GHz{'' if gpu.clock else ' (assumed)'}"
    nominal = f"nominal: CUDA reports {gpu.units} multiprocessors at {at}, each as fast as on {like.name}"
    memory = "what CUDA reports: bus and clock of the memory"
    if not gpu.memory_bandwidth:
        memory = f"assumed: {like.name}'s for each of its multiprocessors"
    bandwidth = gpu.memory_bandwidth or like.memory_bandwidth * gpu.units / like.tiles.units
    host = cpu_profile(1)
    tables: Mapping[str, tuple[Mapping[str, float], str]] = {
        "memory": ({"gib": gpu.memory_bytes / GiB}, "what CUDA reports"),
        "flops": (
            {f"{dtype}_tera_per_s": share * rate / 1e12 for dtype, rate in like.flops.items()},
            nominal,
        ),
        "memory_bandwidth": ({"gb_per_s": bandwidth / 1e9}, memory),
        "link_bandwidth": ({"gb_per_s": like.host_bandwidth / 1e9}, "assumed: PCIe"),
        "host_memory": ({"gib_per_node": usable_memory() / GiB}, "the memory of this machine"),
        "host_memory_bandwidth": (
            {"gb_per_s_per_node": host.memory_bandwidth / 1e9},
            host.source["memory_bandwidth"],
        ),
        "tiles": ({"units": gpu.units, "inner": like.tiles.inner}, f"units: CUDA; inner: as on {like.name}"),
        "efficiency.link": (
            {"fraction": min(1.0, _PEERS / like.host_bandwidth)},
            "assumed: device to host to device",
        ),
    }
    head = [
        f"# {gpu.name}, {format_bytes(gpu.memory_bytes)}: written anew from CUDA's figures. To change it,",
        "# copy it, and name the copy in cluster.device.",
        "",
        f'like = "{like.name}"',
        'topology = "host"',
        f"node_devices = {count}",
        f"reported = [{json.dumps(without_maker(gpu.name))}]",
    ]
    for name, (numbers, source) in tables.items():
        head += ["", f"[{name}]", *(f"{key} = {value:.6g}" for key, value in numbers.items())]
        head.append(f"source = {json.dumps(source)}")
    return "\n".join(head) + "\n"


def _generation(gpu: ReportedGpu) -> Generation:
    if gpu.architecture:
        generation = ROCM_GENERATIONS.get(gpu.architecture)
    else:
        earlier = (capability for capability in CUDA_GENERATIONS if capability <= gpu.capability)
        generation = CUDA_GENERATIONS.get(max(earlier, default=(0, 0)))
    if generation is None:
        name = gpu.architecture or ".".join(map(str, gpu.capability))
        raise RecipeError(
            f"there is no profile of {gpu.name}",
            where="cluster.device",
            why=f"nor of its generation, {name}",
            fix="write its profile: docs/how-to/plan-for-your-own-card.md",
        )
    return generation
