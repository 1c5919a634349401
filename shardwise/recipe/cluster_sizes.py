"""A recipe on other numbers of devices of the same kind."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.hardware.cluster import Cluster
from shardwise.recipe.sections import Recipe

ClusterSize = tuple[int, int]
"""Nodes, and devices of each."""


def sizes(cluster: Cluster, most_nodes: int) -> Iterator[ClusterSize]:
    """Numbers of devices to try, the fewest first: divisors of a node's devices, then whole nodes by powers of two, up
    to ``most_nodes``. The cluster's own is among them."""
    node = cluster.devices_per_node
    yield from ((1, devices) for devices in range(1, node) if node % devices == 0)
    powers = {2**power for power in range(most_nodes.bit_length())}
    yield from ((nodes, node) for nodes in sorted({*powers, cluster.nodes}))


def resized(recipe: Recipe, cluster: Cluster, size: ClusterSize) -> Recipe:
    """The recipe on as many devices of its cluster's kind."""
    device = cluster.device
    name = device.kind if device.traits.is_host else device.file or device.name
    changed = {"preset": None, "device": name, "nodes": size[0], "devices_per_node": size[1]}
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=changed)})
