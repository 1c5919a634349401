"""The hardware a plan is for: the device, the number of devices and nodes, and the bandwidth of process groups.

Names of clusters: `8xH100-80GB` is eight devices in one node, `16384xH100-80GB` is 2,048 such nodes,
`4x16xV100-32GB` is four nodes of sixteen, `h100` alone is one device. `cpu` is this machine. `cluster.device` may also
be a user's TOML file with the tables of a profile.

Ranks are numbered node by node. A group of `degree` ranks, `stride` apart, is inside one node or spans several.
`Cluster.link` gives its bandwidth and latency:
  - inside a node, the node's topology decides (NVSwitch, mesh, PCIe);
  - across nodes, the group uses one network adapter per member in a node, as NCCL's channels do, and is never
    faster than inside the node.

Each group has a bandwidth, and latencies in each of two protocols, for small and for large payloads. They give the time
of a ring, which passes every rank, and of a tree, which only all-reduces have; the fastest is taken, as NCCL does
(tuning.cc). Its LL128 protocol, between the two, is not modelled.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardwise.core.errors import RecipeError
from shardwise.core.paths import path_of
from shardwise.core.units import GiB
from shardwise.hardware.device import DeviceProfile, Latency
from shardwise.hardware.kinds import HOST
from shardwise.hardware.measured_gpu import with_measured
from shardwise.hardware.profiles import OWN, PROFILES, read_own_profile
from shardwise.hardware.this_machine import cpu_profile

MOST_DEVICES = 1_000_000
"""Of a cluster."""

_PRESET = re.compile(r"(?:([0-9]{1,7})\s*[xX×]\s*)?(?:([0-9]{1,7})\s*[xX×]\s*)?([A-Za-z0-9].*)", re.ASCII)
_MAKERS = ("nvidia", "tesla", "geforce", "amd", "instinct")


class ClusterRequest(Protocol):
    """The keys of the recipe's `cluster:` section that this module reads."""

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
    """Bandwidth and latency of one process group while all its ranks communicate.

    Attributes:
        degree: ranks in the group.
        nodes: nodes that the group spans.
        bandwidth: bytes/s out of each rank, for large payloads.
        latency: seconds of one pass around the ring with an empty payload.
        protocols: seconds of an empty payload and fraction of the bandwidth of each, for a pass around the ring.
        trees: the same for a pass up and down a tree.
    """

    degree: int
    nodes: int
    bandwidth: float
    latency: float
    protocols: tuple[tuple[float, float], ...]
    trees: tuple[tuple[float, float], ...] = ()

    def seconds(self, payload_bytes: float, rounds: int = 1) -> float:
        """Seconds of one collective with a full payload of ``payload_bytes``.

        ``rounds`` is 1 for all-gather and reduce-scatter, 2 for all-reduce. A ring takes
        rounds * (latency + (n-1)/n * payload / bandwidth) in the faster protocol (Thakur, Rabenseifner & Gropp 2005).
        A tree sends the whole payload twice.
        """
        if self.degree == 1:
            return 0.0
        whole = payload_bytes / self.bandwidth
        sent = (self.degree - 1) / self.degree * whole
        ring = rounds * min(latency + sent / fraction for latency, fraction in self.protocols)
        if rounds == 1:
            return ring
        return min(ring, *(latency + 2 * whole / fraction for latency, fraction in self.trees))


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
        """Memory of one device, including the part that context and communicators use (see Overhead)."""
        return self.device.memory_bytes

    @property
    def host_capacity_bytes(self) -> int:
        """Host memory per device; meaningful where it is separate from the device's memory."""
        return self.device.host_memory_bytes

    def link(self, degree: int, stride: int = 1) -> Link:
        """The link of a group of ``degree`` ranks, ``stride`` apart. Raises ValueError for numbers below 1."""
        if degree < 1 or stride < 1:
            raise ValueError(f"a group needs a positive degree and stride, found {degree} and {stride}")
        if degree == 1:
            return Link(1, 1, math.inf, 0.0, ())
        members = self._members_in_node(degree, stride)
        nodes = math.ceil(degree / members)
        inside = self._inside_bandwidth(members)
        if nodes == 1:
            return self._linked(degree, members, 1, inside)
        return self._linked(degree, members, nodes, min(inside, members * self._adapter))

    def _linked(self, degree: int, members: int, nodes: int, bandwidth: float) -> Link:
        device = self.device
        used = [device.latency] if device.bulk is None else [device.latency, device.bulk]
        protocols = tuple((_ring_seconds(protocol, degree, nodes), protocol.fraction) for protocol in used)
        trees = tuple(
            (_tree_seconds(protocol, members, nodes), protocol.tree * protocol.fraction) for protocol in used
        )
        return Link(degree, nodes, bandwidth, protocols[0][0], protocols, trees)

    def seconds_to_next(self, payload_bytes: float, degree: int, stride: int = 1) -> float:
        """Seconds for every rank to send ``payload_bytes`` to the next rank: one step of a ring.

        Between nodes, one adapter carries the payload and the node's other adapters are idle.
        """
        link = self.link(degree, stride)
        if degree == 1:
            return 0.0
        bandwidth = link.bandwidth if link.nodes == 1 else min(link.bandwidth, self._adapter)
        return link.latency / (degree - 1) + payload_bytes / bandwidth

    def seconds_to_all(self, payload_bytes: float, degree: int, stride: int = 1) -> float:
        """Seconds of one all-to-all in which every rank sends ``payload_bytes`` in equal parts.

        Parts for other nodes use the rank's own adapter, at the same time as parts inside the node.
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
        """Ranks of a group that share a node, in the worst placed group.

        Where groups and nodes do not align (degree 4 on nodes of 6), this is 1.
        """
        node = self.devices_per_node
        span = degree * stride
        if self.nodes == 1 or node % span == 0:
            return degree
        return node // stride if node % stride == 0 and span % node == 0 else 1

    def _inside_bandwidth(self, members: int) -> float:
        """Bytes/s of a device to ``members - 1`` others in its node; infinite for ``members`` 1."""
        if members == 1:
            return math.inf
        reached = self.device.link_bandwidth * self.device.efficiency.link
        if self.device.topology == "mesh":
            reached *= min(1.0, (members - 1) / (self.device.node_devices - 1))
        return reached


def _ring_seconds(step: Latency, degree: int, nodes: int) -> float:
    """Seconds of ``degree`` - 1 steps: one leaves each node but the last. A link carries a message in every step."""
    path = (degree - nodes) * step.hop + (nodes - 1) * step.network_hop
    return step.start + max(path, (degree - 1) * step.message if nodes > 1 else 0.0)


def _tree_seconds(step: Latency, members: int, nodes: int) -> float:
    """Seconds up and down a chain in each node and a binary tree of nodes."""
    return step.start + 2 * ((members - 1) * step.hop + math.ceil(math.log2(nodes)) * step.network_hop)


def device_profile(name: str) -> DeviceProfile | None:
    """The profile of an accelerator by full or short name, or in a user's file; None for `cpu`.

    Raises ValueError with a message.
    """
    if name.endswith(OWN):
        return read_own_profile(path_of(name))
    word = re.sub(r"[\s_]+", "-", name.strip().lower())
    for maker in _MAKERS:
        word = word.removeprefix(f"{maker}-")
    if word == HOST.name:
        return None
    full = {known.lower(): known for known in PROFILES}
    if word not in full:
        full |= PROFILES.short_names()
    if word in full:
        return PROFILES[full[word]]
    near = difflib.get_close_matches(word, ["cpu", *full], n=1, cutoff=0.5)
    meant = f"did you mean {full.get(near[0], near[0])!r}? " if near else ""
    known = "docs/reference/presets.md lists the names; for another, name a file such as my-card.toml"
    raise ValueError(f"unknown device {name[:40]!r}; {meant}{known}")


def parse_preset(text: str) -> tuple[int, int, DeviceProfile | None]:
    """(nodes, devices per node, device) of `NAME`, `COUNTxNAME` or `NODESxCOUNTxNAME`; None is the CPU.

    A count above the devices of a typical node is split into such nodes. Raises ValueError with a message.
    """
    match = _PRESET.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected COUNTxDEVICE such as 8xH100-80GB, found {text[:40]!r}")
    first, second, name = match.groups()
    if name.endswith(OWN):
        raise ValueError(
            f"a preset names no file; write cluster: {{device: {name}, devices_per_node: {first or 1}}}"
        )
    counts = [int(count) for count in (first, second) if count is not None]
    device = device_profile(name)
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
    """The profile of a device by the name that its driver reports (`NVIDIA H100 80GB HBM3`); None if unknown."""
    word = without_maker(reported)
    return next((profile for profile in PROFILES.values() if word in profile.reported), None)


def without_maker(reported: str) -> str:
    """A driver's name of a device as profiles have it: `h100 80gb hbm3`."""
    word = reported.strip().lower()
    for maker in _MAKERS:
        word = word.removeprefix(f"{maker} ")
    return word


def cluster_of(request: ClusterRequest) -> Cluster:
    """The cluster of a recipe: this machine's CPU unless a preset or device is given.

    With a preset, `nodes` multiplies the preset's nodes. Raises RecipeError.
    """
    where = "cluster.device"
    nodes = request.nodes
    per_node = request.devices_per_node
    try:
        if request.preset is None:
            device = device_profile(request.device or "cpu")
        else:
            where = "cluster.preset"
            preset_nodes, preset_devices, device = parse_preset(request.preset)
            _refuse_conflicts(request, preset_devices)
            nodes *= preset_nodes
            per_node = preset_devices
    except ValueError as problem:
        what, _, rest = str(problem).partition("; ")
        raise RecipeError(what, where=where, fix=rest) from None
    if nodes * per_node > MOST_DEVICES:
        raise RecipeError(
            f"more than {MOST_DEVICES:,} devices",
            where=where if request.preset is not None else "cluster.nodes",
            why=f"{nodes:,} nodes of {per_node:,} are {nodes * per_node:,}",
            fix="lower cluster.nodes or devices_per_node",
        )
    profile = cpu_profile(per_node) if device is None else with_measured(device)
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
    """The profile with another amount of ``which`` memory: "memory" or "host_memory"."""
    key, figure = f"{which}_gib", f"{which}_bytes"
    if not (math.isfinite(gib) and gib > 0):
        raise RecipeError(f"{key} must be positive, found {gib}", where=f"cluster.{key}")
    source: Mapping[str, str] = {**profile.source, figure: f"cluster.{key} of the recipe"}
    sizes: dict[str, Any] = {figure: int(gib * GiB)}
    return replace(profile, source=source, **sizes)
