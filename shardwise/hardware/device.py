"""A device as the planner sees it: memory, FLOP/s, bandwidths and overheads. No torch.

Conventions, the same for every device:
  flops         dense FLOP/s of a matmul by dtype (a multiply-add is two). Since Hopper, vendors print figures
                "with sparsity": those are halved.
  memory_bytes  total memory as the driver reports it, which is less than the product name says.
  *_bandwidth   bytes/s of one device in one direction. Vendors add both directions of NVLink and PCIe: those
                are halved. Device memory counts bytes read plus bytes written.
  efficiency    the fraction of each peak that a large operation reaches in practice.

Peaks and efficiencies are separate figures: MFU needs the peak, the time model needs both. An efficiency is that of
large operations; effects of a shape belong to the time model (planner/kernel_time.py), whose figures are here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.hardware.kinds import DEVICE_KINDS, DeviceKind
from shardwise.hardware.measured import MeasuredSpeeds

RATED_DTYPES: tuple[str, ...] = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")

_FALLBACK = {"fp64": "fp32", "fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}
"""The dtype that a device computes in when it has no hardware support for the key."""


@dataclass(frozen=True)
class Overhead:
    """Device memory in bytes that no tensor of the model uses.

    Attributes:
        context_bytes: driver context and loaded kernels (CPU: the interpreter and its libraries). Outside
            PyTorch's allocator: it reduces the capacity, but ``max_memory_allocated`` does not count it. On a
            CPU it was allocated before the model, so the measured peak does not count it either.
        communicator_bytes: per communicator (process group). Outside the allocator.
        workspace_bytes: matmul workspaces, one each for the forward and the backward thread. PyTorch's
            allocator allocates them, so ``max_memory_allocated`` counts them.
    """

    context_bytes: int
    communicator_bytes: int
    workspace_bytes: int

    def outside_allocator(self, communicators: int) -> int:
        """Bytes of the capacity that the allocator's statistics do not show."""
        return self.context_bytes + communicators * self.communicator_bytes


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the peak, 0 to 1, that large operations reach.

    Attributes:
        attention: of the arithmetic peak, forward, with a head dimension of 128.
    """

    matmul: float
    memory: float
    link: float
    network: float
    host: float
    attention: float = 1.0


@dataclass(frozen=True)
class Tiles:
    """How products fill a device. The defaults mean that every shape is as efficient as a large one.

    Attributes:
        units: multiprocessors, each of which computes one tile of the result at a time; 0 for none.
        inner: beginning and ending a tile costs as much as so many steps along the summed dimension.
    """

    units: int = 0
    inner: float = 0.0


@dataclass(frozen=True)
class Launch:
    """Seconds that starting an operation takes.

    Attributes:
        floor: of the device, at least, for the smallest kernel.
        kernel: of the host, for each operation of an eager step; it runs ahead of the device.
        collective: of the host, for each collective.
    """

    floor: float = 2e-6
    kernel: float = 0.0
    collective: float = 0.0


@dataclass(frozen=True)
class Latency:
    """What a protocol of collectives takes beyond the bytes: NCCL has several, and chooses the fastest for a payload.

    Attributes:
        start: seconds to start a collective.
        hop, network_hop: seconds of a step to a neighbour in the node, and over the network.
        fraction: of a link's achieved bandwidth; flags within the data take the rest.
        message: seconds between two messages of a ring on a link of the network, whatever their size.
        tree: of a ring's bandwidth, what a tree reaches.
    """

    start: float
    hop: float
    network_hop: float
    fraction: float = 1.0
    message: float = 0.0
    tree: float = 0.9


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device.

    Attributes:
        kind: cpu | cuda | rocm | mps.
        topology: how devices of one node are connected. ``switch``: each pair at the full link bandwidth
            (NVSwitch, host memory). ``mesh``: the link bandwidth is the sum of the links to all others, so a
            group of n uses n-1 of them. ``host``: over PCIe and the CPU.
        node_devices: devices in a typical node.
        network_bandwidth: bytes/s of one device to other nodes, in one direction, in a typical node.
        host_bandwidth: bytes/s between host and device memory, in one direction.
        host_memory_bytes: host memory of a typical node, per device.
        host_memory_bandwidth: bytes/s, read plus written, of that memory, per device.
        disk_bandwidth: bytes/s to and bytes/s from a local disk, per device.
        reported: names that drivers report for the device, in lower case, without the vendor.
        attention: backends of attention in the order of preference (runtime/attention/backend.py).
        file: the user's file with the profile; "" for a profile of this package.
        source: figure -> where it comes from.
        measured: speeds by shape and size that were measured on this device; None where the time model has to use
            the peaks.
        measured_on: the day of that measurement.
        interference: seconds lost per second in which communication and computation overlap.
        latency, bulk: the protocols for small and for large payloads; None for one that serves all.
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
    disk_bandwidth: float
    topology: str
    node_devices: int
    latency: Latency
    efficiency: Efficiency
    overhead: Overhead
    reported: tuple[str, ...]
    source: Mapping[str, str] = field(hash=False, repr=False)
    attention: tuple[str, ...] = ()
    file: str = ""
    measured: MeasuredSpeeds | None = field(default=None, hash=False, repr=False)
    measured_on: str = ""
    tiles: Tiles = Tiles()
    launch: Launch = Launch()
    interference: float = 0.0
    bulk: Latency | None = None

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s in ``dtype``, or in its fallback where the device does not support ``dtype``.

        Raises KeyError for a word that is no dtype.
        """
        return self.flops[self.nearest(dtype)]

    def nearest(self, dtype: str) -> str:
        """``dtype``, or its fallback where the device does not support it.

        Raises KeyError for a word that is no dtype.
        """
        if dtype not in RATED_DTYPES:
            raise KeyError(dtype)
        while dtype not in self.flops:
            dtype = _FALLBACK[dtype]
        return dtype

    def supports(self, dtype: str) -> bool:
        """Whether the device has hardware support for ``dtype``."""
        return dtype in self.flops

    @property
    def calibrated_as(self) -> str:
        """The name under which speeds that were measured on this device are stored; "" if its driver's is not known.

        Files of users may have one name and describe different devices.
        """
        return next(iter(self.reported), "") if self.file else self.name

    @property
    def emulates(self) -> bool:
        """Whether PyTorch emulates dtypes that the device does not support."""
        return self.traits.is_host

    @property
    def traits(self) -> DeviceKind:
        """The properties of every device of its kind."""
        return DEVICE_KINDS[self.kind]
