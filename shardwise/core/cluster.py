"""The hardware a plan is for: which device, how many, in how many nodes, and what a group of ranks can send.

A cluster is named as people name it: `8xH100-80GB` is eight of them in one node, `16384xH100-80GB` is 2,048
such nodes, `4x16xV100-32GB` is four nodes of sixteen, `h100` alone is a device. `cpu` is this machine.

Ranks are numbered node by node. A group of `degree` ranks, `stride` apart, sits inside a node or spans
several, and `Cluster.link` says what that means in bytes per second and seconds:
  - inside a node, what the node's topology allows (NVSwitch, mesh, PCIe);
  - across nodes, as many adapters carry the traffic as the group has members in a node (so do NCCL's
    channels), and it is never faster than inside the node.

Chosen: one bandwidth and one latency for each group, from which a ring time follows. Refused: NCCL's whole
tuning table with its protocols and algorithms; the price is that 0.1 to 10 MB come out too fast.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardwise.core.device import DTYPES, DeviceProfile, Efficiency, Latency, Overhead
from shardwise.core.device_profiles import PROFILES, SHORT_NAMES
from shardwise.core.errors import RecipeError
from shardwise.core.machine import cpu_profile
from shardwise.core.units import GiB

__all__ = [
    "DEVICE_NAMES",
    "DTYPES",
    "PROFILES",
    "Cluster",
    "ClusterRequest",
    "DeviceProfile",
    "Efficiency",
    "Latency",
    "Link",
    "Overhead",
    "cluster_of",
    "device_named",
    "parse_preset",
    "recognise",
]

DEVICE_NAMES: tuple[str, ...] = ("cpu", *PROFILES)
"""Full names, as `cluster.device` and the part of `cluster.preset` after the count accept them."""

_PRESET = re.compile(r"(?:([0-9]{1,7})\s*[xX×]\s*)?(?:([0-9]{1,7})\s*[xX×]\s*)?([A-Za-z0-9].*)", re.ASCII)
_MAKERS = ("nvidia", "tesla", "geforce", "amd", "instinct")


class ClusterRequest(Protocol):
    """The recipe's `cluster:` section, as far as this module reads it."""

    @property
    def preset(self) -> str | None: ...
    @property
    def device(self) -> str | None: ...
    @property
    def nodes(self) -> int: ...
    @property
    def devices_per_node(self) -> int: ...
    @property
    def memory_gib(self) -> float | None: ...
    @property
    def host_memory_gib(self) -> float | None: ...


@dataclass(frozen=True)
class Link:
    """What each rank of one group can send while all of the group communicate.

    Attributes:
        degree: ranks in the group.
        nodes: nodes that the group spans.
        bandwidth: bytes/s out of each rank, reached with large payloads.
        latency: seconds that a pass around the group takes with nothing to send.
    """

    degree: int
    nodes: int
    bandwidth: float
    latency: float

    def seconds(self, payload_bytes: float, rounds: int = 1) -> float:
        """Time of one collective whose full payload is ``payload_bytes``, in the ring convention.

        ``rounds`` is 1 for all-gather, reduce-scatter and all-to-all, 2 for all-reduce:
        rounds * (latency + (n-1)/n * payload / bandwidth). (Thakur, Rabenseifner & Gropp 2005.)
        """
        if self.degree == 1:
            return 0.0
        share = (self.degree - 1) / self.degree
        return rounds * (self.latency + share * payload_bytes / self.bandwidth)


@dataclass(frozen=True)
class Cluster:
    """``nodes`` equal nodes of ``devices_per_node`` equal devices.

    ``network_bandwidth`` is bytes/s of one device to other nodes, one direction.
    """

    name: str
    device: DeviceProfile
    nodes: int
    devices_per_node: int
    network_bandwidth: float

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device; what context and communicators take is not subtracted (see Overhead)."""
        return self.device.memory_bytes

    @property
    def host_capacity_bytes(self) -> int:
        """Host memory for each device, where that is another memory than the device's."""
        return self.device.host_memory_bytes

    def link(self, degree: int, stride: int = 1) -> Link:
        """What a group of ``degree`` ranks, ``stride`` apart, can send. Raises ValueError below 1."""
        if degree < 1 or stride < 1:
            raise ValueError(f"a group needs a positive degree and stride, found {degree} and {stride}")
        if degree == 1:
            return Link(1, 1, math.inf, 0.0)
        members = self._members_in_node(degree, stride)
        nodes = math.ceil(degree / members)
        inside = self._inside_bandwidth(members)
        if nodes == 1:
            return Link(degree, 1, inside, self._latency(members, 1))
        adapters = members * self._adapter
        return Link(degree, nodes, min(inside, adapters), self._latency(members, nodes))

    def seconds_to_next(self, payload_bytes: float, degree: int, stride: int = 1) -> float:
        """Time in which every rank of a group sends this much to the next one: one step of a ring.

        From node to node it goes through one adapter, while the others of the node wait.
        """
        link = self.link(degree, stride)
        if degree == 1:
            return 0.0
        bandwidth = link.bandwidth if link.nodes == 1 else min(link.bandwidth, self._adapter)
        return link.latency / (degree - 1) + payload_bytes / bandwidth

    def seconds_to_all(self, payload_bytes: float, degree: int, stride: int = 1) -> float:
        """Time in which every rank of a group gives each an equal part of this much: one all-to-all.

        Parts for other nodes go through the rank's own adapter, beside those that stay inside.
        """
        if degree == 1:
            return 0.0
        link, members = self.link(degree, stride), self._members_in_node(degree, stride)
        inside = (members - 1) / degree * payload_bytes / self._inside_bandwidth(members)
        outside = (degree - members) / degree * payload_bytes / self._adapter if members < degree else 0.0
        return link.latency + max(inside, outside)

    @property
    def _adapter(self) -> float:
        return self.network_bandwidth * self.device.efficiency.network

    def _members_in_node(self, degree: int, stride: int) -> int:
        """Ranks of each group that share a node, in the least favourable group.

        Where groups and nodes do not align (degree 4 on nodes of 6), some group has a lone member: 1.
        """
        node = self.devices_per_node
        span = degree * stride
        if self.nodes == 1 or node % span == 0:
            return degree
        return node // stride if node % stride == 0 and span % node == 0 else 1

    def _inside_bandwidth(self, members: int) -> float:
        """Bytes/s of a device to ``members - 1`` others in its node; unbounded when it is alone there."""
        if members == 1:
            return math.inf
        reached = self.device.link_bandwidth * self.device.efficiency.link
        if self.device.topology == "mesh":
            reached *= min(1.0, (members - 1) / (self.device.node_devices - 1))
        return reached

    def _latency(self, members: int, nodes: int) -> float:
        """A pass around the node, and the faster of a ring and a tree between nodes."""
        step = self.device.latency
        between = min(nodes - 1, 2 * math.ceil(math.log2(nodes))) * step.network_hop
        return step.start + (members - 1) * step.hop + between


def device_named(name: str) -> DeviceProfile | None:
    """The profile of an accelerator by full name or shorthand; None for `cpu`. Raises ValueError in words."""
    word = re.sub(r"[\s_]+", "-", name.strip().lower())
    for maker in _MAKERS:
        word = word.removeprefix(f"{maker}-")
    if word == "cpu":
        return None
    full = {known.lower(): known for known in PROFILES} | dict(SHORT_NAMES)
    if word in full:
        return PROFILES[full[word]]
    near = difflib.get_close_matches(word, ["cpu", *full], n=1, cutoff=0.5)
    meant = f"did you mean {full.get(near[0], near[0])!r}? " if near else ""
    raise ValueError(f"unknown device {name[:40]!r}; {meant}known: {', '.join(DEVICE_NAMES)}")


def parse_preset(text: str) -> tuple[int, int, DeviceProfile | None]:
    """(nodes, devices per node, device) of `NAME`, `COUNTxNAME` or `NODESxCOUNTxNAME`; None is the CPU.

    A count above what the usual node holds is split into such nodes. Raises ValueError in words.
    """
    match = _PRESET.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected COUNTxDEVICE such as 8xH100-80GB, found {text[:40]!r}")
    first, second, name = match.groups()
    counts = [int(count) for count in (first, second) if count is not None]
    device = device_named(name)
    if 0 in counts:
        raise ValueError(f"a count of 0 in {text[:40]!r}")
    if len(counts) == 2:
        return counts[0], counts[1], device
    count = counts[0] if counts else 1
    if device is None or count <= device.node_devices:
        return 1, count, device
    if count % device.node_devices:
        raise ValueError(
            f"{count} is not a multiple of the {device.node_devices} devices of a node;"
            f" write NODESxDEVICESx{device.name}"
        )
    return count // device.node_devices, device.node_devices, device


def recognise(reported: str) -> DeviceProfile | None:
    """The profile of what a driver calls ``reported`` (`NVIDIA H100 80GB HBM3`); None if not known."""
    word = reported.strip().lower()
    for maker in _MAKERS:
        word = word.removeprefix(f"{maker} ")
    return next((profile for profile in PROFILES.values() if word in profile.reported), None)


def cluster_of(request: ClusterRequest) -> Cluster:
    """The cluster that a recipe asks for. Neither preset nor device means the CPU of this machine.

    With a preset, `nodes` multiplies the preset's. Raises RecipeError.
    """
    where, nodes, per_node = "cluster.device", request.nodes, request.devices_per_node
    try:
        if request.preset is None:
            device = device_named(request.device or "cpu")
        else:
            where = "cluster.preset"
            preset_nodes, preset_devices, device = parse_preset(request.preset)
            _refuse_conflicts(request, preset_devices)
            nodes, per_node = nodes * preset_nodes, preset_devices
    except ValueError as problem:
        what, _, rest = str(problem).partition("; ")
        raise RecipeError(what, where=where, fix=rest) from None
    profile = device or cpu_profile(per_node)
    if request.memory_gib is not None:
        profile = _with_memory(profile, "memory", request.memory_gib)
    if request.host_memory_gib is not None:
        profile = _with_memory(profile, "host_memory", request.host_memory_gib)
    name = f"{per_node}x{profile.name}" if nodes == 1 else f"{nodes}x{per_node}x{profile.name}"
    return Cluster(name, profile, nodes, per_node, profile.network_bandwidth)


def _refuse_conflicts(request: ClusterRequest, preset_devices: int) -> None:
    if request.device is not None:
        raise ValueError("preset and device are both given; keep one")
    if request.devices_per_node not in (1, preset_devices):
        raise ValueError(
            f"the preset has {preset_devices} devices in a node, devices_per_node says"
            f" {request.devices_per_node}; keep one"
        )


def _with_memory(profile: DeviceProfile, which: str, gib: float) -> DeviceProfile:
    """The profile with ``which`` memory, memory or host_memory, of so many GiB."""
    key, figure = f"{which}_gib", f"{which}_bytes"
    if not (math.isfinite(gib) and gib > 0):
        raise RecipeError(f"{key} must be positive, found {gib}", where=f"cluster.{key}")
    source: Mapping[str, str] = {**profile.source, figure: f"cluster.{key} of the recipe"}
    sizes: dict[str, Any] = {figure: int(gib * GiB)}
    return replace(profile, source=source, **sizes)
