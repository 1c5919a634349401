"""Accelerators as data, each figure with its source. No torch. The conventions are those of `core/device.py`.

Chosen: our own table. Refused: PyTorch's (`torch._inductor.analysis.device_info` gives the L4 eleven times
its memory bandwidth and omits most boards here; `torch.utils._runtime_estimation` assumes 150 % of peak).
The price is upkeep: a new board is one entry here, and a test refuses a figure without a source.

Where several reports of a figure differ, the lowest is kept. Figures without a public source say "assumed".
A machine at hand is always better: `shardwise doctor`.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.core.device import DeviceProfile, Efficiency, Latency, Overhead
from shardwise.core.units import GiB, MiB

TERA, GIGA = 1e12, 1e9

_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
)
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100 = "https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306 (dense: half of what it shows)"
_H200 = (
    "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
    " (dense: half of what it shows)"
)
_B200 = "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703 (HGX B200, 1000 W; dense)"
_L4 = (
    "https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet (dense: half of what it shows)"
)
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (appendix A)"
_MI300X = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/"
    "amd-instinct-mi300x-data-sheet.pdf"
)
_XGMI = (
    "https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi/README.html"
    " (7 links of 64 GB/s, 48 GB/s of each usable)"
)
_TOPO = "https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h"
_TUNING = "https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc (low-latency protocol)"
_MAMF = "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-flops"
_GEMMS = "https://github.com/mag-/gpu_benchmark (largest measured product over the datasheet's figure)"
_COPY = "https://github.com/calculon-ai/calculon/blob/main/systems/a100_80g.json (0.90 from 100 MB up)"
_NET = "https://github.com/calculon-ai/calculon/blob/main/systems/a100_80g.json (network tier)"
_PCIE_USE = "https://github.com/aliyun/SimAI (CalBusBw: PCIe at 0.8 of nominal)"
_CONTEXT = "https://github.com/pytorch/pytorch/issues/107667 (about 300 MB bare; kernels load on top of it)"
_NCCL_A = "https://github.com/NVIDIA/nccl/issues/964 (544 MB for 2 and 688 MB for 3 or 4 A100)"
_NCCL_H = "https://github.com/NVIDIA/nccl/issues/1685 (1.06 GB on 8 H100 before all-to-all)"
_CUBLAS = (
    "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CublasHandlePool.cpp"
    " (8.125 MiB, 32 MiB from Hopper on, 128 MiB on MI300X; times two threads)"
)
_MI300X_USE = "https://aiweekly.co/alerts/amd-mi300x-hits-only-45-of-peak-flops-in-practice"
_TOTAL = "total capacity in out-of-memory messages of PyTorch"

_NVLINK_LATENCY = Latency(start=6.6e-6, hop=0.6e-6, network_hop=2.7e-6)
_PCIE_LATENCY = Latency(start=6.6e-6, hop=1.0e-6, network_hop=2.7e-6)
_WORKSPACE = 2 * (2 * 4 * MiB + 8 * 16 * 1024)
_WORKSPACE_HOPPER = 2 * 32 * MiB


def _nvlink(
    name: str,
    *,
    memory_gib: float,
    flops: Mapping[str, float],
    memory_bandwidth: float,
    link: tuple[float, float, str],
    network: tuple[float, str],
    host: float,
    node: tuple[int, float, str],
    matmul: tuple[float, str],
    memory: tuple[float, str],
    overhead: tuple[Overhead, str],
    reported: str,
    sheet: str,
    source: Mapping[str, str] | None = None,
) -> DeviceProfile:
    """Eight boards that meet in NVLink switches; ``link``: (peak, fraction, why), ``node``: (GiB, bytes/s, why)."""
    return DeviceProfile(
        name=name,
        kind="cuda",
        memory_bytes=int(memory_gib * GiB),
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        link_bandwidth=link[0],
        network_bandwidth=network[0],
        host_bandwidth=host,
        host_memory_bytes=node[0] * GiB // 8,
        host_memory_bandwidth=node[1] / 8,
        topology="switch",
        node_devices=8,
        latency=_NVLINK_LATENCY,
        efficiency=Efficiency(matmul=matmul[0], memory=memory[0], link=link[1], network=0.90, host=0.80),
        overhead=overhead[0],
        reported=(reported,),
        source={
            "memory_bytes": f"{_TOTAL}: {memory_gib} GiB",
            "flops": sheet,
            "memory_bandwidth": sheet,
            "link_bandwidth": f"{sheet}: NVLink",
            "network_bandwidth": network[1],
            "host_bandwidth": f"{sheet}: PCIe",
            **dict.fromkeys(("host_memory_bytes", "host_memory_bandwidth"), node[2]),
            "latency": _TUNING,
            "efficiency.matmul": matmul[1],
            "efficiency.memory": memory[1],
            "efficiency.link": f"{_TOPO}: {link[2]}",
            "efficiency.network": _NET,
            "efficiency.host": _PCIE_USE,
            "overhead.context_bytes": _CONTEXT,
            "overhead.communicator_bytes": overhead[1],
            "overhead.workspace_bytes": _CUBLAS,
            **(source or {}),
        },
    )


def _v100(memory_gb: int, driver_gib: float) -> DeviceProfile:
    return _nvlink(
        f"V100-{memory_gb}GB",
        memory_gib=driver_gib,
        flops={"fp64": 7.8 * TERA, "fp32": 15.7 * TERA, "fp16": 125 * TERA},
        memory_bandwidth=900 * GIGA,
        link=(150 * GIGA, 0.80, "SM70, 20 GB/s of 25 a link"),
        network=(6.25 * GIGA, "DGX-1V: 4 x 100 Gb/s for 8 devices"),
        host=15.75 * GIGA,
        node=(512, 153.6 * GIGA, "DGX-1V: 512 GB, two processors of four DDR4-2400 channels"),
        matmul=(0.75, f"{_GEMMS}: 94.0 of 125"),
        memory=(0.90, _COPY),
        overhead=(Overhead(GiB // 2, 600 * MiB, _WORKSPACE), f"assumed as on A100: {_NCCL_A}"),
        reported=f"v100-sxm2-{memory_gb}gb",
        sheet=_V100,
    )


def _a100(memory_gb: int, driver_gib: float, memory_bandwidth: float) -> DeviceProfile:
    wide = 312 * TERA
    return _nvlink(
        f"A100-{memory_gb}GB",
        memory_gib=driver_gib,
        flops={"fp64": 19.5 * TERA, "fp32": 19.5 * TERA, "tf32": wide / 2, "fp16": wide, "bf16": wide},
        memory_bandwidth=memory_bandwidth,
        link=(300 * GIGA, 0.80, "SM80, 20 GB/s of 25 a link"),
        network=(25 * GIGA, "DGX A100: a 200 Gb/s adapter for each device"),
        host=31.5 * GIGA,
        node=(1024 * (memory_gb // 40), 409.6 * GIGA, "DGX A100: 1 or 2 TB, two of eight DDR4-3200 channels"),
        matmul=(0.86, f"{_MAMF}: 267.9 of 312"),
        memory=(0.90, _COPY),
        overhead=(Overhead(GiB // 2, 600 * MiB, _WORKSPACE), _NCCL_A),
        reported=f"a100-sxm4-{memory_gb}gb",
        sheet=_A100,
    )


_HOPPER_FLOPS = {
    "fp64": 67 * TERA,
    "fp32": 67 * TERA,
    "tf32": 494.5 * TERA,
    "fp16": 989 * TERA,
    "bf16": 989 * TERA,
    "fp8": 1979 * TERA,
}

_H100_80 = _nvlink(
    "H100-80GB",
    memory_gib=79.10,
    flops=_HOPPER_FLOPS,
    memory_bandwidth=3350 * GIGA,
    link=(450 * GIGA, 0.82, "SM90, 20.6 GB/s of 25 a link"),
    network=(50 * GIGA, "DGX H100: a 400 Gb/s adapter for each device"),
    host=63 * GIGA,
    node=(2048, 614.4 * GIGA, "DGX H100: 2 TB, two processors of eight DDR5-4800 channels"),
    matmul=(0.80, f"{_MAMF}: 792.1 of 989"),
    memory=(0.90, _COPY),
    overhead=(Overhead(600 * MiB, GiB, _WORKSPACE_HOPPER), _NCCL_H),
    reported="h100 80gb hbm3",
    sheet=_H100,
)

_H200_141 = _nvlink(
    "H200-141GB",
    memory_gib=139.72,
    flops=_HOPPER_FLOPS,
    memory_bandwidth=4800 * GIGA,
    link=(450 * GIGA, 0.82, "SM90, 20.6 GB/s of 25 a link"),
    network=(50 * GIGA, "DGX H200: a 400 Gb/s adapter for each device"),
    host=63 * GIGA,
    node=(2048, 614.4 * GIGA, "DGX H200: 2 TB, two processors of eight DDR5-4800 channels"),
    matmul=(0.80, "measured: bf16 8192x8192x8192 of random numbers, 788 of 989 TFLOP/s"),
    memory=(0.90, "measured: a copy through PyTorch, 4.3 of 4.8 TB/s read plus written"),
    overhead=(Overhead(600 * MiB, GiB, _WORKSPACE_HOPPER), _NCCL_H),
    reported="h200",
    sheet=_H200,
)

_B200_180 = _nvlink(
    "B200-180GB",
    memory_gib=178.35,
    flops={
        "fp64": 40 * TERA,
        "fp32": 80 * TERA,
        "tf32": 1125 * TERA,
        "fp16": 2250 * TERA,
        "bf16": 2250 * TERA,
        "fp8": 4500 * TERA,
    },
    memory_bandwidth=7672 * GIGA,
    link=(900 * GIGA, 0.80, "SM100, 40.1 GB/s of 50 a link"),
    network=(50 * GIGA, "DGX B200: a 400 Gb/s adapter for each device"),
    host=63 * GIGA,
    node=(2048, 716.8 * GIGA, "DGX B200: 2 TB, two processors of eight DDR5-5600 channels"),
    matmul=(0.80, "assumed as on H200"),
    memory=(0.90, "assumed as on H200"),
    overhead=(Overhead(600 * MiB, GiB, _WORKSPACE_HOPPER), f"assumed as on H100: {_NCCL_H}"),
    reported="b200",
    sheet=_B200,
    source={
        "memory_bandwidth": "https://github.com/pytorch/ao/pull/4002 (7680 bits at 3996 MHz; the box: 8 TB/s)"
    },
)


def _card(
    name: str,
    memory_gib: float,
    flops: Mapping[str, float],
    bandwidth: float,
    network: float,
    node: tuple[int, float, str],
    matmul: float,
    reported: str,
    source: Mapping[str, str],
) -> DeviceProfile:
    """A PCIe gen 4 x16 card without a bridge: peers are reached through the host."""
    return DeviceProfile(
        name=name,
        kind="cuda",
        memory_bytes=int(memory_gib * GiB),
        flops=flops,
        memory_bandwidth=bandwidth,
        link_bandwidth=31.5 * GIGA,
        network_bandwidth=network,
        host_bandwidth=31.5 * GIGA,
        host_memory_bytes=node[0] * GiB // 8,
        host_memory_bandwidth=node[1] / 8,
        topology="host",
        node_devices=8,
        latency=_PCIE_LATENCY,
        efficiency=Efficiency(matmul=matmul, memory=0.90, link=0.32, network=0.90, host=0.80),
        overhead=Overhead(GiB // 2, 128 * MiB, _WORKSPACE),
        reported=(reported,),
        source={
            "memory_bytes": f"{_TOTAL}: {memory_gib} GiB",
            "link_bandwidth": "PCIe gen 4 x16, one direction",
            "host_bandwidth": "PCIe gen 4 x16, one direction",
            **dict.fromkeys(("host_memory_bytes", "host_memory_bandwidth"), node[2]),
            "latency": _TUNING,
            "efficiency.memory": _COPY,
            "efficiency.link": "torch._inductor.comm_analysis: PCIe, device to host to device, 10 GB/s",
            "efficiency.network": _NET,
            "efficiency.host": _PCIE_USE,
            "overhead.context_bytes": _CONTEXT,
            "overhead.communicator_bytes": "assumed: buffers of the few channels that PCIe warrants",
            "overhead.workspace_bytes": _CUBLAS,
            **source,
        },
    )


_L4_24 = _card(
    "L4-24GB",
    22.03,
    {
        "fp64": 0.49 * TERA,
        "fp32": 30.3 * TERA,
        "tf32": 60 * TERA,
        "fp16": 121 * TERA,
        "bf16": 121 * TERA,
        "fp8": 242.5 * TERA,
    },
    bandwidth=300 * GIGA,
    network=1.5625 * GIGA,
    node=(384, 204.8 * GIGA, "assumed: a server of 384 GiB, one processor of eight DDR4-3200 channels"),
    matmul=0.75,
    reported="l4",
    source={
        "flops": f"{_L4}; fp64 is 1/64 of fp32",
        "memory_bandwidth": _L4,
        "network_bandwidth": "assumed: 100 Gb/s for 8 devices",
        "efficiency.matmul": f"{_GEMMS}: 91.4 of 121",
    },
)

_RTX_4090 = _card(
    "RTX4090-24GB",
    23.64,
    {
        "fp64": 1.29 * TERA,
        "fp32": 82.6 * TERA,
        "tf32": 82.6 * TERA,
        "fp16": 165.2 * TERA,
        "bf16": 165.2 * TERA,
        "fp8": 330.3 * TERA,
    },
    bandwidth=1008 * GIGA,
    network=1.25 * GIGA,
    node=(512, 204.8 * GIGA, "assumed: 64 GiB for each of 8 cards, eight DDR4-3200 channels"),
    matmul=0.95,
    reported="rtx 4090",
    source={
        "flops": f"{_ADA}, fp32 accumulation",
        "memory_bandwidth": _ADA,
        "network_bandwidth": "assumed: 10 Gb/s a device",
        "efficiency.matmul": f"{_GEMMS}: 178.8 of 165.2, above the nominal clock; 0.95 kept",
    },
)

_MI300X_192 = DeviceProfile(
    name="MI300X-192GB",
    kind="rocm",
    memory_bytes=int(191.69 * GiB),
    flops={
        "fp64": 163.4 * TERA,
        "fp32": 163.4 * TERA,
        "tf32": 653.7 * TERA,
        "fp16": 1307.4 * TERA,
        "bf16": 1307.4 * TERA,
        "fp8": 2614.9 * TERA,
    },
    memory_bandwidth=5300 * GIGA,
    link_bandwidth=448 * GIGA,
    network_bandwidth=50 * GIGA,
    host_bandwidth=63 * GIGA,
    host_memory_bytes=2048 * GiB // 8,
    host_memory_bandwidth=614.4 * GIGA / 8,
    topology="mesh",
    node_devices=8,
    latency=_NVLINK_LATENCY,
    efficiency=Efficiency(matmul=0.60, memory=0.81, link=0.75, network=0.90, host=0.80),
    overhead=Overhead(600 * MiB, GiB, 2 * 128 * MiB),
    reported=("mi300x", "mi300x vf", "mi300x oam"),
    source={
        "memory_bytes": f"{_TOTAL}: 191.69 to 191.98 GiB",
        "flops": _MI300X,
        "memory_bandwidth": _MI300X,
        "link_bandwidth": _XGMI,
        "network_bandwidth": "Azure ND MI300X v5: one 400 Gb/s adapter a device",
        "host_bandwidth": f"{_MI300X}: PCIe gen 5 x16",
        "host_memory_bytes": "assumed: 2 TB, the least of the usual nodes",
        "host_memory_bandwidth": "assumed: two processors of eight DDR5-4800 channels",
        "latency": f"assumed as NVLink: {_TUNING}",
        "efficiency.matmul": f"{_MAMF}: 781.9 of 1300",
        "efficiency.memory": f"{_MI300X_USE}: 81 % of 5.3 TB/s",
        "efficiency.link": _XGMI,
        "efficiency.network": _NET,
        "efficiency.host": _PCIE_USE,
        "overhead.context_bytes": "assumed as on Hopper",
        "overhead.communicator_bytes": "assumed as on H100",
        "overhead.workspace_bytes": _CUBLAS,
    },
)

PROFILES: Mapping[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        _v100(16, 15.78),
        _v100(32, 31.74),
        _a100(40, 39.39, 1555 * GIGA),
        _a100(80, 79.15, 2039 * GIGA),
        _H100_80,
        _H200_141,
        _B200_180,
        _L4_24,
        _RTX_4090,
        _MI300X_192,
    )
}
"""Every accelerator known, by its full name."""

SHORT_NAMES: Mapping[str, str] = {
    "v100": "V100-32GB",
    "a100": "A100-80GB",
    "h100": "H100-80GB",
    "h200": "H200-141GB",
    "b200": "B200-180GB",
    "b200-192gb": "B200-180GB",
    "l4": "L4-24GB",
    "rtx4090": "RTX4090-24GB",
    "rtx-4090": "RTX4090-24GB",
    "4090": "RTX4090-24GB",
    "mi300x": "MI300X-192GB",
}
"""Lower-case shorthands; where a board came in two sizes, the larger."""
