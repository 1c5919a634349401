"""What a device is to the planner: memory, arithmetic, bandwidths and overheads. No torch.

Conventions, the same for every device:
  flops         dense FLOP/s of a matrix product by dtype (a multiply-add is two). Vendors since Hopper print
                figures "with sparsity": those are halved.
  memory_bytes  what the driver reports as total, not what the box says.
  *_bandwidth   bytes/s of one device in one direction. Vendors add both directions of NVLink and PCIe: those
                are halved. Device memory counts bytes read plus bytes written.
  efficiency    the fraction of each of these that a large operation reaches in practice.

Chosen: peaks and efficiencies apart, so that MFU keeps the denominator that everyone prints and the time
model uses what hardware does. The price is one efficiency for all shapes; what depends on a shape is the
time model's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DTYPES: tuple[str, ...] = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")

_FALLBACK = {"fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}
"""What a device computes in when it has no units for a dtype."""


_DISK = "assumed for every device: an NVMe drive each, 1 GB/s sustained one way and the other at once"


@dataclass(frozen=True)
class Overhead:
    """Device memory that no tensor of the model holds, bytes.

    Attributes:
        context_bytes: driver context and loaded kernels (CPU: the interpreter and its libraries). Outside
            PyTorch's allocator: it takes from the capacity but is in neither ``max_memory_allocated`` nor the
            rise of a process over its level before the model.
        communicator_bytes: of each communicator, that is, process group. Outside the allocator.
        workspace_bytes: matrix-product workspaces, one for the forward and one for the backward thread.
            Allocated through PyTorch's allocator, hence part of ``max_memory_allocated``.
    """

    context_bytes: int
    communicator_bytes: int
    workspace_bytes: int

    def outside_allocator(self, communicators: int) -> int:
        """Bytes taken from the capacity that the allocator's statistics never show."""
        return self.context_bytes + communicators * self.communicator_bytes


@dataclass(frozen=True)
class Efficiency:
    """Fractions of peak, 0 to 1, that large operations reach."""

    matmul: float
    memory: float
    link: float
    network: float
    host: float


@dataclass(frozen=True)
class Latency:
    """Seconds: to start a collective, for a step to a neighbour in the node, for a step over the network."""

    start: float
    hop: float
    network_hop: float


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device.

    Attributes:
        kind: cpu | cuda | rocm.
        topology: how devices of one node reach each other. ``switch``: each pair at the full link bandwidth
            (NVSwitch, host memory). ``mesh``: the link bandwidth is the sum of links to each of the others, a
            group of n uses n-1 of them. ``host``: through PCIe and the processor.
        node_devices: how many the usual node holds.
        network_bandwidth: bytes/s of one device to other nodes, one direction, in the usual node.
        host_bandwidth: bytes/s between host and device memory, one direction.
        host_memory_bytes: memory of the processors of the usual node, for each of its devices.
        host_memory_bandwidth: bytes/s, read plus written, of those processors, for each device.
        disk_bandwidth: bytes/s to, and bytes/s from, a local disk, for each device of a node.
        reported: names by which drivers report the device, lower case, without the maker.
        source: figure -> where it is from.
    """

    name: str
    kind: str
    memory_bytes: int
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    host_memory_bytes: int
    host_memory_bandwidth: float
    topology: str
    node_devices: int
    latency: Latency
    efficiency: Efficiency
    overhead: Overhead
    reported: tuple[str, ...]
    source: Mapping[str, str] = field(hash=False, repr=False)
    disk_bandwidth: float = 1e9

    def __post_init__(self) -> None:
        if "disk_bandwidth" not in self.source:
            object.__setattr__(self, "source", {**self.source, "disk_bandwidth": _DISK})

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s in ``dtype``; where the device has no units for it, in the dtype it falls back to.

        Raises KeyError for a word that is no dtype.
        """
        return self.flops[self.nearest(dtype)]

    def nearest(self, dtype: str) -> str:
        """``dtype``, or what it falls back to where the device has no units for it.

        Raises KeyError for a word that is no dtype.
        """
        if dtype not in DTYPES:
            raise KeyError(dtype)
        while dtype not in self.flops:
            dtype = _FALLBACK[dtype]
        return dtype

    def supports(self, dtype: str) -> bool:
        """Whether the device has units for ``dtype`` (it can otherwise emulate it, slowly)."""
        return dtype in self.flops

    @property
    def emulates(self) -> bool:
        """Whether PyTorch computes on it in dtypes that it has no units for."""
        return self.kind == "cpu"
